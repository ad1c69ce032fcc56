"""The Lightning-facing classes: their hooks delegate to the runtime."""
