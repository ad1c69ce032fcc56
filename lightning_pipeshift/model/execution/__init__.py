"""The execution of one microbatch on one stage: the forward pass, the batch, its timing."""
