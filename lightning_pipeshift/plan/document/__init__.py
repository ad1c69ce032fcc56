"""Plans as values, on disk, and as text."""
