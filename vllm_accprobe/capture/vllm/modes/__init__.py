"""What vLLM's modes add to a capture: adapters' weights, draft models, prompts that are embeddings."""
