"""What capture relies on in vLLM, held against the source in a wheel that is neither installed nor imported."""
