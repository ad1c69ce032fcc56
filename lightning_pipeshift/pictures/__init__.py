"""Pictures of a run, drawn with matplotlib (the extra ``pictures``)."""
