"""Weights over their life: fingerprints after each event, made where the weights lie."""
