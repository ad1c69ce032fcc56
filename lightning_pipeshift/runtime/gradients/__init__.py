"""Sums of gradients over the virtual machines."""
