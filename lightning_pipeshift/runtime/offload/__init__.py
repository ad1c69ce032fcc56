"""Saved tensors in other memory: the host's, or another device's."""
