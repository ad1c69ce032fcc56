"""Each private name of torch exists, and does what the package relies on."""

import copy
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_pipeshift.compat import module_private
from lightning_pipeshift.compat import torch_private as compat

META = torch.device("meta")


class Counted(Tensor):
    """Counts the functions and operations that it sees."""

    functions = 0
    operations = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.functions += 1
        with compat.without_torch_function_of_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.operations += 1
        with compat.no_dispatch():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def counted() -> Any:
    Counted.functions = Counted.operations = 0
    return compat.make_subclass(Counted, torch.ones(3), False)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(compat.OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# --- dispatch ---


def test_pytree_keeps_the_order_of_dicts_and_named_tuples() -> None:
    Pair = namedtuple("Pair", "a b")
    tree = {"b": 1, "a": [2, Pair(3, (4,))], "c": OrderedDict(z=5)}
    leaves, spec = compat.pytree.tree_flatten(tree)
    assert leaves == [1, 2, 3, 4, 5] == compat.pytree.tree_leaves(tree)
    again = compat.pytree.tree_unflatten([leaf * 10 for leaf in leaves], spec)
    assert again == {"b": 10, "a": [20, Pair(30, (40,))], "c": OrderedDict(z=50)}
    assert list(again) == ["b", "a", "c"]
    assert compat.pytree.tree_map_only(int, str, (1, 2.0)) == ("1", 2.0)
    assert spec == compat.pytree.tree_structure(tree)


def test_torch_function_is_switched_off_for_subclasses_alone_or_for_modes_too(
    counted: Any,
) -> None:
    for context, by_mode, by_class in (
        (nullcontext, 1, 1),
        (compat.without_torch_function_of_subclasses, 1, 0),
        (compat.without_torch_function, 0, 0),
    ):
        Counted.functions = 0
        with Functions() as mode, context():
            torch.neg(counted)
        assert (len(mode.names), Counted.functions) == (by_mode, by_class), context


def test_the_innermost_function_mode_is_known() -> None:
    assert compat.current_function_mode() is None
    with Functions() as outer, Functions() as inner:
        assert compat.current_function_mode() is inner is not outer
    assert compat.current_function_mode() is None


def test_no_dispatch_bypasses_modes_and_subclasses(counted: Any) -> None:
    with Operations() as mode, compat.no_dispatch():
        torch.neg(counted)
    assert not mode.seen
    assert not Counted.operations


def test_disabled_modes_see_nothing_and_subclasses_still_do(counted: Any) -> None:
    with Operations() as mode:
        with compat.dispatch_modes_disabled():
            torch.neg(counted)
        assert not mode.seen
        assert Counted.operations == 1
        torch.neg(torch.ones(1))
    assert mode.seen[-1] is torch.ops.aten.neg.default


def test_schemas_say_names_writes_and_views() -> None:
    add = compat.schema_of(torch.ops.aten.add_.Tensor)
    assert add.name == "aten::add_"
    assert [argument.name for argument in add.arguments] == ["self", "other", "alpha"]
    assert [bool(a.alias_info and a.alias_info.is_write) for a in add.arguments] == [True, 0, 0]
    view = compat.schema_of(torch.ops.aten.view.default).arguments[0].alias_info
    assert view is not None
    assert not view.is_write


@pytest.mark.parametrize(
    ("args", "kwargs", "parsed"),
    [
        ((), {"dtype": torch.half}, (None, torch.half, False, None)),
        ((torch.half,), {}, (None, torch.half, False, None)),
        (("meta", torch.half, True), {}, (META, torch.half, True, None)),
        ((torch.ones(1).half(),), {}, (torch.device("cpu"), torch.half, False, None)),
        (
            (META,),
            {"memory_format": torch.channels_last},
            (META, None, False, torch.channels_last),
        ),
    ],
)
def test_the_arguments_of_to_are_parsed(
    args: tuple[Any, ...], kwargs: dict[str, Any], parsed: tuple[Any, ...]
) -> None:
    assert compat.parse_to(*args, **kwargs) == parsed


def test_operations_have_these_names() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], 0.1, foreach=True)
    with Operations() as mode:
        torch.ones(1).item()
        torch.ones(1).to(torch.half)
        optimizer.step()
    assert compat.COPY_TO in mode.seen
    names = [compat.schema_of(func).name for func in mode.seen]
    assert compat.READ_NUMBER in names
    assert any(name.startswith(compat.FOR_EACH) for name in names)


# --- tensors ---


def test_a_subclass_shares_the_memory() -> None:
    base = torch.zeros(2)
    made = compat.make_subclass(Counted, base, True)
    base.fill_(3)
    assert type(made) is Counted
    assert made.requires_grad
    assert compat.storage_key_of(made) == compat.storage_key_of(base)
    with compat.no_dispatch():
        assert made.detach().sum() == 6.0


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            return torch.full((), 5.0)

    made = compat.make_wrapper_subclass(
        Wrapper,
        torch.Size([2, 3]),
        strides=(1, 2),
        storage_offset=1,
        dtype=torch.half,
        layout=torch.strided,
        device=torch.device("cpu"),
        requires_grad=False,
        storage_size=64,
    )
    assert (made.shape, made.stride(), made.storage_offset()) == ((2, 3), (1, 2), 1)
    assert (made.dtype, made.device.type) == (torch.half, "cpu")
    assert made.untyped_storage().nbytes() == 64
    assert made + 1 == 5.0


def test_the_version_counts_writes_by_all_that_share_the_memory() -> None:
    tensor = torch.zeros(4)
    view, detached = tensor[:2], tensor.detach()
    before = compat.version_of(tensor)
    view.add_(1)
    detached.add_(1)
    assert [compat.version_of(t) - before for t in (tensor, view, detached)] == [2, 2, 2]
    tensor.data.add_(1)
    assert compat.version_of(tensor) - before == 2
    # What has let go of its memory still counts.
    detached.data = torch.empty(0)
    tensor.add_(1)
    assert compat.version_of(detached) - before == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_is_known_by_its_key(device: str) -> None:
    tensor, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert compat.storage_key_of(tensor) == compat.storage_key_of(tensor[2:].view(2, 1))
    assert compat.storage_key_of(tensor) == compat.storage_key(tensor.untyped_storage())
    assert compat.storage_key_of(tensor) != compat.storage_key_of(other)
    assert isinstance(compat.storage_key_of(tensor), int)


def test_who_refers_to_a_storage_is_counted() -> None:
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    before = compat.storage_use_count(storage)
    views = [tensor[1:], tensor.detach()]
    assert compat.storage_use_count(storage) == before + 2
    views.clear()
    assert compat.storage_use_count(storage) == before


def test_a_tensor_of_any_class_can_be_a_parameter() -> None:
    tensor = compat.make_subclass(Counted, torch.ones(2))
    assert not isinstance(tensor, nn.Parameter)
    compat.mark_as_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)
    assert compat.PARAMETER_MARK in vars(tensor)
    module = nn.Module()
    module.x = tensor
    assert dict(module.named_parameters()) == {"x": tensor}


def test_hooks_work_again_after_a_swap() -> None:
    calls = []
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first.register_hook(lambda _: calls.append("gradient"))
    handle = first.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    torch.utils.swap_tensors(first, second)
    compat.renew_hooks(first)
    first.sum().backward()
    assert calls == ["gradient", "accumulated"]
    # The user's handle still removes it.
    handle.remove()
    first.sum().backward()
    assert calls == ["gradient", "accumulated", "gradient"]


# --- hooks on saved tensors ---


def test_saved_tensors_hooks_are_seen_taken_away_and_put_back() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    x = torch.ones(2, requires_grad=True)
    assert compat.top_saved_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        hooks = compat.top_saved_hooks()
        assert hooks[0] is pack
        assert hooks[1] is unpack
        compat.pop_saved_hooks()
        assert compat.top_saved_hooks() is None
        x.exp()
        assert not packed
        compat.push_saved_hooks(*hooks)
        x.exp()
        assert packed
    assert compat.top_saved_hooks() is None


# --- modules ---


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("left_out", torch.zeros(1), persistent=False)
        self.register_buffer("empty", None)
        self.inner = nn.Linear(1, 1)


def test_the_tables_of_a_module_are_the_ones_it_uses() -> None:
    module = Module()
    assert list(module_private.parameters_of(module)) == ["weight", "none"]
    assert list(module_private.buffers_of(module)) == ["kept", "left_out", "empty"]
    assert list(module_private.modules_of(module)) == ["inner"]
    fresh = torch.ones(3)
    module_private.buffers_of(module)["kept"] = fresh
    assert module.kept is fresh
    # Any tensor can stand in for a parameter here.
    module_private.parameters_of(module)["weight"] = fresh  # type: ignore[assignment]
    assert module.weight is fresh
    assert vars(module).keys() >= module_private.MODULE_TABLES
    tables = [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]
    assert tables[0] is module_private.parameters_of(module)
    assert tables[1] is module_private.buffers_of(module)
    assert tables[2] is module_private.modules_of(module)


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    module = Module()
    found = dict(module_private.persistent_buffers(module))
    assert list(found) == ["kept", "empty"]
    in_state = module.state_dict().keys() & module_private.buffers_of(module).keys()
    assert in_state == {name for name, buffer in found.items() if buffer is not None}


def test_forward_hooks_are_seen() -> None:
    module = nn.Identity()
    handle = module.register_forward_hook(print)
    assert module_private.forward_hooks_of(module) == {handle.id: print}


def test_state_dicts_pass_their_metadata_on() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    target: Any = OrderedDict(state)
    module_private.copy_metadata(state, target)
    assert target._metadata is state._metadata  # type: ignore[attr-defined]
    assert target._metadata[""]["version"] == 2
    plain: Any = OrderedDict()
    module_private.copy_metadata({}, plain)
    assert not hasattr(plain, "_metadata")


@torch.no_grad()  # A graph would refer to the parameters, which cannot be swapped then, either.
def test_a_recurrent_module_can_be_swapped_without_its_weak_references() -> None:
    torch.manual_seed(0)
    module = nn.LSTM(2, 3)
    batch = torch.randn(4, 1, 2)
    before = module(batch)[0]
    fresh = [nn.Parameter(copy.deepcopy(p.data)) for p in module.parameters()]
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(next(module.parameters()), fresh[0])
    module_private.drop_weak_references(module)
    for parameter, other in zip(module.parameters(), fresh, strict=True):
        torch.utils.swap_tensors(parameter, other)
    module_private.make_weak_references(module)
    assert torch.equal(module(batch)[0], before)
    assert torch.equal(module(pack_padded_sequence(batch, torch.tensor([4])))[0].data, before[:, 0])


def test_base_classes_cover_the_public_ones() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm2d):
        assert issubclass(kind, module_private.NormBase)
    assert not issubclass(nn.LayerNorm, module_private.NormBase)
    assert nn.BatchNorm1d(2).track_running_stats
    for loss in (nn.MSELoss, nn.CrossEntropyLoss, nn.TripletMarginLoss, nn.GaussianNLLLoss):
        assert issubclass(loss, module_private.Loss)


def test_trunc_normal_draws_with_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, calls = torch.empty(3), []
    monkeypatch.setattr(nn.init, compat.TRUNCATED_NORMAL, lambda *args, **_: calls.append(args))
    nn.init.trunc_normal_(tensor, 1.0, 2.0, a=-1.0, b=3.0)
    assert len(calls) == 1
    assert calls[0][0] is tensor
    assert calls[0][1:5] == (1.0, 2.0, -1.0, 3.0)


def test_a_loader_keeps_the_iterator_of_persistent_workers() -> None:
    loader: DataLoader[int] = DataLoader([1, 2], num_workers=0)  # type: ignore[arg-type]
    assert vars(loader)[compat.LOADER_ITERATOR] is None
    assert isinstance(iter(loader), compat.DataLoaderIterator)


# --- gradient scaler ---


def test_a_scaler_skips_the_step_for_a_flag_that_is_written_into_its_state() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert compat.scale_device(scaler) == compat.scaler_device(scaler) == torch.device("cpu")
    for flag, value in ((1.0, 1.0), (0.0, 0.0)):
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        state = compat.scaler_state(scaler, optimizer)
        assert [found.item() for found in state["found_inf_per_device"].values()] == [0.0]
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(flag)}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert parameter.tolist() == [value, value]
    assert scaler.get_scale() == 2.0
    assert compat.scale_device(scaler) == torch.device("cpu")


def test_compiled_modules_are_found_with_all_that_is_inside_of_them() -> None:
    inner = [nn.Linear(2, 2) for _ in range(3)]
    root = nn.ModuleList(nn.Sequential(each) for each in inner)
    root[0] = cast(nn.Module, torch.compile(root[0], backend="eager"))
    root[1].compile(backend="eager")
    found = module_private.compiled_in(root)
    assert {id(each) for each in inner if each in found} == {id(inner[0]), id(inner[1])}
    assert root[0] in found
    assert root[1] in found
    assert root[2] not in found


def test_a_function_is_called_before_the_hooks_after_a_step_and_is_gone_afterwards() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    with compat.called_before_post_hooks(optimizer, lambda: calls.append("first")):
        optimizer.step()
    optimizer.step()
    assert calls == ["first", "hook", "hook"]


def test_a_step_without_hooks() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    compat.step_without_hooks(optimizer)()
    assert not calls
    assert parameter.item() == 0.5


def test_what_is_put_around_a_module_for_its_backward_hooks_can_be_replaced() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_full_backward_hook(lambda *_: seen.append("called"))

    def make(*args: Any) -> Any:
        seen.append("made")
        return module_private.BackwardHook(*args)

    x = torch.ones(1, 2, requires_grad=True)
    with module_private.backward_hooks_by(make):
        module(x).sum().backward()
    module(x).sum().backward()
    assert seen == ["made", "called", "called"]


def test_a_view_knows_its_base() -> None:
    x = torch.zeros(3)
    assert compat.base_of(x[1]) is x
    assert compat.base_of(x) is None


def test_modes_are_taken_from_their_stacks_and_put_back() -> None:
    operations = Operations()
    with Functions() as functions, operations:
        assert compat.function_mode_stack()[-1] is functions
        assert compat.dispatch_mode_stack()[-1] is operations
        taken = compat.pop_function_mode()
        compat.pop_dispatch_mode()
        torch.ones(2).sin()
        assert functions.names == []
        assert operations.seen == []
        compat.push_function_mode(taken)
        compat.push_dispatch_mode(operations)
        torch.ones(2).sin()
    assert "sin" in functions.names
    assert operations.seen


def test_fake_tensors_are_left_inside_of_their_mode() -> None:
    with compat.FakeTensorMode():
        assert compat.is_without_memory(torch.ones(2))
        with compat.real_tensors():
            assert torch.ones(2).sum().item() == 2


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


def test_a_function_is_applied_whatever_stands_in_the_place_of_apply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    x = torch.ones(2, requires_grad=True)
    compat.apply_function.__get__(None, _Tripled)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
