"""LocalTensor: one real tensor for each of a set of ranks, which ops use as one tensor.

    >>> x = LocalTensor({0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])})
    >>> x * 2
    LocalTensor({0: tensor([2., 4.]), 1: tensor([6., 8.])})
    >>> (x - x).reconcile()
    tensor([0., 0.])

An op runs once for each rank, on that rank's tensors. A plain tensor is taken as the same on all ranks; so values that
differ cannot be written into it. Where shapes differ between ranks, the sizes that differ are `LocalInt`s.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.sim.local_int import PerRank, local_int, pick, values_of
from spmd.sim.local_mesh import LocalMesh

pytree = _torch.pytree
Ranks = tuple[int, ...]


class LocalTensor(torch.Tensor):
    """The tensors of several ranks as one. `local[rank]` is the tensor of a rank; `ranks` lists the ranks."""

    _locals: Sequence[torch.Tensor]
    ranks: Ranks

    @staticmethod
    def __new__(cls, of: Mapping[int, torch.Tensor], requires_grad: bool = False) -> LocalTensor:
        """of: the tensor of each rank; all have one dtype and one number of dims."""
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
        """Each rank's own tensor, without gradient history. A write into it changes this LocalTensor."""
        return dict(zip(self.ranks, self._locals, strict=True))

    def reconcile(self) -> torch.Tensor:
        """The tensor that all ranks have. ValueError if two ranks differ, and how; NaN is equal to NaN."""
        first = self._locals[0]
        for rank, x in zip(self.ranks[1:], self._locals[1:], strict=True):
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
        _common_ranks(self.ranks, other.ranks, "x.data = y")
        torch.Tensor.data.__set__(self, other)  # shape, strides and dtype
        self._locals = other._locals

    def data_ptr(self):
        return local_int(dict(zip(self.ranks, (x.data_ptr() for x in self._locals), strict=True)))

    def tolist(self):
        return _join_results(self.ranks, [x.tolist() for x in self._locals])

    def numpy(self, *, force: bool = False):
        return self.reconcile().numpy(force=force)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("deepcopy: a LocalTensor with a history, which no copy has; detach() it first")
        if id(self) not in memo:
            with _torch.no_modes():
                of = [copy.deepcopy(x, memo) if type(x) is torch.Tensor else x.clone() for x in self._locals]
            out = memo[id(self)] = wrap(self.ranks, of, self.requires_grad)
            out.__dict__.update(copy.deepcopy(self._attributes, memo))
            out.grad = None if isinstance(self, torch.nn.Parameter) else copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return rebuilt, (self.local, self.requires_grad, self._attributes)

    @property
    def _attributes(self) -> dict[str, Any]:
        """The attributes that the user set in Python, and torch: whether it is a parameter."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_locals", "ranks")}

    def __repr__(self, *, tensor_contents=None):
        return f"LocalTensor({self.local})"


def wrap(ranks: Ranks, of: Sequence[torch.Tensor], requires_grad: bool = False) -> LocalTensor:
    """A LocalTensor that holds these tensors without a copy."""
    first = of[0]
    shape, stride = first.shape, first.stride()
    for x in of:
        if x.shape != shape or x.dtype != first.dtype:
            shape, stride = _join_shapes(ranks, of)
            break
    bits = {(x.is_conj(), x.is_neg()) for x in of}
    if len(bits) > 1:
        of = [_torch.without_bits(x) for x in of]
    if torch.is_inference_mode_enabled() and not first.is_inference():  # a view of what was made outside, as in torch
        with torch.inference_mode(False):
            t = _torch.wrapper_tensor(LocalTensor, first, shape, stride, requires_grad)
    else:
        t = _torch.wrapper_tensor(LocalTensor, first, shape, stride, requires_grad)
    _torch.copy_bits(of[0], t)
    t._locals, t.ranks = of, ranks
    return t


def rebuilt(of: Mapping[int, torch.Tensor], requires_grad: bool, attributes: Mapping[str, Any]) -> LocalTensor:
    """The LocalTensor that was pickled. Inside LocalTensorMode each of its tensors was loaded once for each rank."""
    mine = {rank: x.local.get(rank, x._locals[0]) if type(x) is LocalTensor else x for rank, x in of.items()}
    out = LocalTensor(mine, requires_grad)
    out.__dict__.update(attributes)
    return out


torch.serialization.add_safe_globals([rebuilt])


def set_storage(x: LocalTensor, storages: Sequence[torch.UntypedStorage], *place: Any) -> LocalTensor:
    """`Tensor.set_`: give each rank's tensor a storage. place: offset, size and strides, as torch has them."""
    with _torch.no_modes():
        of = [mine.new_empty(0).set_(storage, *place) for mine, storage in zip(x._locals, storages, strict=True)]
        x.data = wrap(x.ranks, of)
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and all elements are equal; NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return (a.is_floating_point() or a.is_complex()) and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def difference(rank: int, a: torch.Tensor, other: int, b: torch.Tensor) -> str:
    """How the tensors of two ranks differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"rank {rank} has {a.dtype} {list(a.shape)}, rank {other} {b.dtype} {list(b.shape)}"
    differs = ~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    at = tuple(differs.nonzero()[0].tolist())
    return (
        f"in {int(differs.sum())} of {a.numel()} elements, the first at {list(at)}: {a[at].item()} on rank {rank}, "
        f"{b[at].item()} on rank {other}"
    )


# ---- ops --------------------------------------------------------------------------------------


def run_op(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Run the op on each rank's own arguments; at least one of them must differ between ranks."""
    effect = _effect(op)
    if kwargs or effect is _OTHER:
        return _run_general(op, args, kwargs)
    ranks, columns, of_complex = None, [], False
    for arg in args:
        column = _per_rank_values(arg)
        if column is None:
            return _run_general(op, args, kwargs)
        if type(arg) is LocalTensor:
            ranks = arg.ranks if ranks is None else _common_ranks(ranks, arg.ranks, op)
            of_complex = of_complex or arg.is_complex()
        elif type(column) is not repeat:
            for x in arg:
                ranks = x.ranks if ranks is None else _common_ranks(ranks, x.ranks, op)
                of_complex = of_complex or x.is_complex()
        columns.append(column)
    if ranks is None or (effect is _IN_PLACE and type(args[0]) is not LocalTensor):
        return _run_general(op, args, kwargs)
    local = functools.partial(_torch.run_with_bits, op) if of_complex else op
    results = [local(*row) for row in zip(*columns)]  # noqa: B905  (repeat has no end)
    return args[0] if effect is _IN_PLACE else _join_results(ranks, results)


_PURE, _IN_PLACE, _OTHER = "pure", "in place", "other"


@functools.cache
def _effect(op: Callable) -> str:
    """Whether an op only makes new tensors, only writes its first argument, or does anything else."""
    written = _torch.written(op)
    if torch.Tag.inplace_view in op.tags or (written and not (_torch.writes_first(op) and len(written) == 1)):
        return _OTHER
    return _IN_PLACE if written else _PURE


def _per_rank_values(arg: Any) -> Any:
    """The argument's values for the ranks, in order; None for an argument that `_run_general` must handle."""
    if type(arg) is LocalTensor:
        return arg._locals
    if type(arg) in _SAME_ON_ALL:
        return repeat(arg)
    if isinstance(arg, (list, tuple)):
        kinds = set(map(type, arg))
        if kinds <= _SAME_ON_ALL:
            return repeat(arg)
        if kinds == {LocalTensor}:
            return list(zip(*(x._locals for x in arg), strict=True))
    return None


_SAME_ON_ALL = {
    int, float, bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None), torch.Tensor,
}  # fmt: skip
"""Types of arguments that are the same on all ranks."""


def _run_general(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Run the op on each rank, for all cases: nested arguments, LocalInts, keyword arguments, and ops that write."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    ranks = _ranks_of(flat, op)
    if ranks is None:
        raise AssertionError(f"{op} was given nothing that differs between ranks")
    if torch.Tag.inplace_view in op.tags:
        return _run_in_place_view(op, ranks, args, kwargs)
    of_ranks = [
        [leaf._locals[i] if type(leaf) is LocalTensor else pick(leaf, rank) for leaf in flat]
        for i, rank in enumerate(ranks)
    ]
    first = of_ranks[0]
    if _writes_plain(op, args, kwargs):  # which all ranks share: once, if it is one value that is written
        if any(values_of(leaf) is not None or not _is_one_value(leaf) for leaf in flat):
            raise plain_tensor_error(op)
        own_args, own_kwargs = pytree.tree_unflatten(first, structure)
        return _torch.run_with_bits(op, *own_args, **own_kwargs)
    own = [pytree.tree_unflatten(mine, structure) for mine in of_ranks]
    results = [_torch.run_with_bits(op, *own_args, **own_kwargs) for own_args, own_kwargs in own]
    # An op that writes an argument and returns it must return the LocalTensor itself.
    known = {id(own): leaf for own, leaf in zip(first, flat, strict=True) if type(leaf) is LocalTensor}
    return _join_results(ranks, results, known)


def _run_in_place_view(op: Callable, ranks: Ranks, args: tuple, kwargs: Mapping[str, Any]) -> LocalTensor:
    """Run an op, such as `t_`, that gives its first argument another shape, on the same memory."""
    if _writes_plain(op, args, kwargs):
        raise plain_tensor_error(op)
    x, flat, structure = args[0], *pytree.tree_flatten(args[1:])
    mine = [torch.ops.aten.alias.default(local) for local in x._locals]  # another LocalTensor may have the same ones
    for i, rank in enumerate(ranks):
        rest = [leaf._locals[i] if type(leaf) is LocalTensor else pick(leaf, rank) for leaf in flat]
        op(mine[i], *pytree.tree_unflatten(rest, structure), **kwargs)
    torch.Tensor.data.__set__(x, wrap(ranks, mine))  # shape and strides
    x._locals = mine
    return x


def _ranks_of(flat: Sequence[Any], op: Callable) -> Ranks | None:
    ranks = None
    for leaf in flat:
        if type(leaf) is LocalTensor:
            ranks = leaf.ranks if ranks is None else _common_ranks(ranks, leaf.ranks, op)
    for leaf in flat:
        of = values_of(leaf)
        if of is not None:
            if ranks is not None and not set(ranks) <= set(of):
                raise RuntimeError(f"{op}: a number of ranks {list(of)} meets a tensor of ranks {list(ranks)}")
            ranks = tuple(of) if ranks is None else ranks
    return ranks


def _common_ranks(a: Ranks, b: Ranks, op: object) -> Ranks:
    if a != b:
        raise RuntimeError(f"{op}: tensors of ranks {list(a)} and of ranks {list(b)} meet; use those of the same ranks")
    return a


def _join_results(ranks: Ranks, results: list, known: Mapping[int, LocalTensor] | None = None) -> Any:
    """The results of all ranks as one value."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        same_object = known.get(id(first)) if known else None
        return wrap(ranks, results) if same_object is None else same_object
    if isinstance(first, (list, tuple)):
        if any(len(result) != len(first) for result in results):
            lengths = local_int(dict(zip(ranks, map(len, results), strict=True)))
            raise RuntimeError(f"ranks get different numbers of results: {lengths}")
        parts = [_join_results(ranks, list(column), known) for column in zip(*results, strict=True)]
        return type(first)(parts) if type(first) in (list, tuple) else type(first)(*parts)
    return join_values(ranks, results)


def join_values(ranks: Ranks, values: Sequence[Any]) -> Any:
    """Values of the ranks, which are not tensors, as one: a plain value where they are equal."""
    if all(type(value) in (int, float, bool) for value in values):
        return local_int(dict(zip(ranks, values, strict=True)))
    first = values[0]
    if all(value is first or (type(value) is type(first) and value == first) for value in values):
        return first
    if all(isinstance(value, DeviceMesh) for value in values):
        return LocalMesh(dict(zip(ranks, values, strict=True)))
    return PerRank(dict(zip(ranks, values, strict=True)))


def _join_shapes(ranks: Ranks, of: Sequence[torch.Tensor]) -> tuple[list, list]:
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


def _writes_plain(op: Callable, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether the op writes a plain tensor: all ranks share it, so each rank would overwrite the others."""
    for name in _torch.written(op):
        i = _torch.argument_index(op, name)
        target = args[i] if i < len(args) else kwargs.get(name)
        if any(isinstance(x, torch.Tensor) and type(x) is not LocalTensor for x in pytree.tree_leaves(target)):
            return True
    return False


def _is_one_value(x: Any) -> bool:
    """Whether a LocalTensor, such as a number that was made a tensor, has the same bits on all ranks."""
    if type(x) is not LocalTensor:
        return True
    first, *others = [(each.shape, each.contiguous().view(-1).view(torch.uint8)) for each in x._locals]
    return all(shape == first[0] and torch.equal(bits, first[1]) for shape, bits in others)


def plain_tensor_error(what: object) -> RuntimeError:
    """The error for an op or a collective that would write different values of the ranks into a plain tensor."""
    return RuntimeError(
        f"{what} writes what differs between ranks into a plain tensor, which is one for all of them. Make that tensor "
        "inside LocalTensorMode, or give each rank its own with spmd.sim.localize(tensor_or_module)."
    )
