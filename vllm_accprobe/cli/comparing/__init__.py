"""What `accprobe compare` does with a pair of dumps, and with a series of them."""
