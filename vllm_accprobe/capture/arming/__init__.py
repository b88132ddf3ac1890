"""A capture that is switched on and off, and aimed anew, while the server runs."""
