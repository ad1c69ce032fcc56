"""Timelines of steps: what ran when on every stage, as recorded, and as the plan expected it.

Nothing here imports torch or Lightning: recordings are files that any machine can read.
"""
