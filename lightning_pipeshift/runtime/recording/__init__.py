"""Records what every rank does in a step, and gathers it on one clock."""
