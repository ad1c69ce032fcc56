"""A device that computes asynchronously, for tests on a machine without a GPU."""
