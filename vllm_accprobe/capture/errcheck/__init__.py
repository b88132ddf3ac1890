"""errcheck: the first NaN, Inf or overflow of a running model, found as it appears."""
