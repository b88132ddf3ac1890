"""Fused operators of torch_npu, by every name that a dump may give them, with their gradients."""
