"""Two machines' csv files, both against the CPU, joined into a verdict for every output."""
