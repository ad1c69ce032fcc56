"""Lets a recomputation leave out the operations whose results have not been dropped.

It is the idea of torch's selective checkpointing (``create_selective_checkpoint_contexts``): when a
layer runs again, an operation whose result is there is not computed, and its result is taken
instead. Here the result may have been swapped meanwhile, and it is always one of the tensors that
the layer has saved for its backward, so it is held once.

An operation is left out only if that changes no bit: all of its results are held and as it has made
them, and it draws no random numbers, as later ones would change. (Dropout's mask is drawn again,
whether it is held or not.) A kernel that torch does not see may have written to a result; so the
first time each operation runs as well, and is left out only if its bits are those that are held.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cache
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.compat.torch_private import COPY_TO, OperationMode, schema_of, version_of
from lightning_pipeshift.model.tensors.trees import (
    Layout,
    address_of,
    flatten,
    layout_of,
    leaves_of,
    view_in,
)

_NUM_TRIED: Final = 100
"""Operations that are timed together."""

Fetch = Callable[[], Tensor]
"""Returns a held tensor, when it is on the device."""

Key = tuple[Any, int]
"""An operation, and how many of its kind ran before it."""


class Result(NamedTuple):
    """The results of an operation.

    Args:
        inputs: the layouts of the tensors that it was given.
        leaves: for each tensor that it returned the address and the layout; anything else as it is.
        rebuild: returns what it returned, given these leaves.
    """

    inputs: tuple[Layout, ...]
    leaves: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]

    @property
    def addresses(self) -> set[int]:
        """Of the tensors that it returned."""
        return {leaf.address for leaf in self.leaves if isinstance(leaf, _Tensor)}


class _Tensor(NamedTuple):
    address: int
    layout: Layout


def is_skippable(operation: Any, args: Any, kwargs: Any, results: Any) -> bool:
    """Whether a run without an operation is the same, if its results are there."""
    schema = schema_of(operation)
    if schema.is_mutable or _draws(operation, args, kwargs or {}):
        return False
    # Weights that autocast converts may be converted earlier, or later, in another run.
    if operation is COPY_TO:
        return False
    given = {address_of(leaf) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)}
    tensors = [leaf for leaf in leaves_of(results) if isinstance(leaf, Tensor)]
    # Other results than plain tensors in new memory are views.
    return bool(given and tensors) and all(
        type(leaf) is Tensor and leaf.layout is torch.strided and address_of(leaf) not in given
        for leaf in tensors
    )


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: attention only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(schema_of(operation).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


@cache
def seconds_seen() -> float:
    """By how much longer an operation takes that a mode of this module looks at, and runs."""
    one = torch.ones(1)
    seconds = []
    for mode in (nullcontext(), LeftOut({}, {}, {})):
        with mode:
            tries = []
            for _ in range(5):
                begun = time.perf_counter()
                for _ in range(_NUM_TRIED):
                    one.view(1)
                tries.append(time.perf_counter() - begun)
        seconds.append(median(tries) / _NUM_TRIED)
    return max(0.0, seconds[1] - seconds[0])


class HeldResults(OperationMode):
    """Active in a layer's first run: remembers which operation computed which tensor.

    Args:
        wanted: the operations whose results will be held, if earlier calls of the layer have shown
            them: looking at each of the others would take longer than many of them do.
    """

    def __init__(self, wanted: Collection[Key] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted
        self._counts: Counter[Any] = Counter()
        self._made: dict[Key, Result] = {}
        self._by_address: dict[int, tuple[Key, StorageWeakRef, int]] = {}
        """By address: the operation, and the storage and its version when it had run."""

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        key = func, self._counts[func]
        self._counts[func] += 1
        if self._wanted is not None and key not in self._wanted:
            return results
        if not is_skippable(func, args, kwargs, results):
            return results
        leaves, rebuild = flatten(results)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                storage = StorageWeakRef(leaf.untyped_storage())
                self._by_address[address_of(leaf)] = key, storage, version_of(leaf)
        described = tuple(
            _Tensor(address_of(leaf), layout_of(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )
        self._made[key] = Result(_inputs(args, kwargs), described, rebuild)
        return results

    def maker_of(self, tensor: Tensor) -> Key | None:
        """The operation that computed a tensor's memory, and may be left out; called when it is
        saved.
        """
        found = self._by_address.get(address_of(tensor))
        if found is None:
            return None
        key, storage, version = found
        # Memory that was freed is used again, and what has been written to is not what its
        # operation has made.
        return key if not storage.expired() and version_of(tensor) == version else None

    def left_out(self, held: Mapping[int, tuple[Key, Fetch]], known: dict[Key, bool]) -> LeftOut:
        """The mode for the second run.

        Args:
            held: by the address that a result had: its operation, and what fetches its memory.
            known: whether the operations have the bits that are held, as far as that is known; the
                mode adds what it finds.
        """
        skips = {}
        for key in {key for key, _ in held.values()}:
            result = self._made.get(key)
            if result is not None and all(
                address in held and held[address][0] == key for address in result.addresses
            ):
                fetches = {address: held[address][1] for address in result.addresses}
                skips[key] = result, fetches
        return LeftOut(skips, self._counts, known)


class LeftOut(OperationMode):
    """Active in a layer's second run: leaves operations out.

    Args:
        skips: the operations, with what fetches the memory of each of their results.
        counts: how often each operation ran in the first run.
        known: see :meth:`HeldResults.left_out`.
    """

    def __init__(
        self,
        skips: Mapping[Key, tuple[Result, Mapping[int, Fetch]]],
        counts: Mapping[Any, int],
        known: dict[Key, bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._skips = skips
        self._known = known
        self._expected = {func: counts[func] for func, _ in skips}
        self._counts: Counter[Any] = Counter()

    @property
    def is_like_the_first(self) -> bool:
        """Whether the operations were those of the first run, as far as any is left out."""
        return all(self._counts[func] == count for func, count in self._expected.items())

    def operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        key = func, self._counts[func]
        self._counts[func] += 1
        skip = self._skips.get(key)
        if skip is None or skip[0].inputs != _inputs(args, kwargs) or self._known.get(key) is False:
            return func(*args, **kwargs)
        result, fetches = skip
        held = [
            view_in(fetches[leaf.address](), leaf.layout) if isinstance(leaf, _Tensor) else leaf
            for leaf in result.leaves
        ]
        if key not in self._known:
            computed = func(*args, **kwargs)
            pairs = zip(flatten(computed)[0], held, strict=True)
            self._known[key] = all(_is_same(one, other) for one, other in pairs)
            return computed
        return result.rebuild(held)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits."""
    if not isinstance(one, Tensor):
        return bool(one == other)
    if layout_of(one)[1:] != layout_of(other)[1:]:
        return False
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def _inputs(args: Any, kwargs: Any) -> tuple[Layout, ...]:
    return tuple(layout_of(leaf) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor))
