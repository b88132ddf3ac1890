"""References of operators on numbers that are kept as small codes with scales."""
