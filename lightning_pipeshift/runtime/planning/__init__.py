"""Plans of a run: from measurements at its start, and again while it runs."""
