"""Schedules: the actions of each stage, the communication between them, and their checker."""
