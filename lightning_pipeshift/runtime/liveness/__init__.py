"""Failures: ranks that raise, die or wait for too long."""
