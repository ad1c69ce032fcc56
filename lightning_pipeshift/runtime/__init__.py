"""What moves, and when: the ranks of a run."""
