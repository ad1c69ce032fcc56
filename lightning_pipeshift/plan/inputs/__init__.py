"""The inputs of a plan: machines, the measured model, policies, placements."""
