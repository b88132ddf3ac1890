"""Taps where no module boundary is: a TOML file names a function and a place in it; see docs/capture.md."""
