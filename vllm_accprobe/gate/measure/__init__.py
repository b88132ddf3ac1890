"""Two folders of `send`: how far log-probabilities are apart, against how far a server is apart from itself."""
