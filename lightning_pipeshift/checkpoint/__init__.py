"""Checkpoints: files and folders that do not depend on the placement."""
