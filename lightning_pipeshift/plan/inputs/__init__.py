"""What a plan is made from: machines, the measured model, policies, placements."""
