"""Captured calls that can be run again: from module records, operator records, files, or drawn."""
