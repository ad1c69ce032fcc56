"""Steps that are suspended."""
