"""Schedules: the actions of each stage, and the communication between them."""
