"""The lines of a rank's journal: how an event becomes one, and how one becomes an event again, trusting nothing."""
