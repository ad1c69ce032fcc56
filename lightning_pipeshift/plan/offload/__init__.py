"""Offloading: which saved tensors move to the host or to another device, and when."""
