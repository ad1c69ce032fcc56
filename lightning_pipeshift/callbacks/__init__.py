"""Callbacks: what a user hangs into a Trainer to let layers change their owners."""
