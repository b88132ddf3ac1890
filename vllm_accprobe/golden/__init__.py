"""Golden packs: a golden in one file of a few megabytes. pack.py has the idea."""
