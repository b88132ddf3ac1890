"""What an honest kernel may do: bounds, chance, and the ways in which a result is rounded."""
