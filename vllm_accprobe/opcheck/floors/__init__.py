"""What a right kernel may do: bounds, chance, and the ways in which a result is rounded."""
