"""Runs what the README and the pages of ``docs`` show: Python, commands and files."""
