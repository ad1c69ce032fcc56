"""What a microbatch's step has run so far: messages carry a digest of it, and stages compare it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place, packed
from lightning_pipeshift.values.arguments import Arguments
from lightning_pipeshift.values.value import NO_LINE, Value, user_line, version_in

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core


OUTSIDE = -1
"""The turn of what runs outside of steps."""
DIGEST_MASK = (1 << 48) - 1
# Of a common tensor, about so many elements are compared between the stages.
_MOST_ELEMENTS = 1 << 14


class NotedProgram:
    """A program of operations and layers that runs on every stage.

    Args:
        core: what all programs share.
        run_number: of the run of a schedule; the same on all ranks.
        turn: the microbatch's number in the run.
    """

    def __init__(self, core: Core, run_number: int, turn: int) -> None:
        self.core, self.mailbox, self.stage = core, core.mailbox, core.stage
        self._run_number, self.turn = run_number, turn
        self.is_outside = turn == OUTSIDE
        self._serial = self._num_backwards = 0
        self.digest = core.digest
        self.last = "", ""
        """The latest operation or layer, and the user's line."""
        # The tensors that every stage has whose content is in the digest, with their versions.
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, label: str, *what: object) -> None:
        """Adds an operation to the digest of the program, and what else must be equal on all ranks:
        numbers, modes, shapes.
        """
        self.digest = _rolled(self.digest, repr((label, what)).encode())
        if label != "backward":
            line = user_line()
            self.last = self.last if line is NO_LINE else (label, line)

    def note_call(self, label: str, digest: int, arguments: Arguments) -> None:
        """Adds the call of an operation or layer to the digest of the program.

        Args:
            label: its name.
            digest: of its name, modes and shapes.
            arguments: the numbers in them count, and which values they are.
        """
        found = self.digest * 31 + digest
        if arguments.numbers:
            found = _rolled(found, repr(arguments.numbers).encode())
        for x in arguments.tensors:
            if type(x) is Value and x.account.name is not None:
                found = found * 31 + sum(x.account.name)
        self.digest = found & DIGEST_MASK
        line = user_line()
        self.last = self.last if line is NO_LINE else (label, line)

    def note_generators(self) -> None:
        """Adds the state of torch's generators to the digest. NumPy's and Python's draws are in it
        where numbers and tensors meet values: other threads draw from these generators, too.
        """
        self.digest = self._with_generators()

    def _with_generators(self) -> int:
        states = (
            state.numpy().tobytes()
            for state in (generator.get_state() for generator in self.core.generators)
        )
        return _rolled(self.digest, *states)

    def _note_common(self, tensor: Tensor) -> None:
        """Adds the content of a tensor that every stage has to the digest, where that is cheap."""
        version = version_in(tensor)
        if self._known.get(tensor) != version:
            self._known[tensor] = version
            content = content_of(tensor, self.core.compares_floats)
            self.digest = _rolled(self.digest, repr(tensor.shape).encode(), content)

    def _key(self, source: int, kind: Kind) -> Key:
        self._serial += 1
        return Key(source, self._run_number, self.turn, kind, self._num_backwards, self._serial)

    def place(self, label: str) -> Place:
        """Where the program is now."""
        return Place(label, self._with_generators(), user_line())

    def receive(self, key: Key, place: Place) -> Message:
        """Waits for a message."""
        return self.mailbox.take(key, place)


def _rolled(digest: int, *contents: Any) -> int:
    for content in contents:
        digest = digest * 31 + zlib.crc32(content)
    return digest & DIGEST_MASK


def content_of(tensor: Tensor, with_floats: bool = True) -> bytes:
    """The bytes of a plain tensor in host memory; of a large one, those of a part of its elements.

    Args:
        tensor: of another kind or device: nothing.
        with_floats: whether to take tensors of floats.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_float = tensor.is_floating_point() or tensor.is_complex()
    if not is_plain or tensor.device.type != "cpu" or (is_float and not with_floats):
        return b""
    tensor = tensor.detach()
    if tensor.numel() > _MOST_ELEMENTS:
        most = round(_MOST_ELEMENTS ** (1 / tensor.dim()))
        tensor = tensor[tuple(slice(None, None, -(-size // most)) for size in tensor.shape)]
    data, _ = packed(tensor)
    # An array of this memory would look like one of the user's: see `is_own`.
    return data.clone().numpy().tobytes()
