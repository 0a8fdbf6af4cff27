"""A tensor of one device that takes the same path through torch as a DTensor, and records the results of each op.

    OneDevice(x, log) @ w        the log gets `aten.mm` with its result

torch looks at the class of a tensor before it picks between kernels, so a plain tensor may meet other ops. Ops on newly
made tensors alone are recorded neither here nor for DTensors. So both runs meet the same ops in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.comm.user_line import caller
from spmd.tensor.eager.composites import DISPATCH_KEYS
from spmd.tensor.rules.products import KERNELS

pytree = _torch.pytree
aten = torch.ops.aten

IGNORED = {aten.detach.default, aten.alias.default}
"""Ops without effect. How often autograd calls them depends on other references to the tensor."""


@dataclass(frozen=True)
class OpRecord:
    """An op and its results: copies of tensors, numbers, and None for a result that is not compared."""

    op: str
    where: str
    results: tuple[Any, ...]
    metadata: tuple[str, ...]


@dataclass
class Log:
    """The ops of a run, in order. Only the first `limit` ops keep their results."""

    limit: int | None = None
    records: list[OpRecord] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)

    def where(self) -> str:
        """The user's line; in a backward pass, the line of the forward op."""
        node = _torch.running_node_number()
        if node is not None:
            return f"the backward of {self.lines.get(node, caller())}"
        line = caller()
        self.lines.setdefault(_torch.last_node_number(), line)
        return line

    def record(self, op: Callable, results: list) -> None:
        kept = self.limit is None or len(self.records) < self.limit
        values = tuple(_copied(x) if kept and has_values(op) else None for x in results)
        self.records.append(OpRecord(str(op), self.where(), values, tuple(map(metadata_text, results))))


class OneDevice(torch.Tensor):
    """A global tensor on one device whose ops are recorded in a log."""

    _tensor: torch.Tensor
    _log: Log
    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, log: Log, requires_grad: bool = False) -> OneDevice:
        out = _torch.wrapper_tensor(cls, tensor, tensor.shape, tensor.stride(), requires_grad, keys=DISPATCH_KEYS)
        out._tensor, out._log = tensor, log
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in op.tags:
            raise NotImplementedError(f"check: {op} changes a shape in place; use the op that gives a new tensor")
        flat, structure = pytree.tree_flatten((args, kwargs))
        log = next(x._log for x in flat if isinstance(x, OneDevice))
        wrappers = {id(x._tensor): x for x in flat if isinstance(x, OneDevice)}
        plain_args, plain_kwargs = pytree.tree_unflatten([_tensor(x) for x in flat], structure)
        out = _torch.run_with_bits(KERNELS.get(op, op), *plain_args, **plain_kwargs)
        out = pytree.tree_map_only(torch.Tensor, lambda x: wrappers[id(x)] if id(x) in wrappers else cls(x, log), out)
        if op not in IGNORED:
            log.record(op, results_of(op, args, kwargs, out))
        return out

    @property
    def data(self) -> OneDevice:
        return self.detach()

    @data.setter
    def data(self, other: OneDevice) -> None:
        self._tensor = other._tensor

    def redistribute(self, device_mesh=None, placements=None, *, forward_dtype=None, **how: Any) -> OneDevice:
        """The same tensor: one device has nothing to move."""
        return aten.alias.default(self) if forward_dtype is None else self.to(forward_dtype)

    def to_local(self) -> torch.Tensor:
        """The tensor, whose ops are no longer recorded: the block of the only device."""
        return self._tensor

    def tolist(self) -> Any:
        return self._tensor.tolist()

    def numpy(self, *, force: bool = False):
        return self._tensor.numpy(force=force)

    def __deepcopy__(self, memo):
        return OneDevice(self._tensor.clone(), self._log, self.requires_grad)

    def __repr__(self, *, tensor_contents=None):
        return f"OneDevice({self._tensor!r})"

    def __format__(self, spec: str) -> str:
        return format(self._tensor, spec)


def results_of(op: Callable, args: tuple, kwargs: dict, out: Any) -> list:
    """The results of an op; for an op that returns nothing, the tensors that it wrote into."""
    if out is not None:
        return [x for x in pytree.tree_leaves(out) if isinstance(x, (torch.Tensor, *NUMBERS))]
    return [x for x in pytree.tree_leaves(list(_written_arguments(op, args, kwargs))) if isinstance(x, torch.Tensor)]


NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def _written_arguments(op: Callable, args: tuple, kwargs: dict) -> Iterator[Any]:
    for name in _torch.written(op):
        at = _torch.argument_index(op, name)
        yield args[at] if at < len(args) else kwargs.get(name)


def has_values(op: Callable) -> bool:
    """Whether the arguments determine the results of an op; those of `empty` are whatever was in memory."""
    return not _torch.qualified_name(op).split("::")[1].startswith(("empty", "new_empty"))


def metadata_text(x: Any) -> str:
    """The dtype and shape of a result, as in `float32[5, 8]`; of a number only that it is one."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else "a number"


def _tensor(x: Any) -> Any:
    return x._tensor if isinstance(x, OneDevice) else x


def _copied(x: Any) -> Any:
    return _tensor(x).detach().clone() if isinstance(x, torch.Tensor) else x
