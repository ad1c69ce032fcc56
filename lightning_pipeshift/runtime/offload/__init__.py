"""Offloading of saved tensors to the host's memory or to another device."""
