"""One microbatch on one stage: the pass, the batch, its timing."""
