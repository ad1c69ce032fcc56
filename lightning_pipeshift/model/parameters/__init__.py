"""Parameters: the layers that use them, parameters on other stages, models that are initialised
later.
"""
