"""Equal numbers of layers on all stages."""

from lightning_pipeshift.errors import PartitionError


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Counts as equal as possible; if they cannot be equal, the first stages take one more.

    The first and not the last, because the last stage also runs the code after the last layer, such
    as the loss and the metrics; and because array libraries split in this way. With fewer layers
    than stages, the last stages stay empty.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages; there is at least 1")
    count, extra = divmod(num_layers, num_stages)
    return tuple(count + (stage < extra) for stage in range(num_stages))
