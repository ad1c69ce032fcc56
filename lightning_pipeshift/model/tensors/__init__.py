"""Tensors in structures: taken apart, on their way to and from the host, cut into microbatches."""
