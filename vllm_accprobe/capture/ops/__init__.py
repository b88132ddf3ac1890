"""Operator taps: every call of ``torch.ops.*`` in armed steps, by dispatch."""
