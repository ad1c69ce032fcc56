"""Callbacks for a Trainer, with which layers change their owners."""
