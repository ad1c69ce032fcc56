"""The search for a plan: virtual machines, their stages, and which saved tensors move."""
