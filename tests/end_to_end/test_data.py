"""The data that each virtual machine sees: slices of what one device would have seen, in its order.

No processes: the virtual machines of a test are the loaders that ``for_virtual_machine`` returns
for each of them, and where random numbers matter, each begins with the same global random state.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.lightning.data import for_virtual_machine
from lightning_pipeshift.model.random.random_streams import (
    SharedRandomStream,
    global_state,
    set_global_state,
)
from lightning_pipeshift.plan.inputs.shares import shared_out
from tests.features_models import QUIET

SHARES = ([1, 1], [3, 1], [1, 1, 1], [10, 1, 1], [0.2, 0.5, 0.3, 0.4])


@pytest.fixture(autouse=True)
def same_random_state() -> Iterator[None]:
    """Tests begin with the same random numbers, and leave those of others alone."""
    before = global_state()
    L.seed_everything(11, verbose=False)
    yield
    set_global_state(before)


def counting(size: int, *args: Any, **kwargs: Any) -> Any:
    """A DataLoader of the numbers below ``size``."""
    dataset: Any = range(size)
    return DataLoader(dataset, *args, **kwargs)


def numbers_of(batch: Any) -> list[Any]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def epoch(loader: Any) -> list[list[Any]]:
    return [numbers_of(batch) for batch in loader]


def parts(make: Callable[[], Any], shares: Sequence[float], pads: bool) -> list[Any]:
    """Every virtual machine's loader; each process has made the user's for itself."""
    return [for_virtual_machine(make(), vm, shares, pads) for vm in range(len(shares))]


def rounds(epochs: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """The batches of all virtual machines in each step, one after another."""
    steps = itertools.zip_longest(*epochs, fillvalue=())
    return [[number for batch in step for number in batch] for step in steps]


def filled_up(batches: list[list[Any]], num: int, pads: bool) -> list[list[Any]]:
    """The global batches, the last with at least one sample for each virtual machine."""
    if not (pads and batches):
        return batches
    first = itertools.cycle(batches[0][:num])
    missing = max(0, num - len(batches[-1]))
    return [*batches[:-1], [*batches[-1], *itertools.islice(first, missing)]]


def require_lengths(loaders: Sequence[Any], epochs: Sequence[list[list[Any]]], pads: bool) -> None:
    lengths = [len(batches) for batches in epochs]
    assert [len(loader) for loader in loaders] == lengths
    assert max(lengths) - min(lengths) <= (0 if pads else 1)


# --------------------------------------------------------------------------------------------------
# Data sets with indices
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("pads", [True, False], ids=["pads", "once"])
def test_slices_make_up_the_batches_of_one_device(shares, pads):
    num = len(shares)
    for case in range(60):
        dice = random.Random(case)
        size, batch_size = dice.randint(0, 40), dice.randint(1, 5)
        drop_last, shuffle = dice.random() < 0.4, size > 0 and dice.random() < 0.5

        def make(
            each: int = batch_size,
            seed: int = case,
            size: int = size,
            drop_last: bool = drop_last,
            shuffle: bool = shuffle,
        ) -> DataLoader:
            return counting(
                size,
                each,
                shuffle,
                drop_last=drop_last,
                generator=torch.Generator().manual_seed(seed),
            )

        one_device = make(num * batch_size)
        loaders = parts(make, shares, pads)
        for _ in range(2):
            expected = epoch(one_device)
            epochs = [epoch(loader) for loader in loaders]
            assert rounds(epochs) == filled_up(expected, num, pads)
            require_lengths(loaders, epochs, pads)
            for vm, batches in enumerate(epochs):
                for batch, whole in zip(batches, expected, strict=False):
                    if len(whole) >= num:
                        assert len(batch) == shared_out(len(whole), shares)[vm]
            if not pads and not drop_last:
                seen = sorted(number for batches in epochs for batch in batches for number in batch)
                assert seen == list(range(size))


def test_batches_of_the_docstring():
    def make() -> DataLoader:
        return counting(10, batch_size=2)

    assert [epoch(loader) for loader in parts(make, [3, 1], True)] == [
        [[0, 1, 2], [4, 5, 6], [8]],
        [[3], [7], [9]],
    ]
    assert [epoch(loader) for loader in parts(make, [1, 1, 1], True)] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8]],
        [[4, 5], [9]],
    ]


def test_a_rest_of_fewer_samples_than_virtual_machines():
    def make() -> DataLoader:
        return counting(7, batch_size=2)

    padded = parts(make, [1, 1, 1], True)
    assert [epoch(loader)[-1] for loader in padded] == [[6], [0], [1]]
    once = parts(make, [1, 1, 1], False)
    assert [epoch(loader)[1:] for loader in once] == [[[6]], [], []]
    assert [len(loader) for loader in once] == [2, 1, 1]


def test_an_epoch_of_one_sample_is_repeated():
    loaders = parts(lambda: DataLoader([5]), [1, 1, 1], True)  # type: ignore[arg-type]
    assert [epoch(loader) for loader in loaders] == [[[5]], [[5]], [[5]]]


def test_one_virtual_machine_has_the_users_loader():
    loader = counting(10, batch_size=2)
    assert for_virtual_machine(loader, 0, [2.0], True) is loader
    assert for_virtual_machine([1, 2], 0, [1], True) == [1, 2]


def test_attributes_are_the_virtual_machines():
    loader = counting(10, batch_size=4, drop_last=True)
    mine: Any = for_virtual_machine(loader, 0, [3, 1], True)
    assert isinstance(mine.batch_sampler, BatchSampler)
    assert mine.batch_size == mine.batch_sampler.batch_size == 6
    assert mine.drop_last is mine.batch_sampler.drop_last is True
    assert mine.sampler is mine.batch_sampler.sampler is loader.sampler


class NotRebuilt(DataLoader):
    """A loader that Lightning could not build anew."""

    def __init__(self, number: int) -> None:
        super().__init__(range(number), batch_size=2)  # type: ignore[arg-type]
        self.scale = 10

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * self.scale


@pytest.mark.feature("Data", "loaders of a class of your own")
def test_a_loader_of_the_users_own_class():
    loaders = parts(lambda: NotRebuilt(8), [1, 1], True)
    assert [epoch(loader) for loader in loaders] == [[[0, 10], [40, 50]], [[20, 30], [60, 70]]]
    assert type(loaders[0]) is NotRebuilt


class Letters(IterableDataset):
    """A stream that its workers share out, each beginning at its own place."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        begin, step = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from range(begin, self.size, step)


class SizedLetters(Letters):
    def __len__(self) -> int:
        return self.size


def custom_batches(lengths: Sequence[int] = (3, 1, 2, 2, 4)) -> list[list[int]]:
    ends = list(itertools.accumulate(lengths))
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


LOADERS: dict[str, Callable[[], Any]] = {
    "map": lambda: counting(11, batch_size=2),
    "workers": lambda: counting(11, 2, num_workers=1),
    "batch sampler": lambda: counting(12, batch_sampler=custom_batches()),
    "no batches": lambda: counting(7, batch_size=None),
    "stream": lambda: DataLoader(SizedLetters(11), batch_size=2),
    "stream, no batches": lambda: DataLoader(SizedLetters(11), batch_size=None),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_loader_stays_as_it_was(name):
    loader = LOADERS[name]()
    before = dict(vars(loader))
    shown = [torch.as_tensor(batch).tolist() for batch in loader]
    mine: Any = for_virtual_machine(loader, 1, [1, 1], True, SharedRandomStream(1))
    assert len(list(mine)) == len(mine)
    assert vars(loader) == before
    assert [torch.as_tensor(batch).tolist() for batch in loader] == shown


@pytest.mark.parametrize("name", [*LOADERS, "list"])
def test_shared_out_again_is_shared_out_once(name):
    # Lightning puts what it processed into a CombinedLoader that the user gave, and processes it
    # again in the next run.
    loader = LOADERS[name]() if name in LOADERS else list(range(9))
    trained = for_virtual_machine(loader, 0, [1, 1], True)
    again: Any = for_virtual_machine(trained, 1, [1, 1, 1], False)
    anew: Any = for_virtual_machine(loader, 1, [1, 1, 1], False)
    assert len(again) == len(anew)
    assert [str(batch) for batch in again] == [str(batch) for batch in anew]
    assert for_virtual_machine(trained, 0, [1], True) is loader


# --------------------------------------------------------------------------------------------------
# Batches that come ready-made
# --------------------------------------------------------------------------------------------------


class BucketSampler(Sampler):
    """Batches of its own making, with methods of its own."""

    def __init__(self, batches: list[list[int]], sampler: Any = None) -> None:
        self.batches = batches
        self.sampler = sampler
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


class Unsized:
    """A loader that is no DataLoader, and does not know its length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Sized(Unsized):
    def __len__(self) -> int:
        return len(self.batches)


def ready_made(kind: str, num_batches: int) -> Any:
    """A loader of the batches [0], [1, 1], [2, 2, 2] and so on."""
    batches = [[number] * (number % 3 + 1) for number in range(num_batches)]
    if kind == "batch sampler":
        return counting(100, batch_sampler=BucketSampler(batches))
    if kind == "list of indices":
        return counting(100, batch_sampler=batches)
    if kind == "no batches":
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    if kind == "sampler of batches":
        dataset = torch.arange(100)
        return DataLoader(dataset, sampler=batches, batch_size=None)  # type: ignore[arg-type]
    if kind == "subclass":

        class Subclass(BatchSampler):
            def __iter__(self) -> Iterator[list[int]]:
                return iter(batches)

            def __len__(self) -> int:
                return len(batches)

        return counting(100, batch_sampler=Subclass([], 1, False))
    return {"list": list, "sized": Sized, "unsized": Unsized}[kind](batches)


READY_MADE = (
    "batch sampler",
    "list of indices",
    "no batches",
    "sampler of batches",
    "subclass",
    "list",
    "sized",
    "unsized",
)


@pytest.mark.parametrize("kind", READY_MADE)
@pytest.mark.parametrize("pads", [True, False], ids=["pads", "once"])
@pytest.mark.parametrize("num", [2, 3])
def test_ready_made_batches_go_round(kind, pads, num):
    for num_batches in (0, 1, 2, 5, 6, 7):
        if num_batches == 0 and kind == "no batches":
            continue  # torch's own sampler refuses it
        whole = epoch(ready_made(kind, num_batches))
        loaders = parts(partial(ready_made, kind, num_batches), [1] * num, pads)
        epochs = [epoch(loader) for loader in loaders]
        if pads and num_batches % num:
            whole += list(itertools.islice(itertools.cycle(whole[:num]), num - num_batches % num))
        assert epochs == [whole[vm::num] for vm in range(num)]
        assert epochs == [epoch(loader) for loader in loaders]
        if kind != "unsized":
            require_lengths(loaders, epochs, pads)


def test_only_a_loader_with_a_length_has_one():
    assert hasattr(for_virtual_machine(Sized([1]), 0, [1, 1], True), "__len__")
    mine = for_virtual_machine(Unsized([1]), 0, [1, 1], True)
    assert not hasattr(mine, "__len__")
    stream: Any = for_virtual_machine(DataLoader(Letters(4)), 0, [1, 1], True)
    assert not hasattr(stream.dataset, "__len__")
    with pytest.raises(TypeError):
        len(stream)


@pytest.mark.parametrize("kind", READY_MADE)
def test_ready_made_batches_cannot_be_divided(kind):
    with pytest.raises(ConfigurationError, match=r"batch_shares=\[3, 1\].*only equal shares"):
        for_virtual_machine(ready_made(kind, 4), 0, [3, 1], True)


def test_a_stream_without_batches_cannot_be_divided():
    with pytest.raises(ConfigurationError, match=r"batch_shares=\[3, 1\].*batch_size=None"):
        for_virtual_machine(DataLoader(Letters(4), batch_size=None), 0, [3, 1], True)


def test_equal_shares_may_be_written_in_any_way():
    mine: Any = for_virtual_machine([0, 1, 2, 3], 1, [2, 2.0], True)
    assert list(mine) == [1, 3]


# --------------------------------------------------------------------------------------------------
# Streams
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("pads", [True, False], ids=["pads", "once"])
@pytest.mark.parametrize("drop_last", [True, False], ids=["drop", "keep"])
def test_a_stream_is_cut_as_one_device_would(shares, pads, drop_last):
    num = len(shares)
    for size, batch_size in [(0, 2), (1, 1), (2, 1), (5, 3), (12, 2), (13, 2), (23, 4), (24, 2)]:

        def make(
            each: int = batch_size, kind: type[Letters] = SizedLetters, size: int = size
        ) -> DataLoader:
            return DataLoader(kind(size), batch_size=each, drop_last=drop_last)

        expected = filled_up(epoch(make(num * batch_size)), num, pads)
        loaders = parts(make, shares, pads)
        epochs = [epoch(loader) for loader in loaders]
        assert rounds(epochs) == expected
        require_lengths(loaders, epochs, pads)
        unsized = parts(partial(make, kind=Letters), shares, pads)
        assert [epoch(loader) for loader in unsized] == epochs


@pytest.mark.parametrize(("shares", "size"), [([3, 1], 25), ([1, 1, 1], 26)])
def test_every_worker_has_a_stream(shares, size):
    num = len(shares)

    def make(each: int = 2) -> DataLoader:
        return DataLoader(Letters(size), batch_size=each, num_workers=2)

    # 13 and 12, or 13 and 13 numbers a worker: the rest is larger than the virtual machines are
    # many in one worker, and smaller in the other, or there is none.
    whole = epoch(make(2 * num))
    once = [epoch(loader) for loader in parts(make, shares, False)]
    seen = sorted(number for batches in once for batch in batches for number in batch)
    assert seen == list(range(size))
    padded = [epoch(loader) for loader in parts(make, shares, True)]
    assert len({len(batches) for batches in padded}) == 1
    for batch, expected in zip(rounds(padded), whole, strict=True):
        assert batch[: len(expected)] == expected
        assert len(batch) == max(num, len(expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_ready_made_batches(num_workers):
    def make() -> DataLoader:
        return DataLoader(SizedLetters(9), batch_size=None, num_workers=num_workers)

    def items(loader: Any) -> list[int]:
        return list(loader)

    loaders = parts(make, [1, 1], False)
    if num_workers == 0:
        assert [items(loader) for loader in loaders] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
        assert [len(loader) for loader in loaders] == [5, 4]
        padded = parts(make, [1, 1], True)
        assert [items(loader) for loader in padded] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]
        assert [len(loader) for loader in padded] == [5, 5]
    else:
        # One worker has 0 2 4 6 8, the other 1 3 5 7.
        assert [sorted(items(loader)) for loader in loaders] == [[0, 1, 4, 5, 8], [2, 3, 6, 7]]


class Range(IterableDataset):
    """The example of torch's documentation: a function sets each worker's range."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def set_range(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    begin, length = dataset.start, (dataset.end - dataset.start) // info.num_workers
    dataset.start = begin + worker_id * length
    dataset.end = dataset.start + length


def test_a_workers_range_is_set_on_the_users_dataset():
    dataset = Range(0, 16)

    def make() -> DataLoader:
        return DataLoader(dataset, batch_size=2, num_workers=2, worker_init_fn=set_range)

    epochs = [epoch(loader) for loader in parts(make, [1, 1], True)]
    assert epochs == [[[0, 1], [8, 9], [4, 5], [12, 13]], [[2, 3], [10, 11], [6, 7], [14, 15]]]
    assert (dataset.start, dataset.end) == (0, 16)


def test_a_streams_attributes_are_there():
    mine: Any = for_virtual_machine(DataLoader(Range(2, 7), batch_size=2), 0, [1, 1], True)
    assert (mine.dataset.start, mine.batch_size) == (2, 2)
    assert not hasattr(mine.dataset, "stop")
    assert list(pickle.loads(pickle.dumps(mine.dataset))) == [[2, 3], [6]]


def test_a_datapipe_does_without_workers():
    pipe = IterableWrapper(range(10)).sharding_filter()
    loaders = parts(lambda: DataLoader(pipe, batch_size=2), [1, 1], True)
    assert [epoch(loader) for loader in loaders] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    with pytest.raises(ConfigurationError, match="num_workers=2"):
        for_virtual_machine(DataLoader(pipe, batch_size=2, num_workers=2), 0, [1, 1], True)


# --------------------------------------------------------------------------------------------------
# Epochs, and data that the user shares out
# --------------------------------------------------------------------------------------------------


class ByEpoch(Sampler):
    """Shuffles by the epoch's number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))

    def __len__(self) -> int:
        return self.size


def epoch_loaders() -> dict[str, tuple[Any, Any]]:
    """Loaders, and what should hear of the epoch."""
    standard, items = ByEpoch(8), ByEpoch(8)
    inside = ByEpoch(8)
    data: Any = range(8)
    buckets = BucketSampler([[0], [1]], inside)
    return {
        "standard": (DataLoader(data, batch_size=2, sampler=standard), standard),
        "no batches": (DataLoader(data, batch_size=None, sampler=items), items),
        "inside": (DataLoader(data, batch_sampler=buckets), inside),
    }


@pytest.mark.parametrize("name", epoch_loaders())
def test_the_sampler_hears_of_the_epoch(name):
    loader, listener = epoch_loaders()[name]
    mine = for_virtual_machine(loader, 1, [1, 1], True)
    _set_sampler_epoch(mine, 4)
    assert listener.epoch == 4


def test_methods_of_a_batch_sampler_and_of_a_loader_are_there():
    buckets = BucketSampler([[0], [1]])
    loader = counting(8, batch_sampler=buckets)
    mine: Any = for_virtual_machine(loader, 1, [1, 1], True)
    mine.batch_sampler.set_epoch(3)
    assert buckets.epoch == 3
    own = Unsized([1, 2])
    mine = for_virtual_machine(own, 1, [1, 1], True)
    mine.set_epoch(5)
    assert own.epoch == 5
    assert not hasattr(mine, "state_dict")


@pytest.mark.parametrize("where", ["sampler", "batch sampler"])
def test_a_distributed_sampler_is_left_alone(where):
    data: Any = range(8)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1)
    if where == "sampler":
        loader = DataLoader(data, sampler=sampler)
    else:
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
    assert for_virtual_machine(loader, 1, [1, 1], True) is loader


def test_a_distributed_sampler_for_one_replica_shares_nothing_out():
    data: Any = range(8)
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    loaders = parts(lambda: DataLoader(data, sampler=sampler, batch_size=2), [1, 1], True)
    assert [epoch(loader) for loader in loaders] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


class Begun(DataLoader):
    """Keeps its workers by keeping its iterator, as some libraries' loaders do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()


def test_a_loader_that_has_begun_is_refused():
    with pytest.raises(ConfigurationError, match=r"Begun keeps an iterator.*persistent_workers"):
        for_virtual_machine(Begun(range(8)), 0, [1, 1], True)


# --------------------------------------------------------------------------------------------------
# Random numbers
# --------------------------------------------------------------------------------------------------


def drawn() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


class Augmented(Dataset):
    """Draws as often as the number of the virtual machine says."""

    def __init__(self, size: int, num_draws: int) -> None:
        self.size, self.num_draws = size, num_draws

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        draws = [drawn() for _ in range(self.num_draws)]
        numbers = torch.as_tensor(index, dtype=torch.float64)
        augmentation = torch.tensor(draws[0] if draws else [0.0] * 3, dtype=torch.float64)
        return numbers, augmentation.expand(*numbers.shape, 3)


class Lazy(Sampler):
    """Draws each index when it is asked for it, from all three generators."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(sum(drawn()) * 1000) % self.size

    def __len__(self) -> int:
        return self.size


class LazyBuckets(Lazy):
    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield [index, (index + np.random.randint(5)) % self.size]


class LazyStream(IterableDataset):
    """Draws its order from the global generators while it goes on, and its samples, too."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(17))
        while order:
            number = order.pop(random.randrange(len(order)))
            yield torch.tensor(float(number)), torch.tensor(drawn())


def draw_for_each(samples: list[Any]) -> Any:
    """A ``collate_fn`` whose draws are as many as the samples of its virtual machine."""
    noise = torch.tensor([drawn() for _ in samples])
    return torch.stack([number for number, _ in samples]), noise


SHUFFLED: dict[str, Callable[[int], DataLoader]] = {
    "shuffled": lambda draws: DataLoader(Augmented(16, draws), batch_size=2, shuffle=True),
    "replaced": lambda draws: DataLoader(
        Augmented(16, draws), batch_size=2, sampler=RandomSampler(range(16), True, 48)
    ),
    "lazy": lambda draws: DataLoader(Augmented(16, draws), batch_size=2, sampler=Lazy(16)),
    "buckets": lambda draws: DataLoader(Augmented(16, draws), batch_sampler=LazyBuckets(16)),
    "no batches": lambda draws: DataLoader(
        Augmented(16, draws), batch_size=None, sampler=LazyBuckets(16)
    ),
    "workers": lambda draws: DataLoader(
        Augmented(16, draws), batch_size=2, shuffle=True, num_workers=1
    ),
}


class Machine:
    """A virtual machine: its own global random state, taken up where it was left."""

    def __init__(self, vm: int, begin: dict[str, Any]) -> None:
        self.state = begin
        self.vm = vm
        self.stream = SharedRandomStream(vm)

    def run(self, function: Callable[[Machine], Any]) -> Any:
        set_global_state(self.state)
        try:
            return function(self)
        finally:
            self.state = global_state()

    def part(self, loader: Any, shares: Sequence[float] = (1, 1), pads: bool = True) -> Any:
        return for_virtual_machine(loader, self.vm, shares, pads, self.stream)


def machines(num: int = 2) -> list[Machine]:
    begin = global_state()
    return [Machine(vm, begin) for vm in range(num)]


def pairs_of(loader: Any) -> tuple[list[list[float]], list[list[float]]]:
    """The numbers and the random parts of an epoch's batches."""
    batches = list(loader)
    numbers = [numbers.flatten().tolist() for numbers, _ in batches]
    return numbers, [augmentation.flatten().tolist() for _, augmentation in batches]


def flat(batches: Sequence[Any]) -> list[float]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("name", SHUFFLED)
def test_the_order_is_that_of_one_device_whatever_the_dataset_draws(name):
    one_device = SHUFFLED[name](0)
    if name in ("buckets", "no batches"):
        expected = [pairs_of(one_device)[0] for _ in range(3)]
    else:
        workers = one_device.num_workers
        both = DataLoader(
            one_device.dataset, batch_size=4, sampler=one_device.sampler, num_workers=workers
        )
        expected = [pairs_of(both)[0] for _ in range(3)]
    L.seed_everything(11, verbose=False)

    def epochs(machine: Machine) -> Any:
        loader = machine.part(SHUFFLED[name](1 + 2 * machine.vm))
        results: list[list[list[float]]] = []
        for _ in range(3):
            results.append([])
            for numbers, _ in loader:
                results[-1].append(numbers.flatten().tolist())
                for _ in range(2 - machine.vm):
                    drawn()  # the user's code around the steps
        return results

    seen = [machine.run(epochs) for machine in machines()]
    for order, wholes in zip(zip(*seen, strict=True), expected, strict=True):
        assert flat(rounds(order)) == flat(wholes)
    assert flat(expected[0]) != flat(expected[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentations_differ_between_virtual_machines(num_workers):
    def epochs(machine: Machine) -> Any:
        dataset = Augmented(8, 1)
        loader = DataLoader(dataset, batch_size=1, num_workers=num_workers)
        loader = machine.part(loader, (1, 1, 1))
        return [pairs_of(loader)[1] for _ in range(2)]

    seen = [machine.run(epochs) for machine in machines(3)]
    draws = [number for vm in seen for batches in vm for number in flat(batches)]
    assert len(set(draws)) == len(draws)
    # Not so within one: every stage sees the same.
    L.seed_everything(11, verbose=False)
    assert [machine.run(epochs) for machine in machines(3)] == seen


def test_an_epoch_that_is_left_early():
    def epochs(machine: Machine) -> Any:
        loader = machine.part(SHUFFLED["lazy"](1 + machine.vm))
        results = []
        for _ in range(3):
            batches = itertools.islice(loader, 2)
            results.append([numbers.tolist() for numbers, _ in batches])
        return results

    def one_device() -> Any:
        loader = DataLoader(Augmented(16, 0), batch_size=4, sampler=Lazy(16))
        return [[numbers.tolist() for numbers, _ in itertools.islice(loader, 2)] for _ in range(3)]

    seen = [machine.run(epochs) for machine in machines()]
    L.seed_everything(11, verbose=False)
    assert [rounds(order) for order in zip(*seen, strict=True)] == one_device()


@pytest.mark.parametrize("shares", [[1, 1], [3, 1]], ids=str)
@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["0", "2", "persistent"]
)
def test_a_stream_is_the_same_for_all_whatever_else_draws(num_workers, persistent, shares):
    def epochs(machine: Machine) -> Any:
        validation = machine.part(SHUFFLED["shuffled"](1 + machine.vm), shares, pads=False)
        loader = DataLoader(
            LazyStream(),
            batch_size=2,
            num_workers=num_workers,
            persistent_workers=persistent,
            collate_fn=draw_for_each,
        )
        train = machine.part(loader, shares)
        results, noise = [], []
        for _ in range(2):
            iterator = iter(train)
            first = next(iterator)
            pairs_of(itertools.islice(validation, len(validation)))
            numbers, draws = pairs_of([first, *iterator])
            results.append(numbers)
            noise += flat(draws)
        return results, noise

    runs = [machine.run(epochs) for machine in machines()]
    noise = [number for _, draws in runs for number in draws]
    assert len(set(noise)) == len(noise)
    streams = max(1, num_workers)
    for order in zip(*(orders for orders, _ in runs), strict=True):
        # Every worker's 17 numbers, and one of them again to fill up.
        counts = [flat(rounds(order)).count(float(number)) for number in range(17)]
        assert all(count >= streams for count in counts)
        assert sum(counts) == streams * (17 + 1)


AROUND: dict[str, Callable[[], Any]] = {
    **LOADERS,
    "stream, workers": lambda: DataLoader(SizedLetters(8), batch_size=2, num_workers=1),
    "list": lambda: list(range(6)),
}


@pytest.mark.parametrize("name", AROUND)
def test_between_batches_each_draws_its_own(name):
    def around(machine: Machine) -> Any:
        iterator = iter(machine.part(AROUND[name]()))
        next(iterator)
        draws = drawn()
        # To the end, and beyond: workers are ahead of it.
        for _ in iterator:
            draws += drawn()
        return [*draws, *drawn()]

    draws = [number for machine in machines() for number in machine.run(around)]
    assert len(set(draws)) == len(draws) >= 18


@pytest.mark.parametrize("kind", ["standard", "ready-made", "stream", "list"])
def test_the_shared_stream_is_where_it_is_for_all_when_one_gets_no_last_batch(kind):
    def make() -> Any:
        if kind == "standard":
            return DataLoader(Augmented(7, 1), batch_size=2, sampler=Lazy(7))
        if kind == "ready-made":
            return DataLoader(Augmented(7, 1), batch_sampler=LazyBuckets(7))
        if kind == "stream":
            return DataLoader(SizedLazyStream(), batch_size=2)
        return Lazy(7)

    def evaluate(machine: Machine) -> Any:
        loader = machine.part(make(), (1, 1, 1), pads=False)
        # As Lightning does, which never asks for more than the length says.
        num_seen = len(list(itertools.islice(loader, len(loader))))
        machine.stream.to_shared()
        return num_seen, drawn()

    seen = [machine.run(evaluate) for machine in machines(3)]
    assert len({num_seen for num_seen, _ in seen}) == 2
    assert len({tuple(draws) for _, draws in seen}) == 1


class SizedLazyStream(LazyStream):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(7):
            yield torch.tensor(drawn())

    def __len__(self) -> int:
        return 7


def test_a_length_that_was_wrong_loses_nothing():
    class Understated(Lazy):
        def __iter__(self) -> Iterator[int]:
            yield from range(12)

    def make() -> DataLoader:
        return counting(12, batch_size=2, sampler=Understated(7))

    epochs = [epoch(loader) for loader in parts(make, [1, 1, 1], False)]
    assert epochs == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_the_stream_switches():
    begin = global_state()
    expected = [drawn() for _ in range(4)]
    set_global_state(begin)
    stream = SharedRandomStream(1)
    stream.to_shared()
    assert drawn() == expected[0]
    stream.to_own()
    own = [drawn(), drawn()]
    stream.to_shared()
    stream.to_shared()
    assert drawn() == expected[1]
    stream.to_own()
    own.append(drawn())
    stream.to_own()
    own.append(drawn())
    stream.to_shared()
    assert [drawn(), drawn()] == expected[2:]

    # The own one is a single stream, made of the shared one as it was, and of the machine's number.
    assert len({number for draws in own + expected for number in draws}) == 24
    for vm in (1, 0):
        set_global_state(begin)
        drawn()
        stream = SharedRandomStream(vm)
        stream.to_own()
        assert ([drawn() for _ in range(4)] == own) == (vm == 1)


def test_without_a_stream_the_random_state_is_the_users():
    loader = counting(8, batch_size=2)
    mine: Any = for_virtual_machine(loader, 1, [1, 1], True)
    begin = global_state()
    torch.empty((), dtype=torch.int64).random_()  # the loader's seed for workers
    expected = drawn()
    set_global_state(begin)
    list(mine)
    assert drawn() == expected


class Recorded(Dataset):
    """Tells of each sample what its worker was seeded with, and who set it up."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return [torch.initial_seed() % 2**40, INITIALISED.get("worker", -1), *drawn()]


INITIALISED: dict[str, int] = {}


def initialise(worker_id: int) -> None:
    INITIALISED["worker"] = worker_id


@pytest.mark.feature("Data", "`seed_everything(workers=True)`")
@pytest.mark.parametrize("function", [None, initialise])
def test_workers_are_seeded_for_their_virtual_machine(function):
    def seen(vm: int) -> list[Any]:
        L.seed_everything(3, verbose=False)
        loader = DataLoader(
            Recorded(), batch_size=1, num_workers=2, worker_init_fn=function, collate_fn=list
        )
        mine: Any = for_virtual_machine(loader, vm, [1, 1, 1], True)
        if mine.worker_init_fn is not None:
            pickle.dumps(mine.worker_init_fn)
        return [batch[0] for batch in mine]

    first, *others = [seen(vm) for vm in range(3)]
    for worker in range(2):
        draws = [machine[worker][2:] for machine in (first, *others)]
        assert len({number for numbers in draws for number in numbers}) == 9
        assert first[worker][1] == (-1 if function is None else worker)
        assert all(machine[worker][1] == first[worker][1] for machine in others)
    assert seen(1) == others[0]


def test_persistent_workers_go_on():
    def make() -> DataLoader:
        return counting(8, 2, num_workers=1, persistent_workers=True)

    loader = make()
    assert epoch(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mine: Any = for_virtual_machine(loader, 1, [1, 1], True)
    assert epoch(mine) == epoch(mine) == [[2, 3], [6, 7]]
    assert epoch(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --------------------------------------------------------------------------------------------------
# In Lightning
# --------------------------------------------------------------------------------------------------


class OneOfTwo(SingleDeviceStrategy):
    """A single device that sees one virtual machine's part."""

    def __init__(self, vm: int, shares: Sequence[float]) -> None:
        super().__init__(torch.device("cpu"))
        self.vm, self.shares = vm, shares

    def process_dataloader(self, dataloader: object) -> object:
        pads = bool(self.lightning_module and self.lightning_module.trainer.training)
        return for_virtual_machine(dataloader, self.vm, self.shares, pads)


class Seeing(BoringModel):
    """Notes which samples it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[list[float]]] = {"train": [], "val": [], "predict": []}

    def _note(self, what: str, batch: Any) -> torch.Tensor:
        self.seen[what].append(batch[:, 0].tolist())
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._note("train", batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step(self._note("val", batch), batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._note("predict", batch)


class Indices(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.indices: Any = None

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices) -> None:
        self.indices = batch_indices


def rows(size: int, batch_size: int = 2) -> DataLoader:
    return DataLoader(torch.arange(float(size))[:, None].expand(size, 32), batch_size=batch_size)  # type: ignore[arg-type]


def test_a_trainer_takes_the_loader():
    model = Seeing()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, **QUIET)  # type: ignore[arg-type]
    val: Any = for_virtual_machine(rows(7), 1, [1, 1], False)
    trainer.fit(model, for_virtual_machine(rows(7), 1, [1, 1], True), val)
    assert model.seen == {
        "train": [[2, 3], [6]] * 2,
        "val": [[2, 3], [6]] * 2,
        "predict": [],
    }
    assert trainer.num_training_batches == 2


@pytest.mark.parametrize("shares", [[1, 1], [3, 1]])
def test_a_strategy_shares_the_data_out(shares):
    seen = []
    indices = []
    for vm in range(2):
        model, writer = Seeing(), Indices()
        trainer = L.Trainer(
            strategy=OneOfTwo(vm, shares),
            max_epochs=1,
            callbacks=[writer],
            **QUIET,  # type: ignore[arg-type]
        )
        trainer.fit(model, rows(9), rows(9))
        trainer.predict(model, rows(9), return_predictions=True)
        seen.append(model.seen)
        indices.append(writer.indices[0])
    whole = [[0.0, 1, 2, 3], [4, 5, 6, 7], [8]]
    trained = rounds([vm["train"] for vm in seen])
    assert trained == [*whole[:2], [8, 0]]
    assert rounds([vm["val"] for vm in seen]) == whole
    assert rounds([vm["predict"] for vm in seen]) == whole
    assert indices == [vm["predict"] for vm in seen]


def test_the_stream_outlives_a_sanity_check():
    # Lightning puts the random state back after it: the strategy switches to the shared one first.
    def epochs(machine: Machine) -> Any:
        with isolate_rng():
            pairs_of(machine.part(SHUFFLED["shuffled"](2), pads=False))
            machine.stream.to_shared()
        return pairs_of(machine.part(SHUFFLED["shuffled"](1 + machine.vm)))

    (first, first_draws), (second, second_draws) = [machine.run(epochs) for machine in machines()]
    L.seed_everything(11, verbose=False)
    both = DataLoader(Augmented(16, 0), batch_size=4, shuffle=True)
    assert rounds([first, second]) == pairs_of(both)[0]
    assert not set(flat(first_draws)) & set(flat(second_draws))


def test_sequential_samplers_are_still_seen_as_such():
    mine: Any = for_virtual_machine(rows(8), 0, [1, 1], True)
    assert isinstance(mine.sampler, SequentialSampler)
