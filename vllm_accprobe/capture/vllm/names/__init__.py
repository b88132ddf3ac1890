"""What capture relies on in vLLM, as data: one declaration, beside the code that touches it."""
