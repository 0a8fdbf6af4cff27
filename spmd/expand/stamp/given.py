"""What a call of a module is given, and the kind of call that it is."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.guards import guard_key
from spmd.expand.modules import buffers_of, modules_of, parameters_of
from spmd.expand.sources.layout import COMPARED_BY_VALUE
from spmd.expand.stamp.parts import metadata
from spmd.expand.stamp.repeats import Structure, guard_now


@dataclass(frozen=True, eq=False)
class Given:
    """What a call is given. tensors: those among the arguments, and the parameters, by name. nodes: theirs, and then
    those of the buffers. kind: all else that the code can see, but for the attributes in which modules of the structure
    differ."""

    module: nn.Module
    structure: Structure
    path: str
    leaves: tuple[Any, ...]
    tree: Any
    tensors: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    nodes: tuple[fx.Node, ...]
    grad: bool
    kind: Hashable

    @classmethod
    def of(
        cls, module: nn.Module, structure: Structure, args: tuple, kwargs: dict, tracer: fx.Tracer, path: str,
        wherever: bool = False,
    ) -> Given | None:  # fmt: skip
        """None where the call is not one of those that can be compared. wherever: whether arguments may be anywhere in
        the memory that they show."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(x, (_torch.FunctionalTensor, *COMPARED_BY_VALUE, float)) for x in leaves):
            return None
        with _torch.no_function_modes():  # they would hear of each question after a shape
            kinds = tuple(layout(x, wherever) if isinstance(x, torch.Tensor) else guard_key(x) for x in leaves)
            parameters, buffers = parameters_of(module), tuple(buffers_of(module))
            own = tuple(map(layout, (*parameters, *buffers))), _guards(module, structure.differing)
        arguments = [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors = (*arguments, *parameters)
        nodes = tuple(node_of(x, tracer) for x in (*tensors, *buffers))
        if any(map(_torch.user_attributes, arguments)):
            return None
        if None in nodes or any(_is_known(x, tracer) for x in (*tensors, *buffers)):
            return None
        around = _torch.modes_around(), _torch.flags_around(), _pattern(nodes)
        kind = structure, repr(tree), kinds, own, *around
        return cls(module, structure, path, tuple(leaves), tree, tensors, buffers, nodes, torch.is_grad_enabled(), kind)


def _pattern(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Which of them are one."""
    places: dict[fx.Node, int] = {}
    return tuple([places.setdefault(n, i) for i, n in enumerate(nodes)])


def _guards(module: nn.Module, without: Collection[str]) -> tuple[Hashable, ...]:
    return tuple(guard_now(m, without) for m in modules_of(module))


def layout(x: torch.Tensor, wherever: bool = False) -> tuple:
    """What code sees of a tensor. wherever: but for where it begins in its memory."""
    return *metadata(x), wherever or str(x.storage_offset()), x.requires_grad, x.is_conj(), x.is_neg()


def _is_known(x: torch.Tensor, tracer: fx.Tracer) -> bool:
    """Whether the trace knows the value, so that Python code may decide by it."""
    value = _torch.from_functional(x)
    return _torch.known_value(value) is not None or _torch.known_constant(value, tracer) is not None


def node_of(x: torch.Tensor, tracer: fx.Tracer) -> fx.Node | None:
    return _torch.node_of(_torch.from_functional(x), tracer) if isinstance(x, _torch.FunctionalTensor) else None
