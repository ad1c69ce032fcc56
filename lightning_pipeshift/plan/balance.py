"""As many layers on every stage."""

from lightning_pipeshift.errors import PartitionError


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As equal counts as possible; where it doesn't come out even, the first take one more.

    The first and not the last, because the last stage also runs what follows the last layer, the
    loss and the metrics; and because every array library splits so. With fewer layers than stages,
    the last stages stay empty.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages; there is at least 1")
    count, extra = divmod(num_layers, num_stages)
    return tuple(count + (stage < extra) for stage in range(num_stages))
