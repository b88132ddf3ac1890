"""Writes one rank's part of a dump while the model runs: blocks, threads, lines, budget."""
