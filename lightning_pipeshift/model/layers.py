"""Finds the layers of a LightningModule: the modules that are placed, measured and moved.

Containers, and modules that hold a list of like blocks, are opened; what remains and has parameters
is a layer. An element of such a list is never opened by itself: inside it the boundaries carry more
than between the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_pipeshift.errors import LayerError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(root: nn.Module, at_least: int = 1) -> dict[str, nn.Module]:
    """The layers of ``root`` by qualified name, in the order of the module tree.

    ``root.configure_layers()`` names them instead where the user defined it.

    Args:
        root: the LightningModule; it is always opened.
        at_least: while there are fewer layers than this, the largest is opened (a wrapper around
            the whole network, say), as long as it has parts with parameters.

    Raises:
        LayerError: nothing has parameters, or ``configure_layers`` returned something that is no
            list of separate modules of ``root``.
    """
    configure = getattr(root, "configure_layers", None)
    if callable(configure):
        return _named_by_user(root, configure())
    layers = _with_parameters(_open(root, ""))
    while 0 < len(layers) < at_least:
        largest = max(
            (name for name in layers if _may_be_opened(layers[name])),
            key=lambda name: _num_parameters(layers[name]),
            default=None,
        )
        if largest is None:
            break
        opened: dict[str, nn.Module] = {}
        for name, module in layers.items():
            if name == largest:
                opened.update(_with_parameters(_open(module, name)))
            else:
                opened[name] = module
        layers = opened
    if not layers:
        raise LayerError(
            f"`{type(root).__name__}` has no module with parameters, so there is nothing to place"
            " on stages. Build the network in `__init__`, before `Trainer.fit` is called."
        )
    return layers


def _with_parameters(found: Iterator[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Those that have parameters; a module that is found under two names counts once."""
    layers: dict[str, nn.Module] = {}
    for name, module in found:
        if _num_parameters(module) and all(module is not known for known in layers.values()):
            layers[name] = module
    return layers


def _may_be_opened(module: nn.Module) -> bool:
    """Whether a module's parts are called as modules, as far as can be seen from outside.

    A module with parameters of its own uses them, and often those of its parts, in its own way
    (``nn.MultiheadAttention``).
    """
    return bool(_parts(module)) and not any(p is not None for p in module._parameters.values())


def _open(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, _CONTAINERS):
            elements = isinstance(child, nn.ModuleList | nn.ModuleDict)
            for element_name, element in child.named_children():
                element_path = f"{path}.{element_name}"
                if isinstance(element, _CONTAINERS) or (not elements and _holds_blocks(element)):
                    yield from _open(element, element_path)
                else:
                    yield element_path, element
        elif _holds_blocks(child):
            yield from _open(child, path)
        else:
            yield path, child


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a list of like blocks is somewhere inside, not counting what is inside a block."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            if _are_like_blocks(child):
                return True
            if any(isinstance(e, _CONTAINERS) and _holds_blocks(e) for e in child.children()):
                return True
        elif _holds_blocks(child):
            return True
    return False


def _are_like_blocks(container: nn.Module) -> bool:
    kinds: dict[type, int] = {}
    for element in container.children():
        # A run of plain Linear modules in a Sequential is what the inside of a block looks like; in
        # a ModuleList, which has no forward of its own, it is a list of layers.
        composite = bool(_parts(element)) or isinstance(container, nn.ModuleList)
        if composite and _num_parameters(element):
            kinds[type(element)] = kinds.get(type(element), 0) + 1
    return any(count >= 2 for count in kinds.values())


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
