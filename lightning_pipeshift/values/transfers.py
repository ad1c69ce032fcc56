"""Where a microbatch's values are: they are brought to the stages that use or read them."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import (
    swap_tensors,
    without_torch_function_of_subclasses,
)
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.messages import Key, Kind
from lightning_pipeshift.values.account import Account, Memory
from lightning_pipeshift.values.arguments import Arguments, copied_call, given
from lightning_pipeshift.values.functions import NUMBERS
from lightning_pipeshift.values.gradients import (
    Way,
    gradient_from_later,
    gradient_to_all,
    gradient_to_earlier,
)
from lightning_pipeshift.values.graphs import Graph, Graphs
from lightning_pipeshift.values.program import NotedProgram
from lightning_pipeshift.values.reads import key_of, read_here
from lightning_pipeshift.values.saves import Saves
from lightning_pipeshift.values.value import (
    PLACED,
    Spec,
    Value,
    name_of,
    run_by,
    user_line,
    version_in,
)

if TYPE_CHECKING:
    from lightning_pipeshift.values.core import Core


class Transfers(NotedProgram):
    """The values and parameters of a program."""

    def __init__(self, core: Core, run_number: int, turn: int) -> None:
        super().__init__(core, run_number, turn)
        self.accounts: dict[Tensor, Account] = {}
        self._num_values = 0
        self.is_alone = core.mailbox.num_stages == 1
        self._living: list[weakref.ref[Tensor]] = []
        """On the only stage, all values."""
        self._named: list[weakref.ref[Account]] = []
        """Those of all values."""
        self.saves: Saves | None = None
        """Keeps what autograd saves of the step on this stage, if anything but autograd does."""
        self._shared: list[tuple[Memory, str]] = []
        """The memory that `x.data = y` has given to parameters, and the user's lines."""
        self.graphs = Graphs((run_number, turn), core.device)

    def release(self) -> None:
        """Lets go of all tensors. On the only stage, values that other code still has become their
        tensors: nothing else differs from a step without this core.
        """
        living = [value for each in self._living if (value := each()) is not None]
        # Those that refer to a tensor must be gone when it is swapped.
        self._living.clear()
        self.core.kept.update(account for each in self._named if (account := each()) is not None)
        self._named.clear()
        with without_torch_function_of_subclasses(), torch.enable_grad():
            for value in living:
                assert isinstance(value, Value)
                tensor = value.account.tensor
                assert tensor is not None
                # What autograd has saved cannot be swapped, but what shares its memory can.
                view = torch.ops.aten.alias(tensor) if tensor.requires_grad else tensor.detach()
                swap_tensors(value, view)
        self.graphs.release()
        self._require_unshared()
        self.accounts.clear()

    def _require_unshared(self) -> None:
        """Raises LayerError if parameters have their memory in common with what is used behind the
        step: no operation tells when their optimizer writes to it.
        """
        for memory, line in self._shared if not self.is_alone else ():
            living = [account for each in memory.accounts if (account := each()) is not None]
            mine = [account for account in self.accounts.values() if account.memory is memory]
            for account in mine:
                account.refresh()
            if mine and len(living) > 1:
                raise LayerError(
                    f"`x.data = y` ({line}) gives the parameter `x` the memory of `y`, and `y` is"
                    " kept behind the step, or is a parameter, too. One stage only would see what"
                    " an optimizer writes to both. Give `x` memory of its own:"
                    " `x.data = y.clone()`."
                )
        self._shared.clear()

    # --- graphs ---

    def graph_of(self, loss: Any) -> Graph | None:
        """Returns the graph of a loss; ``None`` if no gradient connects it with a value."""
        if type(loss) not in PLACED:
            return None
        graph = self.account_of(loss).graph
        return None if graph is None else graph.whole

    def ends_of(self, loss: Any) -> list[Tensor]:
        """Where the gradients of a loss enter this stage's part of its graph from other stages."""
        graph = self.graph_of(loss)
        return [] if graph is None else graph.tokens

    def gradient_key(self, source: int, serial: int) -> Key:
        """See :class:`Letters`."""
        return Key(source, self._run_number, self.turn, Kind.GRADIENT, self._num_backwards, serial)

    def end_graphs(self, graphs: Iterable[Graph], is_kept: bool) -> None:
        """A backward has gone through graphs.

        Args:
            graphs: the graphs.
            is_kept: whether another one may follow.
        """
        self._num_backwards += 1
        if not is_kept:
            for graph in graphs:
                graph.end()
            self._renew_parameters(self.accounts, of_open_graphs=False)

    def step_parameters(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has changed these parameters: copies at other stages are old, and a backward
        through their uses so far would go on with them.
        """
        mine = [x for x in parameters if x in self.accounts]
        self._renew_parameters(mine, of_open_graphs=True)

    def _renew_parameters(self, parameters: Iterable[Tensor], of_open_graphs: bool) -> None:
        for tensor in parameters:
            account = self.accounts[tensor]
            is_open = account.graph is not None and not self.graphs.is_used(account)
            if is_open and not of_open_graphs:
                continue
            account.refresh()
            self._begin_parameter(tensor, account)
            if account.graph is not None:
                account.graph.whole.end()
                account.graph = account.segment = None

    # --- bytes ---

    def account_of(self, tensor: Tensor) -> Account:
        """The account of a value or a parameter."""
        if isinstance(tensor, Value):
            return tensor.account
        if self.core.awaited:
            for number in self.core.layers_with.get(tensor, ()):
                self.core.before_layer(number)
        account = self.accounts.get(tensor)
        if account is None:
            owner = self.core.parameter_owners[tensor]
            memory = Memory(tensor)
            account = self.accounts[tensor] = Account(owner, tensor.requires_grad, None, memory)
            self._begin_parameter(tensor, account)
        return account

    def _begin_parameter(self, tensor: Tensor, account: Account) -> None:
        """Resets the account of a parameter or buffer to the stages that hold it."""
        holders, account.name = {account.owner}, None
        if tensor not in self.core.written:
            holders.update(self.core.holders(tensor))
        account.begin(account.owner, tensor if self.stage in holders else None)
        account.holders = holders

    def bring(self, tensor: Tensor, stage: int, with_gradient: bool, label: str) -> Tensor | None:
        """Brings a value to a stage.

        Args:
            tensor: the value or parameter.
            stage: which uses it.
            with_gradient: whether its gradient is needed.
            label: of what uses it.

        Returns:
            the plain tensor at that stage, ``None`` at the others.
        """
        account = self.account_of(tensor)
        account.refresh()
        if stage not in account.holders:
            self._send(account, tensor, stage, label)
        elif account.sent_at is not None and stage != self.stage:
            self._require_as_sent(account, label)
        if with_gradient and account.requires_grad and not self.graphs.is_used(account):
            if account.last != stage:
                self._lead_chain(account, tensor, stage, label)
            return account.link if self.stage == stage else None
        found = account.tensor if self.stage == stage else None
        if found is not None and account.requires_grad and account.owner != stage:
            return _marked(found)
        return found

    def _send(self, account: Account, tensor: Tensor, stage: int, label: str) -> None:
        key = self._key(account.owner, Kind.VALUE)
        if self.stage == account.owner:
            assert account.tensor is not None
            if account.sent_at is None:
                account.sent_at = version_in(account.tensor)
            with without_torch_function_of_subclasses():
                content = account.tensor
                # A layer may write to what is its own while that is on its way in host memory.
                is_behind = content.nbytes > self.mailbox.room_bytes and content.is_cpu
                if is_behind and self.core.is_in_layer(content):
                    content = content.clone()
                self.mailbox.send(stage, key, self.place(label), content)
        elif self.stage == stage:
            message = self.receive(key, self.place(label))
            with without_torch_function_of_subclasses():
                account.tensor = message.tensor(tensor.dtype, tensor.shape, self.core.device)
                if self.saves is not None:
                    self.saves.received(account.tensor)
        account.holders.add(stage)

    def _require_as_sent(self, account: Account, label: str) -> None:
        """Raises LayerError if a layer has written to its own tensor after that was sent, which no
        contract tells: the other stage would use the old bytes.
        """
        assert account.tensor is not None
        if version_in(account.tensor) != account.sent_at:
            raise LayerError(
                f"`{label}` ({user_line()}) uses a tensor again that was sent to another stage, and"
                " that a layer has written to in place since: a buffer that it returned, perhaps."
                " Let the layer return a copy (`self.state.clone()`)."
            )

    def _lead_chain(self, account: Account, tensor: Tensor, stage: int, label: str) -> None:
        """Leads the chain of the consumers of a value or parameter to another stage."""
        last, account.last = account.last, stage
        account.has_left = True
        account.memory.has_returned |= stage == account.owner
        serial = self._key(stage, Kind.GRADIENT).serial
        if account.graph is None:
            account.graph = self.graphs.new_graph()
        graph = account.graph.whole
        self.graphs.begin(graph, stage, last, label)
        if self.stage not in (last, stage):
            return
        way = Way(self, stage, serial, self.place(label), last)
        graphs = self.graphs
        with without_torch_function_of_subclasses():
            if self.stage == last:
                assert account.link is not None
                is_leaf = graph.is_divided and type(tensor) is not Value
                keys = (self.group_of(tensor),) if is_leaf else ()
                segment = graphs.segment_of(graph, account, keys)
                token = gradient_from_later(graphs.token_of(segment), account.link, way)
            else:
                assert account.tensor is not None
                graphs.sends = True
                segment = graphs.new_segment(graph)
                token = graphs.token_of(segment)
                token, account.link = gradient_to_earlier(token, account.tensor, way)
                account.segment = segment if graph.is_divided else None
        graphs.add(segment, token, way, is_received=self.stage == last)

    def group_of(self, parameter: Tensor) -> int:
        """The number of a parameter's layer in :attr:`Core.groups`; outside of layers, its own."""
        numbers = self.core.layers_with.get(parameter)
        own = -1 - self.core.parameter_numbers[parameter]
        return self.core.groups[numbers[0]] if numbers else own

    def enter(self, tensor: Tensor, stage: int, label: str) -> Tensor | None:
        """Uses a common tensor with its gradient at one stage; each has the gradient then.

        Args:
            tensor: it may have a history, of common tensors.
            stage: which uses it.
            label: of what uses it.

        Returns:
            the tensor to use, at that stage.
        """
        key, place = self._key(stage, Kind.GRADIENT), self.place(label)
        others = [at for at in range(self.mailbox.num_stages) if at != stage]
        graph = self.graphs.entered = self.graphs.entered or self.graphs.new_graph()
        # Several segments may lead to the tensor.
        graph.keep_whole()
        self.graphs.begin(graph, stage, max(others), label)
        segment, link = self.graphs.new_segment(graph), None
        token = self.graphs.token_of(segment)
        with without_torch_function_of_subclasses():
            if self.stage == stage:
                ways = [Way(self, stage, key.serial, place, to) for to in others]
                self.graphs.sends = True
                token, link = gradient_to_all(token, tensor, ways)
                self.graphs.add(segment, token, ways[0], is_received=False)
            else:
                way = Way(self, stage, key.serial, place, self.stage)
                token = gradient_from_later(token, tensor, way)
                self.graphs.add(segment, token, way, is_received=True)
        return link

    def new_account(
        self, owner: int, requires_grad: bool, tensor: Tensor | None, memory: Memory | None = None
    ) -> Account:
        """The account of the microbatch's next value."""
        account = Account(owner, requires_grad, tensor, memory)
        self._name(account)
        self._named.append(weakref.ref(account))
        return account

    def new_value(self, spec: Spec, account: Account) -> Value:
        """The value of an account."""
        value = Value(spec, self.core.device, account)
        self._note_living(value)
        return value

    def _note_living(self, value: Tensor) -> None:
        if self.is_alone:
            self._living.append(weakref.ref(value))

    def _name(self, account: Account) -> None:
        self._num_values += 1
        # With the digest: where another stage runs other operations, it has no value of this name,
        # and a read ends with an error in place of another value's number.
        number = (self.digest << 15) + (self._num_values & 0x7FFF)
        account.name = self._run_number, self.turn, number

    def _read_by(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function that reads values into Python, on this rank."""
        label = name_of(function)
        placed = [x for x in Arguments(given(args, kwargs), id).tensors if type(x) in PLACED]
        # What has come from another stage is in host memory: there, nobody waits for the device.
        is_scalar = function is Tensor.__format__ and args[0].dim() == 0
        device = None if function in NUMBERS or is_scalar else self.core.device
        plain = {id(x): self._read_here(x, label, device) for x in placed}
        with run_by(None), without_torch_function_of_subclasses():
            args, kwargs = copied_call(args, kwargs, lambda x: plain.get(id(x), x), {})
            return function(*args, **kwargs)

    def _read_here(self, tensor: Tensor, label: str, device: torch.device | None) -> Tensor:
        return read_here(self, tensor, label, device)

    def read_key(self, account: Account, tensor: Tensor) -> Key:
        """That of the message with a value for the stages that read it in this run."""
        if account.name is None:
            # A parameter: it changes between two steps, but not in one.
            number = -1 - self.core.parameter_numbers[tensor]
            run, part = self._run_number, self._num_backwards
            return Key(account.owner, run, self.turn, Kind.READ, part, number, run)
        return key_of(account)._replace(read_in=self._run_number)

    def tell(self, told: Any, stage: int, label: str) -> Any:
        """Sends what one stage knows to all; returns it."""
        key = self._key(stage, Kind.TOLD)
        if self.stage != stage:
            return self.receive(key, self.place(label)).content
        data = pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
        for other in range(self.mailbox.num_stages):
            if other != stage:
                self.mailbox.send(other, key, self.place(label), data)
        return told

    def tell_later(self, told: Any, source: int, to: int, label: str) -> Callable[[], Any]:
        """Sends what one stage knows to another one; returns what takes it there. Every stage
        calls this.
        """
        key, place = self._key(source, Kind.TOLD), self.place(label)
        if self.stage == source:
            data = pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
            self.mailbox.send(to, key, place, data)
        return lambda: self.mailbox.take(key, place).content


def _marked(tensor: Tensor) -> Tensor:
    """The copy of a tensor that needs a gradient, for a use without one. Torch looks at that even
    so: `matmul` folds its first argument if the second one needs a gradient, which has other bits.
    """
    with without_torch_function_of_subclasses(), torch.inference_mode(tensor.is_inference()):
        return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
