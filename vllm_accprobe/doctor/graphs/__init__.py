"""Proof that looking changes nothing: one command run several times, with taps and without, and its bits compared."""
