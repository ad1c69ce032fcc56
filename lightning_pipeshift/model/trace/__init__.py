"""Traces the user's step once, and records the flow of its tensors."""
