"""What `accprobe compare` does with a pair of dumps."""
