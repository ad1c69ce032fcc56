"""One rank's part of a step."""
