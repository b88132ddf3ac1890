"""From units to plain numbers: rows are read, brought together and measured, by threads of one process."""
