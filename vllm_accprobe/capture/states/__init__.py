"""The ledger of states: whether what a kernel reads of a cache is what was written there (docs/state-checks.md)."""
