"""What Python processes that errcheck watches find first on their path."""
