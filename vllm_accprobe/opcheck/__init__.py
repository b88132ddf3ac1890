"""Operators run again against a reference: is the kernel wrong, by how much, with which input."""
