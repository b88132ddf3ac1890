"""A trainer's log-probabilities as golden: train against rollout."""
