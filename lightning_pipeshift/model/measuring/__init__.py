"""Measures the seconds and the bytes of layers."""
