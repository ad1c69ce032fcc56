"""The tests, and what several of them use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
