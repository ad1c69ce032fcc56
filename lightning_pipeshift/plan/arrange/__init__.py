"""Arrangements: virtual machines, the order of their devices, microbatches, batch shares."""
