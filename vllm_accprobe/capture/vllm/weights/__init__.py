"""Which calls of vLLM change weights, and what they change."""
