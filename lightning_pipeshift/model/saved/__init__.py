"""The tensors that autograd saves for the backward: kept, offloaded, compressed, recomputed."""
