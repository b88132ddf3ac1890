"""Which failed pairs are told first: one of each cause."""
