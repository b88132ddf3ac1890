"""What a request asked: its prompt, for whoever wants to read it."""
