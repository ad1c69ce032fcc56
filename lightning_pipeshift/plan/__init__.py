"""Plans, made before anything runs: pure values and functions.

Nothing here imports torch or Lightning, so that every decision can be printed, saved, compared and
tested without a process group.
"""
