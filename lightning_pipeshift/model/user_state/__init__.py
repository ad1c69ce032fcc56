"""State of user code: attributes, logged values, metrics."""
