"""What is called what in two engines, as data."""
