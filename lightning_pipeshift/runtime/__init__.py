"""Everything that runs on the ranks: communication, gradients, ownership of layers, offloading,
planning and steps.
"""
