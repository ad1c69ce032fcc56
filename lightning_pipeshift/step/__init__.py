"""The steps of training: microbatches in the order of a schedule, any of which may have to wait."""
