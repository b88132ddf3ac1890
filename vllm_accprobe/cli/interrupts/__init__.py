"""Ctrl-C: that it arrives, and what is said of what was kept."""
