"""A user's dataloader, split over virtual machines.

Lightning rebuilds a loader with a ``DistributedSampler``, which gives all replicas equally many
samples, in a different order than on one device. But virtual machines differ in speed, and a run
must compute the same results as on one device. So every virtual machine runs the user's own sampler
and takes its slice of each *global batch*: the batch that one device would have drawn with the
batch size of all virtual machines together. Concatenated, the slices are that batch.

All virtual machines therefore have to draw the same order from the global random generators, while
the augmentations of a data set draw from the same generators any number of times:
:class:`SharedRandomStream` separates the two.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    Sampler,
    get_worker_info,
)

from lightning_pipeshift.compat.lightning_private import RecordedBatches, recorded_batch_sampler
from lightning_pipeshift.compat.torch_private import LOADER_ITERATOR, DataLoaderIterator
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning.batch_parts import Part
from lightning_pipeshift.model.random.random_streams import (
    SharedRandomStream,
    seed_all,
    stream_seed,
)

T = TypeVar("T")

_MASK_32 = (1 << 32) - 1


def seed_workers_alike(loader: object) -> None:
    """Makes Lightning seed a loader's workers as on the first rank, if ``seed_everything`` asks for
    seeded workers. :func:`for_virtual_machine` adds the virtual machine's index.
    """
    seeds = int(os.environ.get("PL_SEED_WORKERS", 0))
    if seeds and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)


def for_virtual_machine(
    loader: object,
    vm: int,
    shares: Sequence[float],
    pads: bool,
    stream: SharedRandomStream | None = None,
) -> object:
    """A loader of one virtual machine's part of the data. The user's own loader is not changed.

    Every virtual machine draws the order of all samples, and takes its share of each global batch.
    If the loader does not make batches of samples (a custom batch sampler, ``batch_size=None``, a
    loader that is not a ``DataLoader``), a global batch consists of one of them for each virtual
    machine. A loader whose sampler is already for several replicas is split by the user, and is
    returned unchanged.

    Args:
        loader: the user's loader, or one that this function has returned; the latter is split
            again.
        vm: index of the virtual machine.
        shares: one positive number for each virtual machine.
        pads: whether every virtual machine gets the same number of batches, as training needs: a
            global batch of fewer samples than virtual machines is padded with the first samples of
            the epoch. Otherwise no sample is seen twice, and a virtual machine may get one batch
            fewer.
        stream: separates the order of the samples from all other random numbers; ``None`` does not
            change the global random state.

    Raises:
        ConfigurationError: unequal shares of complete batches, or a loader whose order is already
            fixed.
    """
    loader = getattr(loader, "__dict__", {}).get("_before_sharing", loader)
    if len(shares) == 1:
        return loader
    stream = stream or _NoSwitching(vm)
    # Of a global batch of one complete batch for each virtual machine.
    turn = Part(vm, tuple(shares), len(shares), pads)
    if not isinstance(loader, DataLoader):
        _require_equal(shares, f"a {type(loader).__name__}")
        return _turns(loader, turn, stream)
    if _is_shared_out_by_user(loader):
        return loader
    _check_not_begun(loader)
    changes = _of_stream if isinstance(loader.dataset, IterableDataset) else _of_map
    mine = copy.copy(loader)
    # Bypasses DataLoader.__setattr__, which forbids most of these: a user's subclass may not be
    # rebuildable from its attributes.
    vars(mine).update(
        changes(loader, turn, stream),
        _before_sharing=loader,
        _iterator=None,
        _IterableDataset_len_called=None,
    )
    return mine


class _NoSwitching(SharedRandomStream):
    """A stream that does not change the random state."""

    def _switch(self) -> None:
        pass


# --- the parts of a DataLoader that change ---


def _of_map(loader: DataLoader[Any], turn: Part, stream: SharedRandomStream) -> dict[str, Any]:
    """The changed arguments of a loader of a data set with indices."""
    vm, shares = turn.vm, turn.shares
    changes: dict[str, Any] = {}
    if loader.num_workers > 0 and vm > 0:
        changes["worker_init_fn"] = _OwnWorkerSeeds(vm, loader.worker_init_fn)
    batches: Any = loader.batch_sampler
    if batches is None:
        _require_equal(shares, "a DataLoader with batch_size=None")
        return {**changes, "sampler": _turns(loader.sampler, turn, stream)}
    # Lightning's, around the user's, for prediction: it has to stay the outermost.
    is_recorded = isinstance(batches, RecordedBatches)
    if is_recorded:
        batches = recorded_batch_sampler(batches)
    mine: Any
    library = type(batches).__module__.partition(".")[0]
    # Those of torch and torchdata only group their sampler's indices.
    if isinstance(batches, BatchSampler) and library in ("torch", "torchdata"):
        part = _of_samples(turn, batches.batch_size, batches.drop_last)
        mine = _BatchSamplerPart(batches.sampler, part, stream)
        if loader.batch_size is not None:
            changes["batch_size"] = part.num_items
    else:
        _require_equal(shares, f"the batch sampler {type(batches).__name__}")
        mine = _turns(batches, turn, stream)
    return {**changes, "batch_sampler": RecordedBatches(mine) if is_recorded else mine}


def _of_stream(loader: DataLoader[Any], turn: Part, stream: SharedRandomStream) -> dict[str, Any]:
    """The changed arguments of a loader of an iterable data set. Workers keep their seeds: each has
    to see the same stream on all virtual machines.
    """
    if isinstance(loader.dataset, IterDataPipe) and loader.num_workers > 0:
        raise ConfigurationError(
            f"The data is an IterDataPipe with num_workers={loader.num_workers}, which its "
            "workers divide by the rank of the process. Over several virtual machines, use "
            "num_workers=0, or an IterableDataset that divides its samples among its workers."
        )
    is_batched = loader.batch_size is not None
    if not is_batched:
        _require_equal(turn.shares, "a DataLoader with batch_size=None")
    part = _of_samples(turn, loader.batch_size or 1, loader.drop_last)
    is_sized = hasattr(loader.dataset, "__len__")
    kind = _SizedIterableDatasetPart if is_sized else _IterableDatasetPart
    # The data set makes the batches, as only it knows the size of the last one; for the loader they
    # are complete, and are passed to `collate_fn` unchanged.
    return {
        "dataset": kind(loader.dataset, part, is_batched, stream),
        "sampler": _Endless(stream),
        "batch_sampler": None,
        "batch_size": part.num_items if is_batched else None,
    }


def _of_samples(turn: Part, batch_size: int, drops_last: bool) -> Part:
    """The part of global batches that consist of samples."""
    return replace(turn, size=len(turn.shares) * batch_size, drops_last=drops_last)


def _is_shared_out_by_user(loader: DataLoader[Any]) -> bool:
    """Whether the user splits the data: by a ``DistributedSampler``, or a similar sampler."""
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        num_replicas = getattr(sampler, "num_replicas", 1)
        if isinstance(num_replicas, int) and num_replicas > 1:
            return True
    return False


def _check_not_begun(loader: DataLoader[Any]) -> None:
    for name, value in vars(loader).items():
        if isinstance(value, DataLoaderIterator) and name != LOADER_ITERATOR:
            raise ConfigurationError(
                f"{type(loader).__name__} keeps an iterator that it created before training, as "
                f"`{name}`: it would give every virtual machine all samples. Create the iterator "
                "in `__iter__`, or use a DataLoader with persistent_workers=True instead."
            )


def _require_equal(shares: Sequence[float], found: str) -> None:
    if len(set(shares)) > 1:
        raise ConfigurationError(
            f"batch_shares={list(shares)} with {found}: it yields complete batches, each for one "
            "virtual machine, so only equal shares are possible. Remove `batch_shares`, or make "
            "the batches in the loader: DataLoader(dataset, batch_size=...)."
        )


# --- replacements of the user's samplers, data sets and loaders ---


class _BatchSamplerPart(BatchSampler):
    """Slices of the global batches that consist of a sampler's samples."""

    def __init__(self, sampler: Any, part: Part, stream: SharedRandomStream) -> None:
        super().__init__(sampler, part.num_items, part.drops_last)
        self._part = part
        self._stream = stream

    def __iter__(self) -> Iterator[list[int]]:
        # Now and not at the first batch: next, the loader draws its workers' seed.
        self._stream.to_shared()
        # The sampler begins with the first batch, as in a BatchSampler: it draws after that seed.
        batches = self._part.batches(self.sampler, _length(self.sampler))
        return _drawn_on(self._stream, batches)

    def __len__(self) -> int:
        return self._part.num_batches(len(self.sampler))  # type: ignore[arg-type]


class _StandIn:
    """Forwards attributes of the original: ``set_epoch``, ``state_dict``, a user's own."""

    _source: Any
    _part: Part
    _stream: SharedRandomStream

    def __getattr__(self, name: str) -> Any:
        # Python's own protocols are not forwarded, as the replacement itself is copied and pickled.
        if name.startswith("__") or "_source" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._source, name)


class _Turns(_StandIn):
    """Every m-th item: complete batches, or the indices for them."""

    def __init__(self, source: Any, part: Part, stream: SharedRandomStream) -> None:
        self._source = self._before_sharing = source
        self._part = part
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        self._stream.to_shared()
        batches = self._part.batches(iter(self._source), _length(self._source))
        return _drawn_on(self._stream, (item for [item] in batches))


class _SizedTurns(_Turns):
    def __len__(self) -> int:
        return self._part.num_batches(len(self._source))


def _turns(source: Any, part: Part, stream: SharedRandomStream) -> _Turns:
    kind = _SizedTurns if hasattr(source, "__len__") else _Turns
    return kind(source, part, stream)


class _IterableDatasetPart(_StandIn, IterableDataset[Any]):
    """A stream's slices, as lists if the loader would have made batches of samples.

    Every virtual machine reads the whole stream, with the same random numbers: in a worker, those
    of the worker's seed. A ``collate_fn`` draws from the virtual machine's own stream.
    """

    _is_batched: bool

    def __init__(
        self, source: Any, part: Part, is_batched: bool, stream: SharedRandomStream
    ) -> None:
        vars(self).update(_source=source, _part=part, _is_batched=is_batched, _stream=stream)

    def __setattr__(self, name: str, value: Any) -> None:
        # A `worker_init_fn` sets each worker's range by attributes of the data set.
        setattr(self._source, name, value)

    def __iter__(self) -> Iterator[Any]:
        stream, num_items = self._stream, _length(self._source)
        if get_worker_info() is not None:
            # Created once: persistent workers call this again, with their own stream active.
            stream = vars(self).setdefault("_worker_stream", type(stream)(self._part.vm))
            num_items = None
        stream.to_shared()
        batches = self._part.batches(iter(self._source), num_items)
        return _drawn_on(stream, batches if self._is_batched else (item for [item] in batches))


class _SizedIterableDatasetPart(_IterableDatasetPart):
    def __len__(self) -> int:
        """The number of samples for which the loader's division by the batch size is exact."""
        num_batches = self._part.num_batches(len(self._source))
        return num_batches * (self._part.num_items if self._is_batched else 1)


class _Endless(Sampler[None]):
    """An iterable data set's sampler, which yields no indices, only requests for the next item."""

    def __init__(self, stream: SharedRandomStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[None]:
        # Next, the loader draws its workers' seed.
        self._stream.to_shared()
        return self._calls()

    def _calls(self) -> Iterator[None]:
        while True:
            self._stream.to_own()
            yield None


@dataclass(frozen=True, slots=True)
class _OwnWorkerSeeds:
    """A ``worker_init_fn`` that gives workers of different virtual machines different seeds.

    Args:
        vm: index of the virtual machine.
        then: the user's own.
    """

    vm: int
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        seed_all(stream_seed("worker", str(torch.initial_seed()), self.vm))
        if self.then is not None:
            self.then(worker_id)


def _drawn_on(stream: SharedRandomStream, items: Iterator[T]) -> Iterator[T]:
    """Yields items drawn from the shared random stream; the caller's code draws from its own."""
    while True:
        stream.to_shared()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            stream.to_own()
        yield item


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
