from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.trace.placeholder import Placeholder, dtype_named, spec_of, watching
from lightning_pipeshift.plan.inputs.flow import TensorSpec, Value
from tests.unit.model.following import Notes, placeholder

FIRST, SECOND = Value(0, 0, 0), Value(1, 0, 0)


def sources(tensor: Any) -> set[Value]:
    """The values from which a placeholder was computed."""
    return tensor.origin.values


WAYS = [
    ("method", lambda x: x.relu()),
    ("matmul", lambda x: x @ torch.ones(8, 5)),
    ("to the right of a tensor", lambda x: torch.ones(3, 4) @ x),
    ("broadcast", lambda x: x[:, None] + torch.ones(6, 1)),
    ("reshape", lambda x: x.view(2, 2, 8).transpose(0, 2).reshape(4, -1)),
    ("cast", lambda x: x.half().double()),
    ("comparison", lambda x: x > 0),
    ("argmax", lambda x: x.argmax(-1)),
    ("topk", lambda x: x.topk(3).indices),
    ("sort", lambda x: torch.sort(x, dim=1)[0]),
    ("where", lambda x: torch.where(x > 0, x, 0.0)),
    ("where with real condition", lambda x: torch.where(torch.ones(4, 8) > 0, x, -x)),
    ("cat", lambda x: torch.cat([torch.ones(1, 8), x, x])),
    ("stack", lambda x: torch.stack([x, torch.ones(4, 8)], dim=-1)),
    ("chunk", lambda x: x.chunk(3, dim=1)[-1]),
    ("einsum", lambda x: torch.einsum("ij,kj->ik", x, x)),
    ("gather", lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long))),
    ("embedding", lambda x: F.embedding(x.long() * 0, torch.ones(3, 5))),
    ("one_hot", lambda x: F.one_hot(x.argmax(1), 8)),
    ("scatter", lambda x: torch.zeros(4, 8).scatter(1, x.long() * 0, 1.0)),
    ("index by a slice", lambda x: x[1:, ::2]),
    ("index by integers", lambda x: x[torch.tensor([0, 0, 3])]),
    ("index by two tensors", lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])]),
    ("index by a mask", lambda x: x[torch.tensor([True, False, True, True])]),
    ("index by a mask of bytes", lambda x: x[torch.tensor([1, 0, 0, 1]).bool()]),
    ("index behind a colon", lambda x: x[:, torch.arange(8) > 2]),
    ("index by a mask of two dimensions", lambda x: x[torch.eye(4, 8) > 0]),
    (
        "index of three by a mask of two",
        lambda x: x.view(2, 2, 8)[torch.tensor([[True, False], [True, True]])],
    ),
    (
        "index by a mask of two dimensions in the middle",
        lambda x: x.view(2, 2, 4, 2)[:, torch.eye(2, 4) > 0],
    ),
    (
        "index by a mask and integers",
        lambda x: x[torch.tensor([True, False, True, False]), torch.tensor([5, 6])],
    ),
    ("index a real tensor", lambda x: torch.ones(9, 3)[x.argmax(1)]),
    ("masked fill", lambda x: x.masked_fill(torch.eye(4, 8) > 0, float("-inf")).softmax(-1)),
    ("dropout", lambda x: F.dropout(x, 0.5)),
    ("random like", lambda x: torch.rand_like(x)),
    ("new tensor", lambda x: x.new_zeros(3, dtype=torch.int32)),
    ("cross entropy", lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long))),
    (
        "cross entropy with gaps",
        lambda x: F.cross_entropy(x, torch.full((4,), -100), reduction="none"),
    ),
    ("binary cross entropy", lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 8))),
    (
        "attention",
        lambda x: F.scaled_dot_product_attention(
            x.view(1, 2, 2, 8), x.view(1, 2, 2, 8), x.view(1, 2, 2, 8), is_causal=True
        ),
    ),
    ("LSTM", lambda x: nn.LSTM(8, 5, batch_first=True)(x.view(2, 2, 8))[1][0]),
    ("GRU", lambda x: nn.GRU(8, 5, num_layers=2)(x.view(2, 2, 8))[0]),
    ("multihead attention", lambda x: nn.MultiheadAttention(8, 2)(x, x, x)[0]),
    ("convolution", lambda x: nn.Conv1d(4, 3, 3)(x)),
    ("batch norm", lambda x: nn.BatchNorm1d(8)(x)),
    ("layer norm", lambda x: nn.LayerNorm(8)(x)),
    ("interpolate", lambda x: F.interpolate(x[None], scale_factor=2)),
    ("fft", lambda x: torch.fft.rfft(x)),
    ("norm", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ("cdist", lambda x: torch.cdist(x, x)),
    ("padding", lambda x: F.pad(x, (1, 1))),
    ("median", lambda x: x.median(dim=1).indices),
    ("multinomial", lambda x: x.abs().multinomial(2)),
    ("split and unpack", lambda x: torch.split(x, [3, 5], dim=1)[1]),
    ("complex", lambda x: torch.view_as_complex(x.view(4, 4, 2))),
    ("empty", lambda x: x[:0]),
]


@pytest.mark.parametrize("way", [way for _, way in WAYS], ids=[name for name, _ in WAYS])
def test_shape_and_type_are_those_of_a_real_tensor(way):
    made = way(placeholder(4, 8))
    real = way(torch.rand(4, 8))
    assert isinstance(made, Placeholder)
    assert (made.shape, made.dtype) == (real.shape, real.dtype)
    assert made.device.type == "cpu"
    # Not compared: the strides, which kernels choose.
    assert made.origin.values <= {FIRST}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_placeholders_as_it_casts_tensors(dtype):
    def run(x):
        with torch.autocast("cpu", dtype):
            hidden = nn.Linear(8, 4)(x)
            attention = F.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None])
            return hidden, x @ hidden.T.repeat(2, 1)[:8], attention, F.softmax(hidden, -1)

    for made, real in zip(run(placeholder(4, 8)), run(torch.rand(4, 8)), strict=True):
        assert (made.shape, made.dtype) == (real.shape, real.dtype)


def test_what_goes_in_is_remembered():
    first, second = placeholder(4, 8), placeholder(4, 8, layer=1)
    assert (first + 1).origin.values == {FIRST}
    assert (first + second).origin.values == {FIRST, SECOND}
    assert sources(torch.cat([second, torch.ones(1, 8)])) == {SECOND}
    assert sources(torch.ones(4, 8).where(second > 0, first)) == {FIRST, SECOND}
    assert (first * 2 - second.detach()).sum().origin.values == {FIRST, SECOND}


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x.view(-1),
        lambda x: x.T,
        lambda x: x.unsqueeze(0).expand(3, 4, 8),
        lambda x: x.chunk(2)[1],
        lambda x: x.detach(),
        lambda x: x.reshape(8, 4),
        lambda x: x.unbind(0)[2],
    ],
)
def test_writes_through_a_view_reach_the_base_and_other_views(view):
    base, written = placeholder(4, 8), placeholder(1, layer=1)
    other = base[0]
    part = view(base)
    part += written
    assert part.origin.values == base.origin.values == other.origin.values == {FIRST, SECOND}
    base.mul_(placeholder(1, layer=2))
    assert Value(2, 0, 0) in part.origin.values


def test_writes_to_a_copy_do_not_reach_the_base():
    base = placeholder(4, 8)
    for copy in (base.clone(), base + 0, base[torch.tensor([1, 2])]):
        copy.add_(placeholder(1, layer=1))
        assert copy.origin.values == {FIRST, SECOND}
    assert base.origin.values == {FIRST}


@pytest.mark.parametrize(
    "write",
    [
        lambda base, new: base.copy_(new),
        lambda base, new: base.__setitem__(slice(1, 2), new[:1]),
        lambda base, new: base.__setitem__(torch.tensor([True, False, True, False]), new[:2]),
        lambda base, new: base.__setitem__(torch.eye(4, 8) > 0, new[0, 0]),
        lambda base, new: base.index_put_((torch.tensor([1]),), new[:1]),
        lambda base, new: torch.add(new, 1, out=base),
        lambda base, new: base.masked_fill_(new > 0, 0.0),
        lambda base, new: F.relu(base.add_(new), inplace=True),
    ],
)
def test_ways_to_write_in_place(write):
    base = placeholder(4, 8)
    write(base, placeholder(4, 8, layer=1))
    assert SECOND in base.origin.values
    assert base.shape == (4, 8)


def test_writes_into_a_real_tensor_are_told():
    notes, real = Notes(), torch.zeros(4, 8)
    with watching(notes):
        real.copy_(placeholder(4, 8))
        real[1] = placeholder(8, layer=1)
    assert set().union(*notes.writes) == {FIRST, SECOND}


def test_inside_a_layers_own_memory_format():
    image = placeholder(like=torch.empty(2, 3, 4, 5, memory_format=torch.channels_last))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert (image + 1).stride() == (60, 1, 15, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.transpose_(0, 1),
        lambda x: x.t_(),
        lambda x: x[:1].squeeze_(0),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.quantile(0.5),  # which squeezes in place
    ],
)
def test_changes_of_shape_in_place(change):
    expected = change(torch.ones(4, 8)).shape
    made = change(placeholder(4, 8))
    assert made.shape == expected
    assert (made + 1).shape == expected


def test_changes_of_size_in_place_are_refused():
    with pytest.raises(LayerError, match=r"resize_.*returns a new tensor"):
        placeholder(4, 8).resize_(2, 16)


READS = [
    ("item", lambda x: x.sum().item()),
    ("float", lambda x: float(x.sum())),
    ("int", lambda x: int(x.sum())),
    ("bool", lambda x: bool(x.sum() > 0)),
    ("if", lambda x: 1 if (x > 0).any() else 0),
    ("tolist", lambda x: x.tolist()),
    ("numpy", lambda x: x.numpy()),
    ("asarray", lambda x: np.asarray(x)),
    ("nonzero", lambda x: x.nonzero()),
    ("unique", lambda x: x.unique()),
    ("bincount", lambda x: x.view(-1).long().bincount()),
    ("masked_select", lambda x: x.masked_select(x > 0)),
    ("own mask", lambda x: x[x > 0]),
    ("slice to it", lambda x: torch.ones(9)[: x.sum().long()]),
    ("range to it", lambda x: list(range(x.sum().long()))),
    ("equal", lambda x: torch.equal(x, torch.ones(4, 8))),
    ("allclose", lambda x: torch.allclose(x, x)),
    ("format", lambda x: f"{x.sum():.2f}"),
    ("repeat_interleave", lambda x: torch.ones(4).repeat_interleave(x[:, 0].long())),
    ("one_hot", lambda x: F.one_hot(x.long())),
    ("iterate", lambda x: [float(v) for v in x[0]]),
    ("where", lambda x: torch.where(x > 0)),
    ("pack a padded sequence", lambda x: nn.utils.rnn.pack_padded_sequence(x[None], [4], True)),
]


@pytest.mark.parametrize("read", [read for _, read in READS], ids=[name for name, _ in READS])
def test_reading_values_names_the_layer_and_the_remedy(read):
    with pytest.raises(LayerError, match=r"(?s)values of the output of layer 0.*configure_layers"):
        read(placeholder(4, 8))


@pytest.mark.parametrize("read", [read for _, read in READS], ids=[name for name, _ in READS])
def test_reading_values_is_estimated_and_told_while_recording(read):
    notes = Notes()
    with watching(notes):
        read(placeholder(4, 8))
    assert notes.reads
    assert set().union(*(values for _, values in notes.reads)) == {FIRST}


def test_numbers_are_estimated_as_ones_and_conditions_as_false():
    with watching(Notes()):
        x = placeholder(2, 3)
        assert x.tolist() == [[1.0] * 3] * 2
        assert x.numpy().shape == (2, 3)
        assert np.log(np.asarray(x[0])).tolist() == [0.0] * 3
        assert x.sum().item() == 1.0
        assert (x > 0).tolist() == [[False] * 3] * 2
        assert not (x > 0).all()
        assert x[0, 0].long().item() == 1


def test_a_shape_made_of_estimated_values_goes_on_as_a_placeholder():
    with watching(Notes()):
        x = placeholder(2, 3)
        for made in (x.nonzero(), x.unique(), x.long().view(-1).bincount(), x[x > 0]):
            assert isinstance(made, Placeholder)
            assert sources(made + 1) == {FIRST}


def test_a_real_mask_tells_that_shapes_depend_on_the_batch():
    notes = Notes()
    with watching(notes):
        placeholder(4, 8)[torch.tensor([0, 1])]
        assert notes.shapes == 0
        placeholder(4, 8)[torch.tensor([True, False, True, False])]
        assert notes.shapes == 1
        placeholder(4, 8)[torch.eye(4, 8) > 0]
        assert notes.shapes == 2
    assert not notes.reads


def test_random_operations_are_told():
    notes = Notes()
    with watching(notes):
        x = placeholder(4, 8)
        F.dropout(x, 0.5)
        torch.bernoulli(x)
        torch.randn_like(x)
        x.uniform_()
        F.dropout(x, 0.5, training=False)
    assert notes.num_draws == 4


def test_no_gradient_leaks_and_none_is_lost():
    x = placeholder(4, 8)
    assert not x.requires_grad
    weight = torch.ones(8, 2, requires_grad=True)
    assert (x @ weight).requires_grad
    with torch.no_grad():
        assert not (x @ weight).requires_grad


def test_in_inference_mode():
    with torch.inference_mode():
        x = placeholder(4, 8)
        hidden = nn.Linear(8, 2)(x)
        assert hidden.shape == (4, 2)
        hidden[0] = 0
        hidden += 1
        assert hidden.view(-1).origin.values == {FIRST}
        assert F.cross_entropy(hidden, torch.zeros(4, dtype=torch.long)).shape == ()
        with pytest.raises(LayerError, match="layer 0"):
            hidden.sum().item()
    assert (x + 1).shape == (4, 8)


def test_the_text_of_a_placeholder_reads_no_values():
    text = f"{placeholder(4, 8)!r} {placeholder(2, dtype=torch.int64, layer=3)}"
    assert text == (
        "Placeholder((4, 8), torch.float32, from the output of layer 0) "
        "Placeholder((2,), torch.int64, from the output of layer 3)"
    )


def test_what_an_operation_refuses_it_refuses_on_placeholders():
    with pytest.raises(RuntimeError, match=r"reduction dim|size|shape"):
        placeholder(4, 8) @ torch.ones(3, 3)
    with pytest.raises(IndexError):
        placeholder(4, 8).sum(dim=5)
    with pytest.raises(TypeError):
        placeholder(4, 8).reshape("x")


@torch.library.custom_op("pipeshift_tests::no_meta", mutates_args=())
def no_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape[0], 2)


@torch.library.custom_op("pipeshift_tests::strict_on_meta", mutates_args=())
def strict_on_meta(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != 8:
        raise ValueError("eight columns")
    return x.new_zeros(x.shape[0], 2)


@strict_on_meta.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Expected inputs of BF16 type")


def test_an_operation_that_refuses_only_on_the_meta_device():
    notes = Notes()
    with watching(notes):
        result = strict_on_meta(placeholder(4, 8))
    assert (result.shape, result.dtype, sources(result)) == ((4, 2), torch.float32, {FIRST})
    assert not notes.reads, "its values were not asked for"
    with pytest.raises(RuntimeError, match="BF16"):
        strict_on_meta(placeholder(4, 7))


def test_an_operation_without_a_meta_kernel():
    with pytest.raises(LayerError, match="no_meta"):
        no_meta(placeholder(4, 8))
    notes = Notes()
    with watching(notes):
        made = no_meta(placeholder(4, 8))
    assert made.shape == (4, 2)
    assert made.origin.values == {FIRST}
    assert notes.reads


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(3, 2).T, (1, 2)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(()), ()),
        # Gaps and overlaps do not travel.
        (torch.empty(4, 6)[:, ::2], (3, 1)),
        (torch.empty(1, 3).expand(4, 3), (3, 1)),
        (torch.empty(5, 5).as_strided((3, 3), (1, 1)), (3, 1)),
        (torch.empty(0, 3), (3, 1)),
        (torch.empty(3, 0), (1, 1)),
    ],
)
def test_the_spec_of_a_tensor(tensor, stride):
    spec = spec_of(tensor)
    assert spec == TensorSpec(tuple(tensor.shape), stride, "torch.float32", 4)
    again = torch.empty_strided(spec.shape, spec.stride, dtype=dtype_named(spec.dtype))
    assert spec_of(again) == spec
    assert again.untyped_storage().nbytes() == spec.num_bytes


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_types_by_name(dtype):
    spec = spec_of(torch.empty(3, dtype=dtype))
    assert dtype_named(spec.dtype) is dtype
    assert spec.num_bytes == 3 * dtype.itemsize
