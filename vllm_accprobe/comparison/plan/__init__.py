"""What will be compared with what, before any tensor is read: units, rows, coverage."""
