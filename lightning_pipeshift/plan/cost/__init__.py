"""Predictions: the time and memory of a plan, by simulation."""
