"""LocalTensor: one real tensor for each of a set of ranks, which ops take for one.

    >>> x = LocalTensor({0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])})
    >>> x * 2
    LocalTensor({0: tensor([2., 4.]), 1: tensor([6., 8.])})
    >>> (x - x).reconcile()
    tensor([0., 0.])

An op runs once a rank, on that rank's tensors. A plain tensor counts as the same on all ranks; so it cannot be written
to with values that differ. Where shapes differ between ranks, the sizes that do are `LocalInt`s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.sim.local_mesh import LocalMesh
from spmd.sim.varying import PerRank, local_int, pick, values_of

pytree = _torch.pytree
Ranks = tuple[int, ...]


class LocalTensor(torch.Tensor):
    """The tensors of some ranks as one. `local[rank]` is that rank's; `ranks` are which."""

    _of: Sequence[torch.Tensor]
    ranks: Ranks

    @staticmethod
    def __new__(cls, of: Mapping[int, torch.Tensor], requires_grad: bool = False) -> LocalTensor:
        """of: for each rank its tensor, all of one dtype and number of dims."""
        found = dict(sorted(of.items()))
        if not found or not all(isinstance(x, torch.Tensor) and type(x) is not LocalTensor for x in found.values()):
            raise ValueError("LocalTensor: give a dict with a plain tensor for each rank, of at least one rank")
        return wrap(tuple(found), [x.detach() for x in found.values()], requires_grad)

    __torch_function__ = _torch.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if any(t is not LocalTensor and t is not torch.Tensor and t is not torch.nn.Parameter for t in types):
            return NotImplemented
        return run_op(op, args, kwargs or {})

    @property
    def local(self) -> dict[int, torch.Tensor]:
        """Each rank's own tensor, without gradient history; writes into it are seen."""
        return dict(zip(self.ranks, self._of, strict=True))

    def reconcile(self) -> torch.Tensor:
        """The one tensor that all ranks have, NaN being equal to NaN. ValueError where two differ, with how."""
        first = self._of[0]
        for rank, x in zip(self.ranks[1:], self._of[1:], strict=True):
            if not same(first, x):
                raise ValueError(f"ranks differ: {difference(self.ranks[0], first, rank, x)}")
        return first

    @property
    def data(self) -> LocalTensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, LocalTensor):
            other = wrap(self.ranks, [other.detach().clone() for _ in self.ranks])
        _common(self.ranks, other.ranks, "x.data = y")
        torch.Tensor.data.__set__(self, other)  # shape, strides and dtype
        self._of = other._of

    def data_ptr(self):
        return local_int(dict(zip(self.ranks, (x.data_ptr() for x in self._of), strict=True)))

    def tolist(self):
        return _joined(self.ranks, [x.tolist() for x in self._of])

    def numpy(self, *, force: bool = False):
        return self.reconcile().numpy(force=force)

    def __deepcopy__(self, memo):
        copy = wrap(self.ranks, [x.clone() for x in self._of], self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        return LocalTensor, (self.local, self.requires_grad)

    def __repr__(self, *, tensor_contents=None):
        return f"LocalTensor({self.local})"


def wrap(ranks: Ranks, of: Sequence[torch.Tensor], requires_grad: bool = False) -> LocalTensor:
    """A LocalTensor of these tensors themselves."""
    first = of[0]
    shape, stride = first.shape, first.stride()
    for x in of:
        if x.shape != shape or x.dtype != first.dtype:
            shape, stride = _joined_shape(ranks, of)
            break
    t = _torch.wrapper_tensor(LocalTensor, first, shape, stride, requires_grad)
    t._of, t.ranks = of, ranks
    return t


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every element, NaN being equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def difference(rank: int, a: torch.Tensor, other: int, b: torch.Tensor) -> str:
    """How the tensors of two ranks differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"rank {rank} has {a.dtype} {list(a.shape)}, rank {other} {b.dtype} {list(b.shape)}"
    unlike = ~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    at = tuple(unlike.nonzero()[0].tolist())
    return (
        f"in {int(unlike.sum())} of {a.numel()} elements, the first at {list(at)}: {a[at].item()} on rank {rank}, "
        f"{b[at].item()} on rank {other}"
    )


# ---- ops --------------------------------------------------------------------------------------


def run_op(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The op on every rank's own arguments; at least one of them must differ between ranks."""
    kind = _kind(op)
    if kwargs or kind is _OTHER:
        return _run_nested(op, args, kwargs)
    ranks, columns = None, []
    for arg in args:
        column = _column(arg)
        if column is None:
            return _run_nested(op, args, kwargs)
        if type(arg) is LocalTensor:
            ranks = arg.ranks if ranks is None else _common(ranks, arg.ranks, op)
        elif type(column) is not repeat:
            for x in arg:
                ranks = x.ranks if ranks is None else _common(ranks, x.ranks, op)
        columns.append(column)
    if ranks is None or (kind is _IN_PLACE and type(args[0]) is not LocalTensor):
        return _run_nested(op, args, kwargs)
    results = [op(*row) for row in zip(*columns)]  # noqa: B905  (repeat has no end)
    return args[0] if kind is _IN_PLACE else _joined(ranks, results)


_PURE, _IN_PLACE, _OTHER = "pure", "in place", "other"


@functools.cache
def _kind(op: Callable) -> str:
    """Whether an op only makes new tensors, writes its first argument alone, or does anything else."""
    written = _torch.written(op)
    if torch.Tag.inplace_view in op.tags or (written and not (_torch.writes_first(op) and len(written) == 1)):
        return _OTHER
    return _IN_PLACE if written else _PURE


def _column(arg: Any) -> Any:
    """What each rank gets for an argument, one after the other; None where that takes a closer look."""
    if type(arg) is LocalTensor:
        return arg._of
    if type(arg) in _PLAIN:
        return repeat(arg)
    if isinstance(arg, (list, tuple)):
        kinds = set(map(type, arg))
        if kinds <= _PLAIN:
            return repeat(arg)
        if kinds == {LocalTensor}:
            return list(zip(*(x._of for x in arg), strict=True))
    return None


_PLAIN = {int, float, bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None), torch.Tensor}


def _run_nested(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The same for arguments in lists, LocalInts, keyword arguments, and ops that write."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    ranks = _ranks_of(flat, op)
    if ranks is None:
        raise AssertionError(f"{op} was given nothing that differs between ranks")
    _refuse_reshaping(op)
    results = []
    for i, rank in enumerate(ranks):
        mine = [leaf._of[i] if type(leaf) is LocalTensor else pick(leaf, rank) for leaf in flat]
        if i == 0:
            _check_written(op, *pytree.tree_unflatten(flat, structure))
            first = mine
        own_args, own_kwargs = pytree.tree_unflatten(mine, structure)
        results.append(op(*own_args, **own_kwargs))
    # What an op wrote into and returns is the argument itself.
    known = {id(own): leaf for own, leaf in zip(first, flat, strict=True) if type(leaf) is LocalTensor}
    return _joined(ranks, results, known)


def _ranks_of(flat: Sequence[Any], op: Callable) -> Ranks | None:
    ranks = None
    for leaf in flat:
        if type(leaf) is LocalTensor:
            ranks = leaf.ranks if ranks is None else _common(ranks, leaf.ranks, op)
    for leaf in flat:
        of = values_of(leaf)
        if of is not None:
            if ranks is not None and not set(ranks) <= set(of):
                raise RuntimeError(f"{op}: a number of ranks {list(of)} meets a tensor of ranks {list(ranks)}")
            ranks = tuple(of) if ranks is None else ranks
    return ranks


def _common(a: Ranks, b: Ranks, op: object) -> Ranks:
    if a != b:
        raise RuntimeError(f"{op}: tensors of ranks {list(a)} and of ranks {list(b)} meet; use those of the same ranks")
    return a


def _joined(ranks: Ranks, results: list, known: Mapping[int, LocalTensor] | None = None) -> Any:
    """The results of all ranks as one."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        same_object = known.get(id(first)) if known else None
        return wrap(ranks, results) if same_object is None else same_object
    if isinstance(first, (list, tuple)):
        if any(len(result) != len(first) for result in results):
            lengths = local_int(dict(zip(ranks, map(len, results), strict=True)))
            raise RuntimeError(f"ranks get different numbers of results: {lengths}")
        parts = [_joined(ranks, list(column), known) for column in zip(*results, strict=True)]
        return type(first)(parts) if type(first) in (list, tuple) else type(first)(*parts)
    return joined_values(ranks, results)


def joined_values(ranks: Ranks, values: Sequence[Any]) -> Any:
    """What ranks got that is no tensor: a plain value where they agree."""
    if all(type(value) in (int, float, bool) for value in values):
        return local_int(dict(zip(ranks, values, strict=True)))
    first = values[0]
    if all(value is first or (type(value) is type(first) and value == first) for value in values):
        return first
    if all(isinstance(value, DeviceMesh) for value in values):
        return LocalMesh(dict(zip(ranks, values, strict=True)))
    return PerRank(dict(zip(ranks, values, strict=True)))


def _joined_shape(ranks: Ranks, of: Sequence[torch.Tensor]) -> tuple[list, list]:
    first = of[0]
    for rank, x in zip(ranks, of, strict=True):
        if x.dtype != first.dtype or x.ndim != first.ndim:
            raise RuntimeError(
                f"a tensor would be {first.dtype} of {first.ndim} dims on rank {ranks[0]} and {x.dtype} of {x.ndim} "
                f"dims on rank {rank}; ranks may differ in sizes only"
            )
    shapes, strides = ([getter(x) for x in of] for getter in (torch.Tensor.size, torch.Tensor.stride))
    return (
        [local_int(dict(zip(ranks, sizes, strict=True))) for sizes in zip(*shapes, strict=True)],
        [local_int(dict(zip(ranks, steps, strict=True))) for steps in zip(*strides, strict=True)],
    )


def _check_written(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """A plain tensor is one for all ranks: writing into it once a rank would mix them."""
    for name in _torch.written(op):
        i = _torch.argument_index(op, name)
        target = args[i] if i < len(args) else kwargs.get(name)
        if any(isinstance(x, torch.Tensor) and type(x) is not LocalTensor for x in pytree.tree_leaves(target)):
            raise RuntimeError(
                f"{op} writes what differs between ranks into a plain tensor, which is one for all of them. Make that "
                "tensor inside LocalTensorMode, or give each rank its own with spmd.sim.localize(tensor_or_module)."
            )


def _refuse_reshaping(op: Callable) -> None:
    if torch.Tag.inplace_view in op.tags:
        raise NotImplementedError(f"{op} changes a LocalTensor's shape in place; use the op that gives a new tensor")
