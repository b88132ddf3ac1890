"""The pipeline: a plan of what is compared with what, the engine that does it, the result that is read."""
