"""``accprobe compare`` with a replay: when operators are run again, and the process that does it."""
