"""Models on the meta device: each rank makes its blocks of the parameters and buffers, and nothing else.

    with torch.device("meta"):
        model = GPT(config)                                    # shapes, no memory
    spmd.manual_seed(0)
    distribute_module(model, mesh, params={...})               # blocks, with the numbers of their initialisers

The blocks are made empty. Then the initialisers of the modules run on the DTensors, as they would on whole tensors: for
each module, children first, which is the order in which constructors run them,

    reset_parameters()              or `_reset_parameters()`; then, for each module again,
    model._init_weights(module)     of models that have it, as those of transformers; then, for each module again,
    init(module)                    the user's, as in `model.apply(init)`

A draw is of the global tensor, so the numbers depend on the seed and not on the mesh: they are those that the same
calls give on one rank. Tied tensors stay tied, and have the numbers of the module that has them first. What is not on
the meta device keeps its numbers. Most modules have no initialiser of buffers that their constructors compute; there
`init` has to give them their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd.mesh import per_rank
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.identity import become, placed
from spmd.tensor.eager.plain_tensors import implicit_replication
from spmd.tensor.spec import Spec

Init = Callable[[nn.Module], None] | bool
"""A function that initialises the tensors of a module; True for the modules' own initialisers alone; False for none."""


def is_to_be_made(x: torch.Tensor, spec: Spec) -> bool:
    """Whether a tensor of a model is on the meta device, and its mesh is not."""
    return x.is_meta and spec.mesh.device_type != "meta"


def made_empty(x: torch.Tensor, spec: Spec) -> DTensor:
    """This rank's block of a tensor on the meta device, without numbers."""
    return DTensor(_empty_block(spec), spec, requires_grad=x.requires_grad)


@per_rank
def _empty_block(spec: Spec) -> torch.Tensor:
    at = spec.mesh.get_coordinate()
    if at is None:
        raise RuntimeError(f"rank {spec.mesh.get_rank()} is not in {spec.mesh!r}; place the model on its ranks only")
    return torch.empty_strided(
        spec.local_shape(at), spec.local_stride(at), dtype=spec.dtype, device=spec.mesh.device_type
    )


class _Part(NamedTuple):
    """A module in a model. model: the innermost model around it that has `_init_weights`."""

    path: str
    module: nn.Module
    model: nn.Module | None

    @property
    def own(self) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """The tensors of the module itself, each with the table and the name that it has there."""
        tables = self.module._parameters, self.module._buffers
        return [(table, name, x) for table in tables for name, x in table.items() if x is not None]

    @property
    def reset(self) -> Callable[[], Any] | None:
        """The module's own initialiser."""
        found = getattr(self.module, "reset_parameters", None) or getattr(self.module, "_reset_parameters", None)
        return found if callable(found) else None


def check_initialisers(modules: Mapping[str, nn.Module], init: Init) -> None:
    """ValueError for a tensor on the meta device that no initialiser could give numbers."""
    for part in _parts(modules) if init is True else ():
        names = [name for _, name, x in part.own if x.is_meta]
        if names and part.reset is None and part.model is None:
            raise ValueError(_no_initialiser(part, names[0]))


def initialise(modules: Mapping[str, nn.Module], fresh: Sequence[torch.Tensor], init: Init = True) -> None:
    """Run the initialisers of modules by path. fresh: their tensors that were made empty; others keep their numbers.

    ValueError for a tensor that none of them has written.
    """
    if init is False or not fresh:
        return
    unwritten, parts = {id(x): x._version for x in fresh}, list(_parts(modules))
    owners: dict[int, nn.Module] = {}
    for root in modules.values():
        for module in root.modules():
            for x in (*module._parameters.values(), *module._buffers.values()):
                owners.setdefault(id(x), module)
    with torch.no_grad(), implicit_replication():
        for initialiser in _initialisers(init):
            for part in parts:
                if (run := initialiser(part)) is not None and _has_fresh(part.module, unwritten):
                    _run(run, part, unwritten, owners)
    for part in parts:
        for _, name, x in part.own:
            if unwritten.get(id(x)) == x._version:
                raise ValueError(_no_initialiser(part, name))


def _initialisers(init: Init) -> Iterator[Callable[[_Part], Callable[[], Any] | None]]:
    """What gives the initialiser of a module, one after the other."""
    yield lambda part: part.reset
    yield lambda part: part.model and (lambda: part.model._init_weights(part.module))
    if callable(init):
        yield lambda part: lambda: init(part.module)


def _parts(modules: Mapping[str, nn.Module]) -> Iterator[_Part]:
    """Every module once, children first."""
    seen: set[int] = set()

    def walk(path: str, module: nn.Module, model: nn.Module | None) -> Iterator[_Part]:
        if id(module) in seen:
            return
        seen.add(id(module))
        model = module if callable(getattr(module, "_init_weights", None)) else model
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}", child, model)
        yield _Part(path, module, model)

    for path, module in modules.items():
        yield from walk(path, module, None)


def _has_fresh(module: nn.Module, fresh: Mapping[int, int]) -> bool:
    return any(id(x) in fresh for x in (*module.parameters(), *module.buffers()))


def _run(
    initialiser: Callable[[], Any], part: _Part, fresh: dict[int, int], owners: Mapping[int, nn.Module]
) -> None:
    """Run an initialiser on the module's own fresh tensors. In the place of others it gets scratch ones to write to.

    A tensor that the initialiser puts in the place of another gives its numbers to that one.
    """
    before = part.own
    for table, name, x in before:
        if id(x) not in fresh or owners[id(x)] is not part.module:
            table[name] = _scratch(x)
    handed = {(id(table), name): table[name] for table, name, _ in before}
    try:
        initialiser()
        for table, name, x in before:
            new = table.get(name)
            if new is not None and new is not handed[id(table), name] and id(x) in fresh:
                become(x, placed(new, x._spec).requires_grad_(x.requires_grad))
                fresh[id(x)] = -1  # no version that a tensor has
    finally:
        for table, name, x in before:
            table[name] = x


def _scratch(x: torch.Tensor) -> torch.Tensor:
    """A tensor like x, to be thrown away."""
    like = torch.empty_like(x)
    return nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like


def _no_initialiser(part: _Part, name: str) -> str:
    return (
        f"{part.path}.{name} is on the meta device, and no initialiser of {type(part.module).__name__} gives it "
        "numbers; pass init=function, which gets each module and writes such tensors, or init=False and load a "
        "checkpoint"
    )
