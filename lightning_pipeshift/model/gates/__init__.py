"""Layers, and the gate in front of each."""
