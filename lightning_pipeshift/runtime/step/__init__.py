"""The steps of one rank."""
