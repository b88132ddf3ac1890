"""References of operators that carry a state from token to token: delta rule, selective scans, short convolutions."""
