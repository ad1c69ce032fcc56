"""Tensors saved by autograd: counted once, dropped and restored with the same bits; and torch's own
error if one has been written to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.model.saved.layer import NamedLayer
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.recompute import LayerCall
from lightning_pipeshift.model.saved.saved_tensors import Saved, SavedBlock, SavedTable
from lightning_pipeshift.model.tensors.trees import address_of
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT

NOTHING: frozenset[int] = frozenset()


class Shelf:
    """A keeper that does what the test says, and takes notes."""

    def __init__(self) -> None:
        self.blocks: list[SavedBlock] = []
        self.found: list[tuple[int, int, int, int]] = []
        self.dropped: list[int] = []
        self.fetched: list[int] = []
        self.names: dict[int, list[tuple[int, int]]] = {}
        self.lock: AbstractContextManager[Any] = nullcontext()
        self._away: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, layer: int, number: int, microbatch: int) -> SavedBlock:
        block = SavedBlock(tensor, layer, number, microbatch)
        self.blocks.append(block)
        self.found.append((block.microbatch, block.layer, block.number, block.num_bytes))
        return block

    def also(self, block: SavedBlock, layer: int, number: int) -> None:
        self.names.setdefault(self.blocks.index(block), []).append((layer, number))

    def fetch(self, block: SavedBlock) -> None:
        place = self.blocks.index(block)
        if place in self._away:
            self.fetched.append(place)
            block.come_back(self._away.pop(place))

    def drop(self, block: SavedBlock) -> None:
        self.dropped.append(self.blocks.index(block))

    def make_room(self, num_bytes: int, layer: int) -> None:
        pass

    def put_away(self) -> int:
        """Lets go of everything that is here; returns how many blocks that were."""
        number = 0
        for place, block in enumerate(self.blocks):
            memory = block.memory()
            if memory is not None:
                self._away[place] = memory.clone()
                block.leave()
                number += 1
        return number

    def bring_back(self) -> None:
        """Brings everything back."""
        for place, block in enumerate(self.blocks):
            if place in self._away:
                block.come_back(self._away.pop(place))


def call(
    layer: nn.Module, *args: Tensor, keeper: Shelf, observer: Observer | None = None
) -> Tensor:
    """One call of a layer, whose saved tensors the keeper has."""
    gate = NamedLayer("layer", layer, 0)
    output: Tensor = LayerCall(gate, gate.run, SavedTable(0, keeper), observer).run(args, {})
    return output


def at(memory: bytearray) -> Tensor:
    """A new storage at a given address."""
    return torch.frombuffer(memory, dtype=torch.float32)


# --- blocks ---


def views(base: Tensor) -> dict[str, Tensor]:
    """Many ways to see the same 96 bytes."""
    return {
        "itself": base,
        "shaped": base.view(2, 3, 4),
        "transposed": base.view(4, 6).T,
        "with an offset": base[5:11].view(2, 3),
        "with steps": base.view(4, 6)[:, ::2],
        "a column": base.view(4, 6)[:, 3],
        "expanded": base[:3].expand(4, 3),
        "diagonal": base[:9].view(3, 3).diagonal(),
        "overlapping": base.as_strided((5, 4), (2, 1), 3),
        "a number": base[7],
        "integers": base.view(torch.int32),
        "complex": torch.view_as_complex(base.view(12, 2)),
        "bytes": base.view(torch.uint8)[3:90],
        "permuted": base.view(2, 3, 4).permute(2, 0, 1),
    }


def bytes_of_layers(observer: Observer) -> dict[int, int]:
    return {layer: sum(t.num_bytes for t in found) for layer, found in observer.of_layers.items()}


def test_views_of_one_storage_are_one_block_that_moves_as_one() -> None:
    keeper = Shelf()
    table = SavedTable(5, keeper)
    wanted = {name: view.clone() for name, view in views(torch.arange(24.0)).items()}
    layouts = {
        name: (view.dtype, view.shape, view.stride(), view.storage_offset())
        for name, view in views(torch.arange(24.0)).items()
    }
    saved = {
        name: table.save(view, 3, number, NOTHING)
        for number, (name, view) in enumerate(views(torch.arange(24.0)).items(), start=2)
    }
    assert keeper.found == [(5, 3, 2, 96)], "counted once, under the number of the first"

    for _ in range(2):
        assert keeper.put_away() == 1
        assert all(one.tensor is None for one in saved.values())
        found = {name: one.get() for name, one in saved.items()}
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name]), name
            layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
            assert layout == layouts[name], name
        assert len({address_of(tensor) for tensor in found.values()}) == 1
    assert keeper.fetched == [0, 0], "one of them brings all back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_memory_that_is_no_multiple_of_an_element(dtype: torch.dtype) -> None:
    keeper = Shelf()
    memory = torch.arange(35, dtype=torch.uint8)
    tensor = memory[:32].view(dtype)[1:]
    saved = SavedTable(0, keeper).save(tensor, 0, 0, NOTHING)
    wanted = tensor.clone()
    assert keeper.found[0][3] == 35
    keeper.put_away()
    # The bits: what they mean as numbers does not matter.
    assert torch.equal(saved.get().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_memory_of_every_type(dtype: torch.dtype) -> None:
    keeper = Shelf()
    tensor = (torch.arange(24) % 3).to(dtype).view(4, 6).T
    saved = SavedTable(0, keeper).save(tensor, 0, 0, NOTHING)
    wanted = tensor.clone()
    keeper.put_away()
    assert torch.equal(saved.get(), wanted)
    assert saved.get().dtype is dtype


def test_tensors_of_several_layers_that_share_memory_are_counted_with_the_first() -> None:
    keeper = Shelf()
    table = SavedTable(1, keeper)
    x, y = torch.ones(6), torch.ones(2)
    all_saved = [
        table.save(x, 0, 1, NOTHING),
        table.save(x.view(2, 3), 1, 0, NOTHING),
        table.save(y, 1, 1, NOTHING),
    ]
    assert keeper.found == [(1, 0, 1, 24), (1, 1, 1, 8)]
    # Each microbatch has a table of its own.
    all_saved.append(SavedTable(2, keeper).save(x, 0, 0, NOTHING))
    assert keeper.found[2:] == [(2, 0, 0, 24)]


def test_memory_that_leaves_while_another_layer_saves_it_is_another_block() -> None:
    """A thread lets go of it when the second layer has just found it here."""
    shelf = Shelf()
    table = SavedTable(keeper=shelf)
    tensor = torch.arange(10.0)
    first = table.save(tensor, 0, 0, frozenset())

    class Leaves(nullcontext[None]):
        def __enter__(self) -> None:
            shelf.put_away()

    shelf.lock = Leaves()
    second = table.save(tensor.view(2, 5), 1, 0, frozenset())
    assert first.tensor is None
    assert second.block is not first.block
    shelf.bring_back()
    assert torch.equal(first.get(), tensor)
    assert torch.equal(second.get(), tensor.view(2, 5))


def test_a_block_lives_as_long_as_one_of_its_tensors() -> None:
    keeper = Shelf()
    table = SavedTable(0, keeper)
    x = torch.arange(6.0)
    first, second = table.save(x, 0, 0, NOTHING), table.save(x[3:], 0, 1, NOTHING)
    del first
    assert keeper.dropped == []
    assert keeper.put_away() == 1
    assert second.get().tolist() == [3.0, 4.0, 5.0]
    del second
    assert keeper.dropped == [0]


def test_the_memory_is_free_when_a_block_has_left() -> None:
    class Waves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x)
            storages.append(StorageWeakRef(y.untyped_storage()))
            return torch.cos(y) * y[::2].repeat(2)

    storages: list[StorageWeakRef] = []
    keeper = Shelf()
    x = torch.randn(1000, requires_grad=True)
    y = call(Waves(), x * 1, keeper=keeper)
    assert not storages[0].expired()
    assert keeper.put_away() == 4, "its input, both factors, and what it makes of the first"
    assert storages[0].expired()
    y.sum().backward()
    gradient = x.grad
    wanted = x.detach().requires_grad_()
    inside = torch.sin(wanted)
    (torch.cos(inside) * inside[::2].repeat(2)).sum().backward()
    assert gradient is not None
    assert wanted.grad is not None
    assert torch.equal(gradient, wanted.grad)


def test_what_the_user_holds_is_left_alone() -> None:
    keeper = Shelf()
    x = torch.randn(5, requires_grad=True)
    y = call(nn.Tanh(), x, keeper=keeper)
    wanted = y.detach().clone()
    assert keeper.put_away() == 1
    assert torch.equal(y, wanted)
    keeper.bring_back()
    assert torch.equal(y, wanted)
    y.sum().backward()
    again = x.detach().requires_grad_()
    torch.tanh(again).sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert torch.equal(x.grad, again.grad)


def test_a_backward_that_is_run_twice() -> None:
    keeper = Shelf()
    first = nn.Linear(4, 4)
    layer = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4))
    y = call(layer, torch.randn(3, 4), keeper=keeper).square().sum()
    found = []
    for retain in (True, False):
        assert keeper.put_away()
        found.append(torch.autograd.grad(y, first.weight, retain_graph=retain)[0])
    assert torch.equal(*found)


def test_without_a_keeper_nothing_is_counted() -> None:
    table = SavedTable()
    saved = table.save(torch.ones(3), 0, 0, NOTHING)
    assert saved.block is None


# --- writes ---


class Times(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return x * w


def add_one(tensor: Tensor) -> None:
    tensor.add_(1)


def add_one_to_a_view(tensor: Tensor) -> None:
    tensor[1:2].add_(1)


@pytest.mark.parametrize("write", [add_one, add_one_to_a_view])
@pytest.mark.parametrize("when", ["here", "before it leaves", "away", "back", "away again"])
def test_what_is_written_to_after_it_was_saved_is_torchs_error(
    when: str, write: Callable[[Tensor], None]
) -> None:
    keeper = Shelf()
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    y = call(Times(), x, w, keeper=keeper)
    if when == "before it leaves":
        write(w)
    if when != "here":
        assert keeper.put_away() == 1
    if when == "away":
        write(w)
    if when in ("back", "away again", "before it leaves"):
        keeper.bring_back()
    if when in ("here", "back"):
        write(w)
    if when == "away again":
        keeper.put_away()
        write(w)
    with pytest.raises(
        RuntimeError,
        match=r"gradient computation has been modified by an inplace operation:"
        r" \[torch.FloatTensor \[3\]\] is at version 1; expected version 0 instead",
    ):
        y.sum().backward()


def test_torch_says_it_in_the_same_words() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    keeper = Shelf()
    messages = []
    for y in (x * w, call(Times(), x, w, keeper=keeper)):
        w.add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        messages.append(str(caught.value).split(":")[0])
    assert messages[0] == messages[1]


def test_what_was_written_to_before_it_was_saved_is_fine() -> None:
    keeper = Shelf()
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    w.add_(1)
    y = call(Times(), x, w, keeper=keeper)
    keeper.put_away()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


# --- what is left out ---


class Own(nn.Module):
    """Saves its parameters, views of them, a buffer and its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        half = self.linear(x) * self.scale[:, :3].repeat(1, 2)
        return half * self.scale * self.linear.weight[:3] * self.linear.bias.expand(3, 6)


def test_parameters_and_buffers_are_left_out() -> None:
    keeper, observer = Shelf(), Observer()
    x = torch.randn(3, 6, requires_grad=True)
    y = call(Own(), x, keeper=keeper, observer=observer)
    makers = {tensor.maker for tensor in observer.of_layers[0] if not tensor.num_bytes}
    assert "parameter" in makers
    counted = [tensor for tensor in observer.of_layers[0] if tensor.num_bytes]
    assert [tensor.maker for tensor in counted] == ["input", "repeat", "mul", "mul"]
    assert [found[2:] for found in keeper.found] == [(t.number, t.num_bytes) for t in counted]
    keeper.put_away()
    y.sum().backward()


def test_the_batch_is_left_out() -> None:
    keeper = Shelf()
    batch = torch.randn(3, 6)
    table = SavedTable(0, keeper, [address_of(batch)])
    for view in (batch, batch.T, batch[1:]):
        assert table.save(view, 0, 0, NOTHING).get() is not None
    assert keeper.found == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_in_other_memory_than_the_devices_stays_there(device: str) -> None:
    """Attention on a GPU saves the seed of its dropout in host memory."""
    keeper, observer = Shelf(), Observer()
    table = SavedTable(0, keeper, device=torch.device(device))
    gate = NamedLayer("layer", Own(), 0)
    x = torch.randn(3, 6, requires_grad=True)
    y = LayerCall(gate, gate.run, table, observer).run((x,), {})
    if device == "cpu":
        assert keeper.put_away()
        assert observer.num_bytes
    else:
        assert keeper.found == []
        assert observer.num_bytes == 0
    y.sum().backward()
    assert x.grad is not None


def lazy() -> dict[str, Tensor]:
    numbers = torch.arange(4.0)
    z = torch.complex(numbers, numbers + 1)
    return {
        "conj": z.conj(),
        "neg": z.conj().imag,
        "sparse": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", ["conj", "neg", "sparse", "csr", "empty"])
def test_what_is_not_all_in_its_memory_stays(name: str) -> None:
    keeper = Shelf()
    tensor = lazy()[name]
    saved = SavedTable(0, keeper).save(tensor, 0, 0, NOTHING)
    assert saved.block is None
    assert keeper.found == []
    found = saved.get()
    assert found.layout is tensor.layout
    assert found.is_conj() == tensor.is_conj()
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_a_layer_of_complex_numbers() -> None:
    class Turns(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return (z * z.conj() * torch.exp(z)).imag.neg() * z.conj().imag

    found = []
    for moves in (False, True):
        keeper = Shelf()
        torch.manual_seed(0)
        z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        y = call(Turns(), z * 1, keeper=keeper)
        if moves:
            assert keeper.put_away()
        y.sum().backward()
        assert z.grad is not None
        found.append(z.grad)
    assert torch.equal(*found)


# --- the end of a block ---


@pytest.mark.parametrize("away", [False, True])
def test_blocks_are_dropped_when_the_graph_is_gone(away: bool) -> None:
    keeper = Shelf()
    y = call(
        nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(4, requires_grad=True) * 1, keeper=keeper
    )
    if away:
        keeper.put_away()
    assert keeper.dropped == []
    gc.disable()
    try:
        del y
        assert sorted(keeper.dropped) == [0, 1], "without the garbage collector"
    finally:
        gc.enable()
    assert keeper.fetched == []


def test_blocks_are_dropped_as_the_backward_goes() -> None:
    dropped: list[list[int]] = []
    keeper = Shelf()

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            dropped.append(list(keeper.dropped))
            return gradient

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = Notes.apply(torch.tanh(x))
            return Notes.apply(torch.sigmoid(x))

    y = call(Noting(), torch.ones(4, requires_grad=True) * 1, keeper=keeper)
    keeper.put_away()
    y.sum().backward()
    assert dropped == [[], [1]]
    assert keeper.dropped == [1, 0]
    # The output alone holds nothing any more.
    assert y.shape == (4,)


@pytest.mark.parametrize("ending", ["dropped", "away", "back elsewhere"])
def test_memory_that_comes_again_under_the_same_address_is_another_block(ending: str) -> None:
    keeper = Shelf()
    table = SavedTable(0, keeper)
    memory = bytearray(24)
    first: Saved | None = table.save(at(memory).fill_(1), 0, 0, NOTHING)
    if ending == "dropped":
        first = None
        assert keeper.dropped == [0]
    else:
        keeper.put_away()
    if ending == "back elsewhere":
        keeper.bring_back()
    second = table.save(at(memory).fill_(2), 1, 4, NOTHING)
    assert keeper.found == [(0, 0, 0, 24), (0, 1, 4, 24)]
    assert keeper.put_away() == 1 + (ending == "back elsewhere")
    at(memory).fill_(3)
    if first is not None:
        assert first.get().tolist() == [1.0] * 6
    assert second.get().tolist() == [2.0] * 6


def test_a_block_that_was_made_again_takes_the_place_of_the_first() -> None:
    keeper = Shelf()
    table = SavedTable(0, keeper)
    x = torch.arange(4.0)
    saved = table.save(x[1:], 2, 3, NOTHING)
    saved.let_go()
    saved.leave_block()
    assert keeper.dropped == [0]
    table.make_good(saved, (x + 0)[1:], 2, 3)
    assert keeper.found == [(0, 2, 3, 16), (0, 2, 3, 16)]
    assert keeper.put_away() == 1
    assert saved.get().tolist() == [1.0, 2.0, 3.0]


# --- what is observed ---


class Net(nn.Module):
    """A layer with modules inside, of which one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5))
        self.out = nn.Linear(8, 6)
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.out(self.inner(x)))
        return torch.sin(self.act(y)) + x


def test_who_made_what_is_named() -> None:
    observer = Observer()
    call(Net(), torch.randn(3, 6, requires_grad=True) * 1, keeper=Shelf(), observer=observer)
    found = [(tensor.maker, tensor.num_bytes, tensor.shape) for tensor in observer.of_layers[0]]
    expected = [
        ("input", 72, (3, 6)),
        ("parameter", 0, (6, 8)),
        ("inner.1: tanh", 96, (3, 8)),
        ("inner.2: mul", 96, (3, 8)),
        ("parameter", 0, (8, 6)),
        ("act: sigmoid", 72, (3, 6)),
        ("act: sigmoid", 72, (3, 6)),
        # What the sine is taken of is what was saved just before.
        ("act: sigmoid", 0, (3, 6)),
    ]
    # How a dropout makes its mask is torch's own affair.
    assert [one for one in found if one[0] in {maker for maker, *_ in expected}] == expected
    (mask,) = [one for one in found if one[0] not in {maker for maker, *_ in expected}]
    assert mask[0].startswith("inner.2: ")
    assert mask[2] == (3, 8)
    assert [tensor.number for tensor in observer.of_layers[0]] == list(range(len(found)))
    assert observer.of_inputs == {0: 72}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "own": Own,
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True),
    "norm": lambda: nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.ReLU()),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "views": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Softmax(2), nn.Flatten(1), nn.Tanh()
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_observed_is_what_is_counted(name: str) -> None:
    keeper, observer = Shelf(), Observer()
    table = SavedTable(3, keeper)
    x = torch.randn(3, 6, requires_grad=True) * 1
    if name == "encoder":
        x = x.view(1, 3, 6)
    for number in range(2):
        gate = NamedLayer("layer", LAYERS[name](), number)
        x = LayerCall(gate, gate.run, table, observer).run((x,), {})
    expected = [
        (3, layer, tensor.number, tensor.num_bytes)
        for layer, tensors in observer.of_layers.items()
        for tensor in tensors
        if tensor.num_bytes
    ]
    assert keeper.found == expected
    assert {layer for _, layer, _, _ in expected} == {0, 1}
    assert bytes_of_layers(observer) == {
        layer: sum(found[3] for found in expected if found[1] == layer) for layer in (0, 1)
    }


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same_bits_however_often_it_moves(name: str) -> None:
    found = []
    for moves in (0, 1, 2):
        keeper = Shelf()
        torch.manual_seed(0)
        layer = LAYERS[name]()
        x = torch.randn(3, 6, requires_grad=True)
        y = call(layer, x.view(1, 3, 6) if name == "encoder" else x * 1, keeper=keeper)
        for _ in range(moves):
            keeper.bring_back()
            assert keeper.put_away()
        y.square().sum().backward()
        assert x.grad is not None
        found.append([x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_what_the_layer_before_has_saved_is_counted_there() -> None:
    observer = Observer()
    x = torch.ones(5, requires_grad=True) * 1
    for number in range(2):
        gate = NamedLayer("layer", nn.Tanh() if not number else nn.Sigmoid(), number)
        given = x.exp() if number else x
        x = LayerCall(gate, gate.run, SavedTable(), observer).run((given,), {})
    assert bytes_of_layers(observer) == {0: 20, 1: 20}
    observer = Observer()
    y = torch.ones(5, requires_grad=True) * 1
    for number, layer in enumerate((nn.Tanh(), nn.GELU())):
        gate = NamedLayer("layer", layer, number)
        y = LayerCall(gate, gate.run, SavedTable(), observer).run((y,), {})
    assert bytes_of_layers(observer) == {0: 20, 1: 0}
    assert [tensor.maker for tensor in observer.of_layers[1]] == ["input"]


def test_an_observer_holds_nothing() -> None:
    """A tensor that is swapped while it is recorded leaves the device."""
    observer = Observer()
    y = call(nn.Tanh(), torch.ones(5, requires_grad=True) * 1, keeper=Shelf(), observer=observer)
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_another_tensor_at_the_address_of_a_freed_one_counts() -> None:
    observer = Observer()
    for number in range(20):
        saved = torch.ones(1000)
        observer.note(saved, 0, number, "", False)
        observer.note(saved.view(10, 100), 0, 100 + number, "", False)
        del saved
    assert bytes_of_layers(observer) == {0: 20 * 4000}


def test_a_layer_that_fails_leaves_no_hooks() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call(nn.Sequential(Fails()), torch.ones(3), keeper=Shelf(), observer=Observer())
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_memory_goes_by_the_names_of_all_that_share_it() -> None:
    shelf = Shelf()
    table = SavedTable(0, shelf)
    memory = torch.ones(4)
    first = table.save(memory, 0, FRONT, frozenset())
    second = table.save(memory.view(2, 2), 0, 1, frozenset())
    assert first.block is second.block
    assert shelf.names == {0: [(0, 1)]}
    assert shelf.found == [(0, 0, FRONT, 16)]
