"""Compressed tensors are decoded to the same bits, or within the documented bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.model.saved import codec as codecs
from lightning_pipeshift.model.saved.codec import BLOCK, Codec, codec_named
from tests.unit.model.codec_bound import largest_error

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [
    *FLOATS,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
SIZES = [0, 1, 7, 8, 255, 256, 257, 10_000]
# More than is worked on at a time.
MANY = 600_001

LARGEST_EXPONENTS = {
    torch.float16: (-7, 4.5),
    torch.bfloat16: (-38, 38),
    torch.float32: (-38, 38),
    torch.float64: (-300, 300),
}


def named(name: str) -> Codec:
    codec = codec_named(name)
    assert codec is not None
    return codec


def any_bits(dtype: torch.dtype, numel: int, zeros: float, seed: int = 0) -> Tensor:
    """Elements of any bits, nans of all kinds among them, a share of them zero."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(numel, generator=g) >= zeros
    bits = torch.randint(0, 256, (numel, dtype.itemsize), dtype=torch.uint8, generator=g)
    bits[torch.rand(numel, generator=g) < zeros] = 0
    return bits.view(-1).view(dtype)


def unlike_blocks(dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
    """Finite numbers, each block of another magnitude."""
    g = torch.Generator().manual_seed(seed)
    low, high = LARGEST_EXPONENTS[dtype]
    num_blocks = -(-numel // BLOCK)
    scales = 10.0 ** (low + (high - low) * torch.rand(num_blocks, generator=g).double())
    values = 2 * torch.rand(num_blocks, BLOCK, generator=g, dtype=torch.float64) - 1
    return (values * scales.unsqueeze(1)).view(-1)[:numel].to(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(bits_of(found), bits_of(expected))


def there_and_back(codec: Codec, flat: Tensor) -> Tensor:
    """The decoded tensor after its parts were transferred, and nothing of the original remains."""
    encoded = codec.encode(flat)
    for part in encoded.parts:
        assert part.is_contiguous()
        assert (part.dim(), part.device) == (1, flat.device)
    travelled = encoded.with_parts(tuple(part.clone() for part in encoded.parts))
    assert travelled.num_bytes == encoded.num_bytes
    back = codec.decode(travelled)
    assert (back.dtype, back.shape, back.device) == (flat.dtype, flat.shape, flat.device)
    return back


def blocks_of(flat: Tensor) -> Tensor:
    """One block to a row, the last filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def assert_within_bounds(found: Tensor, flat: Tensor) -> None:
    """Each block within the bound that it would have by itself."""
    errors = (blocks_of(found).double() - blocks_of(flat).double()).abs().amax(1)
    bounds = [largest_error(block) for block in blocks_of(flat)]
    assert bool((errors <= torch.tensor(bounds, dtype=torch.float64)).all())


# ---------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_return(dtype: torch.dtype) -> None:
    for numel, zeros in itertools.product(SIZES, [0.0, 0.1, 0.5, 0.97, 1.0]):
        flat = any_bits(dtype, numel, zeros)
        before = flat.clone()
        assert_same_bits(there_and_back(named("lossless"), flat), before)
        assert_same_bits(flat, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_of_many_elements_return(dtype: torch.dtype) -> None:
    codec, flat = named("lossless"), any_bits(dtype, MANY, 0.5)
    assert codec.encode(flat).num_bytes < 0.7 * flat.nbytes
    assert_same_bits(there_and_back(codec, flat), flat)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_that_only_looks_like_zero_is_kept(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    values = [-0.0, smallest, -smallest, math.inf, -math.inf, math.nan, -math.nan, info.max]
    flat = torch.zeros(100, dtype=dtype)
    flat[3 : 3 + len(values)] = torch.tensor(values, dtype=dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # A nan with bits of its own.
    flat.view(integer)[50] = flat.view(integer)[6] + 1
    assert flat[50].isnan()
    codec = named("lossless")
    assert codec.encode(flat).num_bytes < 0.5 * flat.nbytes, "the zeros were not left out"
    back = there_and_back(codec, flat)
    assert torch.equal(back.view(integer), flat.view(integer))
    assert back[3].signbit()


@pytest.mark.parametrize("numel", [8, 256, 10_000])
def test_booleans_take_a_bit_each(numel: int) -> None:
    flat = any_bits(torch.bool, numel, 0.5)
    assert named("lossless").encode(flat).num_bytes == numel // 8


def test_booleans_that_are_neither_0_nor_1_are_true() -> None:
    flat = torch.tensor([0, 2, 1, 255, 0, 128, 0, 0] * 10, dtype=torch.uint8).view(torch.bool)
    back = there_and_back(named("lossless"), flat)
    assert back.view(torch.uint8).tolist() == [0, 1, 1, 1, 0, 1, 0, 0] * 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_a_larger_tensor(dtype: torch.dtype) -> None:
    # Memory that begins at an odd place.
    flat = any_bits(dtype, 1003, 0.5)[3:]
    assert_same_bits(there_and_back(named("lossless"), flat), flat.clone())


def test_zeros_are_left_out() -> None:
    flat = torch.randn(10_000)
    flat[torch.randperm(10_000)[:5_000]] = 0
    encoded = named("lossless").encode(flat)
    assert encoded.num_bytes < 0.6 * flat.nbytes
    assert encoded.num_bytes == 5_000 * 4 + 10_000 // 8


@pytest.mark.parametrize(("zeros", "is_smaller"), [(0, False), (1300, False), (1320, True)])
def test_zeros_are_left_out_where_that_saves_a_tenth(zeros: int, is_smaller: bool) -> None:
    # The bits take 1/32, so that a tenth is saved from 13.125 % zeros on.
    flat = torch.ones(10_000)
    flat[:zeros] = 0
    encoded = named("lossless").encode(flat)
    assert (encoded.num_bytes <= 0.9 * flat.nbytes) is is_smaller
    assert (encoded.num_bytes == flat.nbytes) is not is_smaller
    assert (encoded.parts[0].data_ptr() == flat.data_ptr()) is not is_smaller, "copied for nothing"


def test_a_conjugate_has_its_own_bits() -> None:
    x = torch.randn(500, dtype=torch.complex64)
    for flat in (x.conj(), x.conj().imag.contiguous(), torch.zeros_like(x).conj()):
        for name in ("lossless", "8bit"):
            back = named(name).decode(named(name).encode(flat))
            assert not back.is_conj()
            assert torch.allclose(back, flat.clone(), atol=0.05)
    assert_same_bits(there_and_back(named("lossless"), x.conj()), x.conj().resolve_conj())


# -------------------------------------------------------------------------------------------- 8bit


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_element_is_off_by_more_than_its_blocks_bound(dtype: torch.dtype, numel: int) -> None:
    codec, flat = named("8bit"), unlike_blocks(dtype, numel)
    back = there_and_back(codec, flat)
    assert_within_bounds(back, flat)
    if numel:
        error = float((back.double() - flat.double()).abs().max())
        assert error <= largest_error(flat)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bound_is_no_larger_than_need_be(dtype: torch.dtype) -> None:
    codec = named("8bit")
    flat = 2 * torch.rand(100_000, generator=torch.Generator().manual_seed(0)) - 1
    flat = (flat * 30).to(dtype)
    error = float((there_and_back(codec, flat).double() - flat.double()).abs().max())
    bound = largest_error(flat)
    # No closer, for the sake of bfloat16: its numbers are as far apart as the codes are.
    assert 0.5 * bound < error <= bound
    half_a_step, rounding = 30 / 127 / 2, 30 * torch.finfo(dtype).eps
    assert bound <= half_a_step * 1.001 + rounding


def test_more_blocks_than_are_worked_on_at_a_time() -> None:
    codec, flat = named("8bit"), unlike_blocks(torch.float32, MANY)
    back = there_and_back(codec, flat)
    begin = 599_040  # of a block near the end
    assert_within_bounds(back[begin:], flat[begin:])
    alone = [there_and_back(codec, piece) for piece in flat.split(BLOCK * 100)]
    assert torch.equal(back, torch.cat(alone))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_smallest_and_the_largest_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    steps = torch.linspace(-1, 1, BLOCK, dtype=torch.float64)
    largest = steps.mul(info.max).to(dtype)
    subnormal = (steps * 1000).round().mul(smallest).to(dtype)
    one_above_zero = torch.zeros(BLOCK, dtype=dtype)
    one_above_zero[7] = smallest
    flat = torch.cat([largest, subnormal, one_above_zero, torch.zeros(BLOCK, dtype=dtype)])
    codec = named("8bit")
    back = there_and_back(codec, flat)
    assert back.isfinite().all()
    assert_within_bounds(back, flat)
    assert back[0] == -info.max
    assert back[2 * BLOCK + 7] == smallest
    assert not back[-BLOCK:].any()


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 0.14), (torch.float32, 0.27), (torch.bfloat16, 0.52)]
)
def test_what_eight_bits_save(dtype: torch.dtype, most: float) -> None:
    for numel in (256, 10_000):
        flat = torch.randn(numel).to(dtype)
        assert named("8bit").encode(flat).num_bytes < most * flat.nbytes


def test_a_scale_for_every_256_elements() -> None:
    assert named("8bit").encode(torch.randn(10_000)).num_bytes == 10_000 + 40 * 4


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t not in FLOATS], ids=str)
def test_what_has_no_blocks_returns_with_its_bits(dtype: torch.dtype) -> None:
    for numel in SIZES:
        codec, flat = named("8bit"), any_bits(dtype, numel, 0.5)
        assert_same_bits(there_and_back(codec, flat), flat)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_few_elements_are_never_made_larger(dtype: torch.dtype) -> None:
    codec = named("8bit")
    for numel in range(20):
        flat = torch.rand(numel).to(dtype)
        encoded = codec.encode(flat)
        assert encoded.num_bytes <= flat.nbytes
        if encoded.num_bytes == flat.nbytes:
            assert_same_bits(there_and_back(codec, flat), flat)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_with_a_non_finite_element_returns_with_its_bits(
    dtype: torch.dtype, value: float
) -> None:
    codec, flat = named("8bit"), torch.randn(1000).to(dtype)
    flat[700] = value
    assert_same_bits(there_and_back(codec, flat), flat)


def test_the_default_type_does_not_matter() -> None:
    codec, flat = named("8bit"), torch.randn(1000)
    expected = there_and_back(codec, flat)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert_same_bits(there_and_back(codec, flat), expected)
    finally:
        torch.set_default_dtype(before)


# ------------------------------------------------------------------- where values cannot be seen


@pytest.mark.parametrize("name", ["lossless", "8bit"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64, torch.complex64], ids=str)
def test_nothing_is_waited_for_where_that_takes_time(dtype: torch.dtype, name: str) -> None:
    # A meta tensor has no values: whoever asks for one gets an error.
    flat = torch.empty(1000, dtype=dtype, device="meta")
    back = there_and_back(named(name), flat)
    assert back.dtype is dtype
    is_packed = named(name).encode(flat).num_bytes < flat.nbytes
    assert is_packed is (dtype is torch.bool if name == "lossless" else dtype in FLOATS)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_where_nobody_looks_a_non_finite_element_makes_its_block_nan(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, flat = named("8bit"), unlike_blocks(dtype, 5 * BLOCK + 10)
    flat[2 * BLOCK + 5] = value
    flat[5 * BLOCK + 1] = value
    monkeypatch.setattr(codecs, "may_look_at", lambda tensor: False)
    back = there_and_back(codec, flat)
    assert back[2 * BLOCK : 3 * BLOCK].isnan().all()
    assert back[5 * BLOCK :].isnan().all()
    for fine in (slice(0, 2 * BLOCK), slice(3 * BLOCK, 5 * BLOCK)):
        assert_within_bounds(back[fine], flat[fine])


@pytest.mark.cuda
@pytest.mark.parametrize("numel", [0, 1, 257, 10_000, 9_000_001])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64, torch.complex64], ids=str)
def test_on_a_gpu(dtype: torch.dtype, numel: int) -> None:
    flat = any_bits(dtype, numel, 0.5)
    there = flat.cuda()
    for name in ("lossless", "8bit"):
        codec = named(name)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            encoded = codec.encode(there)
            back = codec.decode(encoded)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert back.device == there.device
        if codec.name == "lossless" or dtype not in FLOATS:
            assert_same_bits(back.cpu(), flat)
    if dtype in FLOATS and numel > 1:
        finite = unlike_blocks(dtype, min(numel, 10_000))
        finite[5] = math.nan
        back = named("8bit").decode(named("8bit").encode(finite.cuda())).cpu()
        assert back[:BLOCK].isnan().all()
        assert_within_bounds(back[BLOCK:], finite[BLOCK:])


# ----------------------------------------------------------------------------------- what is common


@pytest.mark.parametrize("name", ["lossless", "8bit"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_back_has_memory_of_its_own(dtype: torch.dtype, name: str) -> None:
    for zeros in (0.0, 0.5):
        flat = any_bits(dtype, 1000, zeros)
        encoded = named(name).encode(flat)
        back = named(name).decode(encoded)
        before = [bits_of(part).clone() for part in encoded.parts]
        bits_of(back).fill_(1)
        after = [bits_of(part) for part in encoded.parts]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_parts_that_have_travelled_take_the_place_of_the_others() -> None:
    codec, flat = named("lossless"), any_bits(torch.float32, 1000, 0.5)
    encoded = codec.encode(flat)
    assert encoded.num_bytes == sum(part.nbytes for part in encoded.parts)
    bits, rest = encoded.parts
    doubled = encoded.with_parts((bits, rest.view(torch.float32).mul(2).view(rest.dtype)))
    assert doubled.parts[0] is bits
    assert torch.equal(codec.decode(doubled).nan_to_num(), flat.mul(2).nan_to_num())


@pytest.mark.parametrize("name", ["lossless", "8bit"])
def test_a_codec_has_the_name_that_it_goes_by(name: str) -> None:
    assert named(name).name == name


def test_no_codec() -> None:
    assert codec_named(None) is None


@pytest.mark.parametrize("name", ["zip", "8BIT", ""])
def test_a_codec_that_there_is_not(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"no codec '{name}' .* allowed are 'lossless', '8bit' and None"
    ):
        codec_named(name)
