"""Compresses saved tensors for transfers to the host or to another device, and decompresses them.

The transfer is the bottleneck: with a shorter one, tensors are prefetched in time more often. Saved
tensors often carry little information for their size. A dropout's mask has one bit in each byte,
the output of a ReLU is mostly zeros, and for most activations eight bits are enough.

There are two codecs; none is used unless the user asks for it. ``lossless`` returns the same bits.
``8bit`` does not; its documentation bounds the error of an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeshift.errors import ConfigurationError

BLOCK = 256
"""How many elements share a scale in ``8bit``."""

_RAW, _BITS, _NON_ZEROS, _BLOCKS = "raw", "bits", "non-zeros", "blocks"

# Elements processed at a time, so that intermediate results stay in the CPU's cache, and take
# little of a GPU's memory. Multiples of 8 and of BLOCK.
_SPAN_ON_CPU = 1 << 18
_SPAN_ELSEWHERE = 1 << 22

# Encoding and decoding take time, which pays off only if the tensor gets smaller by a tenth.
_WORTHWHILE = 0.9

# Integers as wide as an element, to compare bits; a complex128 is two of them.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# See `_packed` and `_unpacked`.
_GATHERS = 0x0102040810204080
_REPEATS = 0x0101010101010101
_PICKS = 0x8040201008040201 - (1 << 64)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded tensor.

    Args:
        parts: the vectors to move: contiguous, and on the tensor's device. The tensor itself may be
            the only one.
        kind: the way to decode it.
        dtype: the tensor's.
        numel: likewise.
    """

    parts: tuple[Tensor, ...]
    kind: str
    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes to transfer."""
        return sum(part.nbytes for part in self.parts)

    def with_parts(self, parts: tuple[Tensor, ...]) -> Encoded:
        """The same with other parts: the transferred ones."""
        return replace(self, parts=tuple(parts))

    def without_values(self) -> Encoded:
        """The same with parts that have shapes and types only. Code that transfers the parts keeps
        this: a reference to them, or to the tensor if it is the only one, would keep their memory.
        """
        return self.with_parts(tuple(torch.empty_like(part, device="meta") for part in self.parts))


class Codec(Protocol):
    """Compresses and decompresses tensors."""

    name: str
    """Its name for the user."""

    def encode(self, flat: Tensor) -> Encoded:
        """Encodes a contiguous vector of any type, which may be empty."""
        ...

    def decode(self, encoded: Encoded) -> Tensor:
        """The tensor, in new memory on the device that its parts are on."""
        ...


def codec_named(name: str | None) -> Codec | None:
    """A codec by its name; None for none.

    Raises:
        ConfigurationError: there is no codec of that name.
    """
    if name is None:
        return None
    codecs: tuple[Codec, ...] = (_Lossless(), _EightBit())
    for codec in codecs:
        if codec.name == name:
            return codec
    allowed = ", ".join(repr(codec.name) for codec in codecs)
    raise ConfigurationError(
        f"There is no codec {name!r} for offloaded saved tensors; allowed are {allowed} and"
        " None. Pass one of them, or None to transfer the tensors uncompressed."
    )


def may_look_at(tensor: Tensor) -> bool:
    """Whether its values can be read at once; on any device but a CPU, reading waits for all queued
    work.
    """
    return tensor.device.type == "cpu"


class _Lossless:
    """Packs booleans into bits, and leaves out elements that are all zero bits.

    A tensor that does not get smaller by a tenth is transferred uncompressed.
    """

    name = "lossless"

    def encode(self, flat: Tensor) -> Encoded:
        flat = _written_out(flat)
        if flat.dtype is torch.bool:
            bits = _bits_for(flat.numel(), flat.device)
            for span in _spans(flat.numel(), flat.device):
                # Not the booleans themselves: other libraries may store a 2 in such a byte.
                bits[_bytes_of(span)] = _packed(_are_set(flat.view(torch.uint8)[span]))
            return Encoded((bits,), _BITS, flat.dtype, flat.numel())
        # On a GPU the number of non-zeros is not known before the GPU has computed it. The forward
        # would have to wait for it, so there only booleans are compressed.
        if not may_look_at(flat):
            return _raw(flat)
        words = _words_of(flat)
        num_left = int(words.count_nonzero())
        num_bytes = _bytes_of(slice(0, words.numel())).stop + num_left * words.element_size()
        if num_bytes > _WORTHWHILE * flat.nbytes or not num_bytes:
            return _raw(flat)
        bits = _bits_for(words.numel(), flat.device)
        rest = torch.empty(num_left, dtype=words.dtype, device=flat.device)
        end = 0
        for span in _spans(words.numel(), flat.device):
            is_left = _are_set(words[span])
            bits[_bytes_of(span)] = _packed(is_left)
            places = _places(is_left)
            begin, end = end, end + places.numel()
            torch.index_select(words[span], 0, places, out=rest[begin:end])
        return Encoded((bits, rest), _NON_ZEROS, flat.dtype, flat.numel())

    def decode(self, encoded: Encoded) -> Tensor:
        if encoded.kind == _RAW:
            return encoded.parts[0].clone()
        if encoded.kind == _BITS:
            (bits,) = encoded.parts
            flat = torch.empty(encoded.numel, dtype=torch.bool, device=bits.device)
            for span in _spans(flat.numel(), flat.device):
                flat[span] = _unpacked(bits[_bytes_of(span)], span)
            return flat
        assert encoded.kind == _NON_ZEROS, encoded.kind
        bits, rest = encoded.parts
        flat = torch.zeros(encoded.numel, dtype=encoded.dtype, device=bits.device)
        words, end = _words_of(flat), 0
        for span in _spans(words.numel(), flat.device):
            places = _places(_unpacked(bits[_bytes_of(span)], span))
            begin, end = end, end + places.numel()
            words[span].scatter_(0, places, rest[begin:end])
        return flat


class _EightBit:
    """Blocks of elements, each element as a share of the largest magnitude in its block.

    Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR
    2022, section 2.1: an outlier spoils its own block and no other. Theirs has finer steps near
    zero; here the steps are equal, which needs no table.

    With s the largest magnitude in a block, an element x travels as ``round(127 x / s)``. So it is
    off by at most

        s / 254  +  s (3 e + d / 2)  +  t

    where e is the epsilon of what is computed with (float64 for a float64, else float32), d that of
    the tensor's type, and t its smallest number above zero. The first term is half a step. The
    second is for two roundings each way, of at most e / 2 each and a little more together, and for
    the one to the tensor's type; the third is for a rounding among the smallest numbers.

    A tensor that is not floating, or would not get smaller by a tenth, is moved as it is, and so is
    one with an infinity or a nan. On a GPU the check for these would have to wait for the device.
    There the whole block is decoded as nan, and not as numbers that look right.
    """

    name = "8bit"

    def encode(self, flat: Tensor) -> Encoded:
        flat = _written_out(flat)
        if not _has_blocks(flat):
            return _raw(flat)
        numel, device = flat.numel(), flat.device
        codes = torch.empty(numel, dtype=torch.int8, device=device)
        scales = torch.empty(-(-numel // BLOCK), dtype=_wide(flat.dtype), device=device)
        for span, blocks in _blocks(numel, device):
            values = flat[span].view(blocks.stop - blocks.start, -1).to(scales.dtype)
            largest = torch.maximum(values.amax(1), values.amin(1).neg_())
            # A nan times any code is a nan; an infinity would give infinities.
            scales[blocks] = largest.masked_fill_(largest.isinf(), math.nan)
            # First the division by s, then the factor 127: 127 / s is infinite for the smallest s.
            share = values / torch.where(largest > 0, largest, 1.0).unsqueeze(1)
            codes[span] = share.mul_(127).round_().view(-1)
        if may_look_at(flat) and bool(scales.isnan().any()):
            return _raw(flat)
        return Encoded((codes, scales), _BLOCKS, flat.dtype, numel)

    def decode(self, encoded: Encoded) -> Tensor:
        if encoded.kind == _RAW:
            return encoded.parts[0].clone()
        assert encoded.kind == _BLOCKS, encoded.kind
        codes, scales = encoded.parts
        flat = torch.empty(encoded.numel, dtype=encoded.dtype, device=codes.device)
        for span, blocks in _blocks(encoded.numel, codes.device):
            share = codes[span].view(blocks.stop - blocks.start, -1).to(scales.dtype).div_(127)
            flat[span] = share.mul_(scales[blocks].unsqueeze(1)).view(-1)
        return flat


def _raw(flat: Tensor) -> Encoded:
    return Encoded((flat,), _RAW, flat.dtype, flat.numel())


def _written_out(flat: Tensor) -> Tensor:
    # A conjugate view shares its base's memory; its own bits do not exist in memory yet.
    return flat.resolve_conj().resolve_neg()


def _spans(numel: int, device: torch.device) -> Iterator[slice]:
    step = _SPAN_ON_CPU if device.type == "cpu" else _SPAN_ELSEWHERE
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def _bytes_of(span: slice) -> slice:
    """The bytes that hold the bits of a span of elements."""
    return slice(span.start // 8, -(-span.stop // 8))


def _bits_for(numel: int, device: torch.device) -> Tensor:
    return torch.empty(-(-numel // 8), dtype=torch.uint8, device=device)


def _are_set(words: Tensor) -> Tensor:
    # On a CPU this takes a sixth of the time of `words != 0`.
    return words.to(torch.bool)


def _packed(is_set: Tensor) -> Tensor:
    """Packs booleans into bits, from the lowest bit of the first byte on; unused bits are zero."""
    if num_left := is_set.numel() % 8:
        is_set = F.pad(is_set, (0, 8 - num_left))
    # Eight booleans are a word with the values in its bits 8i, i from 0 to 7. The product with 2^7
    # + 2^14 + ... + 2^56 has bit 8i at 56 + i; its other terms do not overlap, so there is no
    # carry.
    gathered = is_set.view(torch.int64) * _GATHERS
    return gathered.bitwise_right_shift_(56).to(torch.uint8)


def _unpacked(bits: Tensor, span: slice) -> Tensor:
    # Each byte eight times; bit i of the i-th copy is the value.
    picked = bits.to(torch.int64).mul_(_REPEATS).bitwise_and_(_PICKS)
    return _are_set(picked.view(torch.uint8)[: span.stop - span.start])


def _words_of(flat: Tensor) -> Tensor:
    """The same memory as integers, so that -0.0 is not zero, and a nan is an ordinary value."""
    return flat.view(_INTEGERS[flat.element_size()])


def _places(is_set: Tensor) -> Tensor:
    # Ten times as fast as torch's `nonzero`, which branches for each element; likewise,
    # `masked_select` and `masked_scatter_` are slower than this and an indexed selection.
    return torch.from_numpy(np.flatnonzero(is_set.numpy()))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _has_blocks(flat: Tensor) -> bool:
    """Whether ``8bit`` makes the tensor smaller."""
    if not flat.is_floating_point() or not flat.numel():
        return False
    num_bytes = flat.numel() + -(-flat.numel() // BLOCK) * _wide(flat.dtype).itemsize
    return num_bytes <= _WORTHWHILE * flat.nbytes


def _blocks(numel: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yields spans of elements with their blocks; a shorter last block is separate."""
    whole = numel - numel % BLOCK
    for span in _spans(whole, device):
        yield span, slice(span.start // BLOCK, span.stop // BLOCK)
    if whole < numel:
        yield slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1)
