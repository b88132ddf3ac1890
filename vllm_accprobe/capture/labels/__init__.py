"""What ``set_label`` does while something captures: a model's session, or a plain script's."""
