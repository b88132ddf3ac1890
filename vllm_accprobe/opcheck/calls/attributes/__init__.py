"""Attributes of modules that a dump does not tell: named by the user, in config.json, or fitted."""
