"""Cuts: which stage gets which layers, and which layers are recomputed."""
