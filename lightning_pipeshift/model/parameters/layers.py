"""Finds the layers of a LightningModule: the modules that are placed, measured and moved.

Repeated blocks are layers: composite modules of one class that are siblings. Containers, and
modules that contain blocks, are opened; the remaining modules with parameters or persistent buffers
are layers too. A block is never opened: inside it the boundaries carry more data than between the
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torchmetrics import Metric

from lightning_pipeshift.compat.module_private import (
    Loss,
    forward_hooks_of,
    has_backward_hooks,
    is_compiled_module,
    parameters_of,
    persistent_buffers,
)
from lightning_pipeshift.errors import LayerError

# Only exactly these classes are opened: a user's subclass may use its children in its own way.
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Modules of one class that differ by more than this factor in size, and contain modules of one
# class, are the stages of a network and not its blocks.
_STAGES_DIFFER = 4
# In a model with fewer layers than this, the parts of the layers have their own random streams: it
# may be split into more layers for more stages, and still draws the same numbers.
MOST_OPENED = 8

# On values, where a layer has one random stream: small models become as many layers as this, on any
# number of stages.
FEWEST_LAYERS = 4


def find_layers(root: nn.Module, at_least: int = 1) -> dict[str, nn.Module]:
    """The layers of ``root`` by qualified name, in the order of the module tree.

    ``root.configure_layers()`` names them instead where the user defined it.

    Args:
        root: the LightningModule; it is always opened.
        at_least: while there are fewer layers than this, the largest is opened (a wrapper around
            the whole network, say), as long as it has parts with parameters; up to eight layers.
            So are those with hooks on modules inside of them: such a hook may change what a layer
            returns, and nothing inside of one.

    Raises:
        LayerError: ``configure_layers`` did not return a list of separate modules of ``root``.
    """
    configure = getattr(root, "configure_layers", None)
    if callable(configure):
        return _named_by_user(root, configure())
    layers = _with_state(_open(root, "", _Blocks(root)))
    while len(layers) < MOST_OPENED:
        may_be_opened = [
            name
            for name, layer in layers.items()
            if (len(layers) < at_least or _has_hooks_inside(layer)) and _may_be_opened(layer)
        ]
        if not may_be_opened:
            break
        largest = max(may_be_opened, key=lambda name: _num_parameters(layers[name]))
        layers = _with_state(
            found
            for name, layer in layers.items()
            for found in (_open(layer, name, ()) if name == largest else [(name, layer)])
        )
    return layers


def require_layers(root: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raises LayerError if no layer has parameters. A single device needs none: a model may have
    parameters in no layer, or a step that only reads the data.

    Args:
        root: the LightningModule.
        layers: its layers.
    """
    if not any(map(_num_parameters, layers)):
        raise LayerError(
            f"`{type(root).__name__}` has no module with parameters, so there is nothing to place"
            " on stages. Build the network in `__init__`, before `Trainer.fit` is called."
        )


def compiled_around(root: nn.Module, layers: Iterable[nn.Module]) -> list[str]:
    """The names of compiled modules that contain layers. They run as they were written: the code
    between layers runs on values, which no compiler knows.
    """
    gated = set(map(id, layers))
    return [
        name
        for name, module in root.named_modules()
        if is_compiled_module(module)
        and any(id(part) in gated for part in module.modules() if part is not module)
        and module is not root
    ]


def _with_state(found: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Returns the modules that have parameters or persistent buffers. A module with two names
    counts once; one that is part of another is omitted.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in found:
        if _has_state(module) and all(module is not known for known in layers.values()):
            layers[name] = module
    inner = {id(part) for layer in layers.values() for part in layer.modules() if part is not layer}
    return {name: layer for name, layer in layers.items() if id(layer) not in inner}


def _has_state(module: nn.Module) -> bool:
    if isinstance(module, Loss | Metric):
        return _num_parameters(module) > 0
    return _num_parameters(module) > 0 or any(
        buffer is not None for part in module.modules() for _, buffer in persistent_buffers(part)
    )


def _may_be_opened(module: nn.Module) -> bool:
    """Whether a module's parts are called as modules, judging from its attributes.

    A module with parameters of its own uses them, and often those of its parts, in its own way
    (``nn.MultiheadAttention``). A hook on a module's backward needs both of its ends on one stage.
    """
    has_own = any(p is not None for p in parameters_of(module).values())
    return bool(_parts(module)) and not has_own and not has_backward_hooks(module)


def _has_hooks_inside(module: nn.Module) -> bool:
    return any(part is not module and forward_hooks_of(part) for part in module.modules())


class _Blocks:
    """The composite modules that are repeated as siblings, outermost first.

    Args:
        root: the module to search.
    """

    def __init__(self, root: nn.Module) -> None:
        self._repeated: set[int] = set()
        self._kinds: set[type] = set()
        queue = deque([root])
        while queue:
            # Breadth first: a stage with a single block has one like those of the other stages.
            module = queue.popleft()
            if type(module) in self._kinds:
                continue
            siblings = list(_beside_each_other(module))
            by_class: dict[type, list[nn.Module]] = {}
            for sibling in siblings:
                if _parts(sibling):
                    by_class.setdefault(type(sibling), []).append(sibling)
            for kind, alike in by_class.items():
                if len(alike) > 1 and not _are_wrappers(module, alike):
                    self._kinds.add(kind)
                    self._repeated.update(map(id, alike))
            queue.extend(sibling for sibling in siblings if id(sibling) not in self._repeated)

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module is a block, or of a block's class without blocks in it."""
        if id(module) in self._repeated:
            return True
        inner = (id(part) for part in module.modules() if part is not module)
        return type(module) in self._kinds and self._repeated.isdisjoint(inner)


def _open(
    module: nn.Module, name: str, blocks: _Blocks | tuple[()]
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if child not in blocks and (type(child) in _CONTAINERS or _contains_any(child, blocks)):
            yield from _open(child, path, blocks)
        else:
            yield path, child


def _contains_any(module: nn.Module, blocks: _Blocks | tuple[()]) -> bool:
    """Whether a module contains blocks, or a list of modules of one class."""
    return any(
        child in blocks or _is_list(child) or _contains_any(child, blocks)
        for child in module.children()
    )


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one class: it has no forward of its own, so its
    elements are called one by one.
    """
    kinds = [type(element) for element in module.children() if _num_parameters(element)]
    return type(module) is nn.ModuleList and len(kinds) > len(set(kinds))


def _beside_each_other(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in _CONTAINERS:
            yield from _beside_each_other(child)
        else:
            yield child


def _are_wrappers(parent: nn.Module, alike: Sequence[nn.Module]) -> bool:
    """Whether modules of one class are no blocks but contain blocks: the stages of a network, whose
    sizes differ; or an encoder and a decoder; or a network and its copy.
    """
    if not any(_contains_any(module, _Blocks(module)) for module in alike):
        return False
    sizes = [_num_parameters(module) for module in alike]
    attributes = set(map(id, parent.children()))
    are_a_pair = len(alike) == 2 and all(id(module) in attributes for module in alike)
    return are_a_pair or max(sizes) > _STAGES_DIFFER * min(sizes)


def _parts(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if _num_parameters(child)]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _named_by_user(root: nn.Module, chosen: object) -> dict[str, nn.Module]:
    name_of = {module: name for name, module in root.named_modules()}
    if not isinstance(chosen, Sequence) or not chosen:
        raise LayerError(
            f"`configure_layers` returned {type(chosen).__name__}; it has to return a non-empty"
            " list of modules of this LightningModule, in the order in which they are called."
        )
    layers: dict[str, nn.Module] = {}
    for module in chosen:
        if not isinstance(module, nn.Module) or module not in name_of or module is root:
            raise LayerError(
                f"`configure_layers` returned {module!r:.200}, which is not a module inside this"
                " LightningModule. Return modules that are reachable as its attributes."
            )
        if name_of[module] in layers:
            raise LayerError(
                f"`configure_layers` names {name_of[module]!r} twice. Name every layer once."
            )
        layers[name_of[module]] = module
    for name, module in layers.items():
        for other, outer in layers.items():
            if module is not outer and any(module is part for part in outer.modules()):
                raise LayerError(
                    f"`configure_layers` names {other!r} and, inside it, {name!r}."
                    " Layers must be separate: name one of the two."
                )
    return layers
