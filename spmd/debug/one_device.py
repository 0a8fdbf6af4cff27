"""A tensor of one device that goes the way through torch that a DTensor goes, and writes down what each op gives.

torch asks of what class tensors are before it picks between kernels, so a plain tensor may go another way. Tensors
that are made anew, and ops on them alone, are no ops on DTensors either; so both runs meet the same ops in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.sim.exchange import caller
from spmd.tensor.composites import KEYS
from spmd.tensor.rules.products import KERNELS

pytree = _torch.pytree
aten = torch.ops.aten

UNSEEN = {aten.detach.default, aten.alias.default}
"""Ops that change nothing; how often autograd calls them depends on who else holds a tensor."""


@dataclass(frozen=True)
class Done:
    """An op with what it gave: a copy of each tensor, and numbers; None for what is not to be compared."""

    op: str
    where: str
    results: tuple[Any, ...]
    looks: tuple[str, ...]


@dataclass
class Log:
    """The ops of a run, in order. Results of those from `limit` on are not kept."""

    limit: int | None = None
    done: list[Done] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)

    def where(self) -> str:
        """The user's line, or in a backward pass the line of the op whose gradient it is."""
        node = _torch.running_node()
        if node is not None:
            return f"the backward of {self.lines.get(node, caller())}"
        here = caller()
        self.lines.setdefault(_torch.last_node(), here)
        return here

    def note(self, op: Callable, results: list) -> None:
        kept = self.limit is None or len(self.done) < self.limit
        values = tuple(_kept(x) if kept and has_values(op) else None for x in results)
        self.done.append(Done(str(op), self.where(), values, tuple(map(look, results))))


class OneDevice(torch.Tensor):
    """A whole tensor whose ops are noted in a log."""

    _whole: torch.Tensor
    _log: Log
    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, whole: torch.Tensor, log: Log, requires_grad: bool = False) -> OneDevice:
        out = _torch.wrapper_tensor(cls, whole, whole.shape, whole.stride(), requires_grad, keys=KEYS)
        out._whole, out._log = whole, log
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in op.tags:
            raise NotImplementedError(f"check: {op} changes a shape in place; use the op that gives a new tensor")
        flat, structure = pytree.tree_flatten((args, kwargs))
        log = next(x._log for x in flat if isinstance(x, OneDevice))
        wholes = {id(x._whole): x for x in flat if isinstance(x, OneDevice)}
        own_args, own_kwargs = pytree.tree_unflatten([_whole(x) for x in flat], structure)
        out = KERNELS.get(op, op)(*own_args, **own_kwargs)
        out = pytree.tree_map_only(torch.Tensor, lambda x: wholes[id(x)] if id(x) in wholes else cls(x, log), out)
        if op not in UNSEEN:
            log.note(op, given(op, args, kwargs, out))
        return out

    @property
    def data(self) -> OneDevice:
        return self.detach()

    @data.setter
    def data(self, other: OneDevice) -> None:
        self._whole = other._whole

    def redistribute(self, device_mesh=None, placements=None, *, forward_dtype=None, **how: Any) -> OneDevice:
        """The same tensor: what moves between ranks is there already."""
        return aten.alias.default(self) if forward_dtype is None else self.to(forward_dtype)

    def tolist(self) -> Any:
        return self._whole.tolist()

    def numpy(self, *, force: bool = False):
        return self._whole.numpy(force=force)

    def __deepcopy__(self, memo):
        return OneDevice(self._whole.clone(), self._log, self.requires_grad)

    def __repr__(self, *, tensor_contents=None):
        return f"OneDevice({self._whole!r})"

    def __format__(self, spec: str) -> str:
        return format(self._whole, spec)


def given(op: Callable, args: tuple, kwargs: dict, out: Any) -> list:
    """What an op gives: its results; of an op that returns nothing, the tensors it wrote into."""
    if out is not None:
        return [x for x in pytree.tree_leaves(out) if isinstance(x, (torch.Tensor, *NUMBERS))]
    return [x for x in pytree.tree_leaves(list(_written(op, args, kwargs))) if isinstance(x, torch.Tensor)]


NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _written(op: Callable, args: tuple, kwargs: dict) -> Iterator[Any]:
    for name in _torch.written(op):
        at = _torch.argument_index(op, name)
        yield args[at] if at < len(args) else kwargs.get(name)


def has_values(op: Callable) -> bool:
    """Whether what an op gives is in its arguments, and not whatever was in memory."""
    return not _torch.qualified_name(op).split("::")[1].startswith(("empty", "new_empty"))


def look(x: Any) -> str:
    """What a result looks like from outside, as in `float32[5, 8]`; no more of a number than that it is one."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else "a number"


def _whole(x: Any) -> Any:
    return x._whole if isinstance(x, OneDevice) else x


def _kept(x: Any) -> Any:
    return _whole(x).detach().clone() if isinstance(x, torch.Tensor) else x
