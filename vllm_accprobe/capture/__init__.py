"""Inside the model's process: decide what is captured, take it, hand it to the dump. Knows nothing of comparing."""
