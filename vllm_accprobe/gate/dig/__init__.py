"""From a gate that failed to the operator: both sides once more, with a capture of just its worst tokens."""
