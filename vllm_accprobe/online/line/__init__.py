"""Calls over a connection: who may speak, and what holds when it breaks."""
