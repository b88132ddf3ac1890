"""A vLLM worker: the only room that knows vLLM. What is a step, which rows it has, how layers are cut."""
