"""Tokens that a client names in place of those that the server would choose, and a line for each engine step."""
