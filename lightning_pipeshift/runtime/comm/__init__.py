"""Connections between ranks."""
