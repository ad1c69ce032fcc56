"""Which stage holds which tensors, and how layers move to other owners."""
