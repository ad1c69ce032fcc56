"""Layers, and the gate that handles the calls of each."""
