"""The tensors that autograd saves for the backward: kept, moved, compressed, recomputed."""
