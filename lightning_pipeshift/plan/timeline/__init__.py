"""Timelines of a step: what ran when on every stage, measured or expected."""
