"""Precision plugins: a memory budget around each step, and decisions over all stages."""
