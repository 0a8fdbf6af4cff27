"""The state that an optimiser makes in its first step, known before the step.

    optimizer.exp_avg[model.w]    zeros, f32[64, 16]          optimizer.step[model.w]    0.0

Torch's optimisers make the state of a parameter when they first meet its gradient: tensors full of one value. The
step itself is then the same as any later one. So a program for all steps takes the state as an input, and before the
first one the state is made: `first_state` asks the optimiser itself, by a step on fake parameters, one for each kind.
Of kinds that differ in lengths alone, one is asked where the optimiser computes with elements.

Nothing is said of an optimiser that makes other state - a copy of the gradient, as SGD's momentum - or that is the
user's. Its first step has a program of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.state import Slot, State
from spmd.mesh import per_rank
from spmd.tensor.spec import Spec, contiguous

aten = torch.ops.aten


@dataclass(frozen=True)
class Full:
    """A tensor that is full of one value. It has what is asked of a tensor before there is one."""

    value: float
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @property
    def is_meta(self) -> bool:
        return self.device.type == "meta"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return contiguous(self.shape)

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def detach(self) -> Full:
        return self

    def item(self) -> float:
        return self.value


FirstState = dict[Slot, Full]


def first_state(state: State) -> FirstState:
    """The state that optimisers would make for parameters that require gradients and have no state yet."""
    paths = {id(p): path for path, p in state.parameters().items()}
    found: FirstState = {}
    for root, optimizer in state.optimizers.items():
        if not _torch.is_torchs_own(optimizer):
            continue
        for group in optimizer.param_groups:
            made = _Made(optimizer, group)
            for p in group["params"]:
                if p.requires_grad and not optimizer.state.get(p):
                    found |= {Slot("optimizer", paths[id(p)], root, key): full for key, full in made.of(p).items()}
    return {slot: found[slot] for slot in sorted(found, key=_order(state, paths))}


def _order(state: State, paths: dict[int, str]):
    """Where a slot of optimisers comes in `State.tensors`, which goes by optimiser and parameter."""
    roots, at = list(state.optimizers), {path: i for i, path in enumerate(paths.values())}
    return lambda slot: (roots.index(slot.owner), at[slot.path])


@per_rank
def filled(full: Full, spec: Spec) -> torch.Tensor:
    """This rank's block of the tensor."""
    shape = spec.local_shape(spec.mesh.get_coordinate())
    device = spec.mesh.device_type if full.shape or full.is_meta else full.device  # a number stays where it was made
    return torch.full(shape, full.value, dtype=full.dtype, device=device)


# ---- asking the optimiser ---------------------------------------------------------------------


@dataclass
class _Made:
    """What an optimiser makes for the parameters of a group. kinds: by shape, dtype and device. families: the shape and
    the state of a kind that stands for all of as many dims.

    Where an optimiser computes with elements - it has a form for many tensors at once, and its state has the shape of
    the parameter - its state for other lengths is the same in their shape, as in `stamp.optimizers`.
    """

    optimizer: Optimizer
    group: dict[str, Any]
    kinds: dict[Hashable, Mapping[str, Full]] = field(default_factory=dict)
    families: dict[Hashable, tuple[torch.Size, Mapping[str, Full]]] = field(default_factory=dict)

    def of(self, p: torch.Tensor) -> Mapping[str, Full]:
        """The state of a parameter."""
        kind, family = (p.shape, p.dtype, p.device), (p.ndim, p.dtype, p.device)
        if kind not in self.kinds:
            if family in self.families:
                self.kinds[kind] = _in_shape(p.shape, *self.families[family])
            else:
                made = self.kinds[kind] = _made_for(self.optimizer, self.group, p)
                # A shape of one element does not tell a number from what has the parameter's shape.
                of_elements = "foreach" in self.group and all(x.shape in (p.shape, ()) for x in made.values())
                if made and of_elements and p.numel() > 1:
                    self.families[family] = p.shape, made
        return self.kinds[kind]


def _in_shape(shape: torch.Size, of: torch.Size, made: Mapping[str, Full]) -> dict[str, Full]:
    """State that was made for a parameter of one shape, for another one."""
    return {key: replace(full, shape=shape) if full.shape == of else full for key, full in made.items()}


def _made_for(optimizer: Optimizer, group: dict[str, Any], p: torch.Tensor) -> dict[str, Full]:
    """What the optimiser's first step makes for such a parameter; nothing if it is not a full tensor each.

    A parameter on the meta device is asked first, which takes a tenth of the time of a fake one. Not where options are
    tensors, of which the device counts; and an optimiser may take none such.
    """
    options = {k: v for k, v in group.items() if k != "params"}
    if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(options)):
        with _torch.no_modes():
            made = _made_in_a_step(optimizer, options, torch.empty(p.shape, dtype=p.dtype, device="meta"))
        if made:
            return {key: replace(x, device=p.device) if x.is_meta else x for key, x in made.items()}
    with _torch.no_modes(), _torch.uncached_fake_mode():
        options = pytree.tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), options)
        return _made_in_a_step(optimizer, options, torch.empty(p.shape, dtype=p.dtype, device=p.device))


def _made_in_a_step(optimizer: Optimizer, options: dict[str, Any], x: torch.Tensor) -> dict[str, Full]:
    """The same for a tensor that has no data."""
    with _Filled() as log:
        like = nn.Parameter(x)
        like.grad = torch.empty_like(like)
        trial = object.__new__(type(optimizer))
        vars(trial).update(vars(optimizer))
        trial.param_groups, trial.state = [{**options, "params": [like]}], defaultdict(dict)
        try:
            with torch.no_grad():
                type(optimizer).step.__wrapped__(trial)
        except _Complete:
            pass
        except Exception:  # it wants a closure, or decides by values: then nothing is known of its state
            return {}
        made = trial.state[like] if trial.state else {}
        found = {key: log.full(x) for key, x in made.items()}
    return found if None not in found.values() else {}


class _Complete(Exception):
    """All state is there, and the step begins to write it."""


class _Filled(_torch.TorchDispatchMode):
    """Notes the tensors that are made full of one value, until the first of them is written."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int | None, tuple[torch.Tensor, float]] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        written = [args[i] for i in _torch.written_positions(op) if i < len(args)]
        if any(map(self._is_filled, pytree.tree_leaves(written))):
            raise _Complete
        out = op(*args, **(kwargs or {}))
        value = VALUES[op](args) if op in VALUES else None
        if isinstance(value, (bool, int, float)):
            self._values[_torch.memory_of(out)] = out, value
        return out

    def _is_filled(self, x: torch.Tensor) -> bool:
        return _torch.memory_of(x) in self._values

    def full(self, x: Any) -> Full | None:
        """The tensor as it was made; None if it was not made full of one value."""
        made, value = self._values.get(_torch.memory_of(x), (None, 0.0)) if isinstance(x, torch.Tensor) else (None, 0.0)
        known = made is not None and made.shape == x.shape and x.stride() == contiguous(x.shape)
        return Full(value, x.shape, x.dtype, x.device) if known else None


def _number(x: torch.Tensor) -> float | None:
    """The value of `torch.tensor(1.0)` in a step."""
    with _torch.no_modes():
        return x.item() if x.numel() == 1 else None


VALUES = {
    aten.zeros.default: lambda args: 0.0, aten.zeros_like.default: lambda args: 0.0,
    aten.new_zeros.default: lambda args: 0.0, aten.ones.default: lambda args: 1.0,
    aten.ones_like.default: lambda args: 1.0, aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1], aten.new_full.default: lambda args: args[2],
    aten.lift_fresh.default: lambda args: _number(args[0]),
}  # fmt: skip
"""Ops that make a tensor full of one value, and the value."""


# ---- in a capture -----------------------------------------------------------------------------


class FirstSteps:
    """Gives the optimisers of a capture their first state, for parameters that have a gradient when their step begins.

    optimizers: by name. paths: of the parameters, by id. left: the tensors by slot that nobody was given. stepped: the
    names of the optimisers that made a step.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], paths: Mapping[int, str], first: Mapping[Slot, Any]):
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._paths, self.left = paths, dict(first)
        self.stepped: set[str] = set()

    def give(self, optimizer: Optimizer) -> None:
        """The step of an optimiser begins."""
        name = self._names.get(id(optimizer))
        if name is None:
            return
        self.stepped.add(name)
        mine: dict[str, list[Slot]] = defaultdict(list)
        for slot in self.left:
            if slot.owner == name:
                mine[slot.path].append(slot)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if mine and p.grad is not None and not optimizer.state.get(p):
                optimizer.state[p].update({slot.key: self.left.pop(slot) for slot in mine[self._paths[id(p)]]})

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Inside, the steps of this thread are seen."""
        thread = threading.get_ident()

        def begins(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            if threading.get_ident() == thread:
                self.give(optimizer)

        handle = register_optimizer_step_pre_hook(begins)
        try:
            yield
        finally:
            handle.remove()
