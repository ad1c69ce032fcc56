"""Cuts: the layers of each stage, and the layers that are recomputed."""
