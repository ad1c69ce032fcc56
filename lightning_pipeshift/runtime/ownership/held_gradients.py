"""The gradients of the parameters that a stage holds, and how stages add up those that they share.

Gradients of earlier batches are set aside while a step runs, so that the step's own are known. When
it is over, Lightning and the optimizer get the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeshift.compat.torch_private import (
    version_of,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.model.parameters.absent import AbsentTensor
from lightning_pipeshift.model.parameters.gradients import Gradients, is_alone, take_gradients
from lightning_pipeshift.model.parameters.uses import ParameterUse, give_gradient
from lightning_pipeshift.model.tensors.transfer import to_host
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Kind
from lightning_pipeshift.runtime.ownership.owner_table import OwnerTable

_CLIPPED_NORM = 2.0


class HeldGradients:
    """The gradients of one stage.

    Args:
        table: the holders of the parameters.
    """

    def __init__(self, table: OwnerTable) -> None:
        self._table = table
        self._channels = table.channels
        # By identity of a parameter held on another stage: the gradient that user code sees.
        self._shown: dict[int, Tensor] = {}
        self._are_shown = False
        self.mailbox: Mailbox | None = None
        """Carries the gradients of shared parameters."""
        self._are_summed = False
        self.sums_shared = True
        """Whether stages add up the gradients of the parameters that they share."""
        self._norms: dict[int, _Norm] = {}
        self._fresh: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._aside: Gradients = []
        self._withdrawn: Gradients = []
        self._replaces = self._adds = False

    @property
    def _held(self) -> list[nn.Parameter]:
        """The parameters held here."""
        return [use.parameter for use in self._table.held]

    @property
    def shared(self) -> list[ParameterUse]:
        """The parameters held here whose gradients stages add up."""
        return [use for use in self._table.held if use.is_shared and self.sums_shared]

    def set_aside(self, keep: bool, adds: bool = False) -> None:
        """Saves the present gradients, so that the step's own start empty.

        Args:
            keep: whether the present gradients are still needed.
            adds: the step adds its own to them, as a plain loop does: they stay where they are.
        """
        self._adds, self._are_summed = adds, False
        before = take_gradients(self._held) if not adds else []
        self._aside = before if keep else []

    def collect(
        self,
        correction: float,
        sum_over_replicas: Callable[[], Collection[nn.Parameter]] | None,
        joins: bool,
    ) -> None:
        """Saves the step's gradients, and restores those from before the step.

        Shared parameters get the sum over all stages. Every stage calls this.

        Args:
            correction: a factor; 0 if the whole step has no weight, so that no gradient remains.
            sum_over_replicas: sums the gradients over the virtual machines, that of a shared
                parameter on its first holder. Returns the parameters whose sums come later.
            joins: whether the sum over the virtual machines covers all steps since the last
                optimizer step; each virtual machine has accumulated these steps itself.
        """
        if not self._are_summed:
            self.sum_shared()
        self._replaces = joins or self._adds
        if joins:
            self._join(correction)
            correction = 1.0
        late: set[int] = set()
        if sum_over_replicas is not None:
            late.update(map(id, sum_over_replicas()))
        self.pass_shared_around()
        self._fresh = {}
        for use in self._table.held:
            gradient = use.parameter.grad
            if not self._adds:
                use.parameter.grad = None
            if gradient is not None and correction:
                fresh = gradient if correction == 1.0 else gradient.mul_(correction)
                self._fresh[id(use.parameter)] = (use.parameter, fresh)
        held = {id(use.parameter) for use in self._table.held}
        for parameter, gradient in self._aside:
            if id(parameter) in held and id(parameter) not in late:
                give_gradient(parameter, gradient)
        self._aside = []

    @torch.no_grad()
    def _join(self, correction: float) -> None:
        earlier = {id(parameter): gradient for parameter, gradient in self._aside}
        for use in self._table.held:
            fresh, before = use.parameter.grad, earlier.get(id(use.parameter))
            fresh = fresh * correction if fresh is not None and correction else None
            if use.is_shared and self._sharers(use.parameter)[0] != self._table.stage:
                continue
            if before is not None:
                fresh = before.clone() if fresh is None else fresh + before
            give_gradient(use.parameter, fresh)

    def hand_over(self) -> None:
        """Adds the step's gradients to the parameters' own."""
        self.hide()
        for parameter, gradient in self._fresh.values():
            if parameter.grad is None or self._replaces:
                give_gradient(parameter, gradient)
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)
        self._fresh = {}

    def withdraw(self) -> None:
        """Hides the gradients from Lightning and the optimizer, until :meth:`give_back`."""
        self._withdrawn += take_gradients(self._held)

    def drop(self) -> None:
        """Forgets the gradients, as an optimizer has used them."""
        take_gradients(self._held)

    def give_back(self) -> None:
        """Undoes :meth:`withdraw`."""
        self.hide()
        _give(self._withdrawn)

    @contextmanager
    def only(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], keeps: bool) -> Iterator[None]:
        """Context in which some parameters have gradients, and no others.

        Args:
            gradients: the parameters that have none now, and their gradients.
            keeps: whether they still have them afterwards.
        """
        self.hide()
        # Those of an update that goes on may be withdrawn meanwhile, and remain so.
        others = take_gradients(self._held)
        for parameter, gradient in gradients:
            give_gradient(parameter, gradient)
        yield
        for parameter, _ in gradients if not keeps else ():
            parameter.grad = None
        _give(others)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Context in which gradients are shown (:meth:`show`), and hidden again unless
        they were shown before.
        """
        are_shown = self._are_shown
        try:
            self.show()
            yield
        finally:
            if not are_shown:
                self.hide()

    def show(self) -> None:
        """Gives parameters that are held on other stages a placeholder as their gradient.

        User code that reads gradients must not see ``None`` for those of other stages: it would,
        for example, compute a wrong sum. Optimizers must not see these placeholders.
        """
        with without_torch_function_of_subclasses():
            for use in self._lacking():
                parameter = use.parameter
                if not (isinstance(parameter, AbsentTensor) and parameter.requires_grad):
                    continue
                shown, like = self._shown.get(id(parameter)), (parameter.shape, parameter.dtype)
                if shown is None or (shown.shape, shown.dtype) != like:
                    shown = AbsentTensor.like(parameter.data, f"the gradient of {use.name}")
                    self._shown[id(parameter)] = shown
                parameter.grad = shown
        self._are_shown = True

    def hide(self) -> None:
        """Undoes :meth:`show`."""
        with without_torch_function_of_subclasses():
            for use in self._lacking():
                use.parameter.grad = None
        self._are_shown = False

    def _lacking(self) -> list[ParameterUse]:
        """The parameters that other stages hold, and this one does not."""
        held = {id(use.parameter) for use in self._table.held}
        return [use for use in self._table.uses if id(use.parameter) not in held]

    def sum_shared(self) -> None:
        """Adds up the gradients of shared parameters from the last holder to the first, which has
        the sum.
        """
        self._are_summed = True
        for use in self.shared:
            if not use.parameter.requires_grad:
                continue
            holders = self._sharers(use.parameter)
            place = holders.index(self._table.stage)
            start = None
            if self._table.stage != holders[-1]:
                start = self._receive(use, holders[place + 1])
            total, use.parameter.grad = use.parameter.grad, None
            if start is not None:
                # Nothing else uses the received tensor, so it may be written to.
                total = start if total is None else start.add_(total)
            elif total is not None and not place and not is_alone(total):
                total = total.clone()
            if place:
                self._send(use.name, total, holders[place - 1])
            else:
                use.parameter.grad = total

    def _sharers(self, parameter: Tensor) -> list[int]:
        """The stages that add up a shared parameter's gradients, this one included. One that only
        ends what it has begun with a layer adds up its own.
        """
        holders = self._table.holders_of(parameter)
        return holders if self._table.stage in holders else [self._table.stage]

    def pass_shared_around(self) -> None:
        """Sends the first holder's gradient of a shared parameter to every holder."""
        shared = self.shared
        for use in shared:
            if not use.parameter.requires_grad:
                continue
            first, *others = self._sharers(use.parameter)
            if self._table.stage == first:
                for to in others:
                    self._send(use.name, use.parameter.grad, to)
            else:
                use.parameter.grad = self._receive(use, first)
        if shared and self.mailbox is not None:
            # The optimizer may write to what has been sent.
            self.mailbox.await_sent(Kind.LABELLED)

    def _send(self, name: str, gradient: Tensor | None, to: int) -> None:
        assert self.mailbox is not None
        self.mailbox.send_labelled(to, name, gradient)

    def _receive(self, use: ParameterUse, source: int) -> Tensor | None:
        assert self.mailbox is not None
        message = self.mailbox.take_labelled(source, use.name)
        if message.data is None:
            return None
        like = use.parameter
        return message.tensor(like.dtype, like.shape, self._table.device)

    def norms(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norms of all parameters' gradients, in the model's order, bitwise equal on all
        stages.

        A parameter that several stages hold counts once; one without a gradient has norm 0. Every
        stage calls this.

        Args:
            parameters: those to include; all others have norm 0.
            norm_type: the order of the norm.

        Returns:
            A float64 vector on the CPU with one entry for each of ``uses``.
        """
        chosen = {id(parameter) for parameter in parameters}
        found: dict[int, Tensor] = {}
        for number, use in enumerate(self._table.uses):
            gradient = use.parameter.grad
            counted = self._table.stage == self._table.holders_of(use.parameter)[0]
            if (
                counted
                and gradient is not None
                and not gradient.is_meta
                and id(use.parameter) in chosen
            ):
                known = self._norms.get(number)
                found[number] = (
                    known.value
                    if known is not None and known.is_of(gradient, norm_type)
                    else torch.linalg.vector_norm(gradient.detach(), norm_type)
                )
        norms = torch.zeros(len(self._table.uses), dtype=torch.float64)
        for number, norm in to_host(found).items():
            norms[number] = norm
        # Each entry is one stage's value plus zeros: the sum is exact in any order.
        return self._channels.sum(norms)

    def measure_norms(self, places: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Computes the norms of gradients that are complete while others are still being summed,
        for :meth:`norms`. Until then nothing may change them unnoticed, as code does that
        writes into their ``data``.

        Args:
            places: the parameters' indices in ``uses``.
            parameters: those whose gradients are complete.
        """
        for place, parameter in zip(places, parameters, strict=True):
            if parameter.grad is not None:
                self._norms[place] = _Norm.of(parameter.grad)

    def are_there(self) -> list[bool]:
        """For each of ``uses``, whether its parameter has a gradient. Every stage calls this."""
        flags = torch.zeros(len(self._table.uses))
        for number, use in enumerate(self._table.uses):
            gradient = use.parameter.grad
            flags[number] = gradient is not None and not gradient.is_meta
        return [bool(flag) for flag in self._channels.sum(flags)]


def _give(gradients: Gradients) -> None:
    """Gives parameters gradients that were set aside, which then are not any more."""
    for parameter, gradient in gradients:
        give_gradient(parameter, gradient)
    gradients.clear()


class _Norm(NamedTuple):
    """The norm of a gradient, unless the gradient has changed since."""

    gradient: weakref.ref[Tensor]
    version: int
    value: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> _Norm:
        """The norm that gradients are clipped by."""
        value = torch.linalg.vector_norm(gradient.detach(), _CLIPPED_NORM)
        return cls(weakref.ref(gradient), version_of(gradient), value)

    def is_of(self, gradient: Tensor, norm_type: float) -> bool:
        """Whether it is this gradient's norm of this type."""
        return (
            norm_type == _CLIPPED_NORM
            and self.gradient() is gradient
            and version_of(gradient) == self.version
        )
