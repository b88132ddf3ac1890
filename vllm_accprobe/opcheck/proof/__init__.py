"""Replay as a witness in a comparison: who is wrong for its own inputs."""
