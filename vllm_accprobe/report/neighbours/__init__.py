"""What fed an origin and what it feeds, in words and as a drawing's numbers."""
