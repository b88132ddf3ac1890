"""The same capture on any torch model outside vLLM: its rows, its images."""
