"""Parameters: who uses them, values on other stages, models that are built later."""
