"""The client of a capture and of a gate: the same prompts to a server, and a folder with the answers."""
