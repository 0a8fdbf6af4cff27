"""A call is an op with specs in the place of its tensors. A lowering may depend on the call and on nothing else.

    aten.mm(x, w)  ->  Call(aten.mm.default, (f32[8, 16@tp], f32[16@tp, 4]), {}, (TensorMeta((8, 4), ...),))
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.spec import Spec

aten = torch.ops.aten
ASSERTS = {aten._assert_async.default, aten._assert_async.msg}
"""Ops that return nothing, and raise where a value is false."""

READS_VALUE = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, *ASSERTS}
"""Ops that return a Python value, or none: every rank needs the global tensor."""


@dataclass(frozen=True)
class TensorMeta:
    """Global shape, stride and dtype of one result; of a view also its place in the memory of the first operand."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = field(default=0, repr=False, compare=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorMeta:
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype, t.storage_offset())


class RuntimeScalar:
    """Stands in a call for a number that may differ in the next call, such as a learning rate."""

    def __repr__(self):
        return "scalar"


SCALAR = RuntimeScalar()


@functools.lru_cache(maxsize=4096)
def is_pointwise(op: _torch.OpOverload) -> bool:
    """Whether the op is pointwise: then its rule asks of a number only whether it is finite and not zero.

    torch leaves out the tag of some ops in place, such as `abs_` and `mish_`, and not that of the op they are made of.

    >>> is_pointwise(torch.ops.aten.abs_.default), is_pointwise(torch.ops.aten.cumsum_.default)
    (True, False)
    """
    tagged = op, _torch.out_of_place_variant(op)
    return any(torch.Tag.pointwise in each.tags for each in tagged if each is not None)


def as_runtime_scalar(op: _torch.OpOverload, x: Any) -> Any:
    """SCALAR in place of a number whose value no rule of the op reads, such as the step of an optimiser; else `x`.

    Rules of pointwise ops ask whether a number is zero, infinite or NaN, and nothing more.

    >>> as_runtime_scalar(torch.ops.aten.mul.Tensor, 0.1), as_runtime_scalar(torch.ops.aten.mul.Tensor, 0.0)
    (scalar, 0.0)
    >>> as_runtime_scalar(torch.ops.aten.sum.dim_IntList, 1)
    1
    """
    if type(x) is torch.SymFloat:  # torch.compile's: each question is a guard, and x - x would be none
        ordinary = is_pointwise(op) and x != 0 and abs(x) <= sys.float_info.max
        return SCALAR if ordinary else float(x)
    if not is_pointwise(op) or type(x) not in (int, float) or x == 0 or x - x != 0:
        return x
    return SCALAR


@dataclass(frozen=True, eq=False)
class Call:
    """An op, its arguments with a `Spec` for each tensor, and the metadata of its results on one device.

    outs: one `TensorMeta` for each result, None where the op returns no tensor.
    first_use: for each operand, the index of the first operand that is the same tensor: (0, 1, 1) for
    `addcmul(x, g, g)`, where one move serves both. Empty if all operands are different tensors.
    """

    op: _torch.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[TensorMeta | None, ...]
    first_use: tuple[int, ...] = ()

    @functools.cached_property
    def _bound(self) -> dict[str, Any]:
        schema = _torch.arguments(self.op)
        given = dict(zip((a.name for a in schema), self.args, strict=False)) | self.kwargs
        return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}

    def __getitem__(self, name: str) -> Any:
        """The argument of this name in the op's schema; its default, or None, where it was not given."""
        return self._bound.get(name)

    @functools.cached_property
    def tensors(self) -> tuple[Spec, ...]:
        """The operands in the order of the schema, lists flattened."""
        return tuple(spec for _, spec in self.named_tensors)

    @functools.cached_property
    def named_tensors(self) -> tuple[tuple[str, Spec], ...]:
        """The operands with the name of their argument; the tensors of a list share its name."""
        out = []
        for name, value in self._bound.items():
            items = value if isinstance(value, (list, tuple)) else (value,)
            out += [(name, x) for x in items if isinstance(x, Spec)]
        return tuple(out)

    @property
    def draws(self) -> bool:
        """Whether the call takes random numbers. A dropout with probability 0 does not."""
        if torch.Tag.nondeterministic_seeded not in self.op.tags and self.name not in UNTAGGED_DRAWS:
            return False
        chance = [self[a.name] for a in _torch.arguments(self.op) if a.name in ("p", "dropout_p")]
        return not any(isinstance(p, float) and p == 0 for p in chance)

    @property
    def makes_new(self) -> bool:
        """Whether the results are new tensors that depend on the operands alone.

        An empty result can then be made without a call of the op.
        """
        return not _torch.written(self.op) and not _torch.is_view(self.op) and not self.draws

    @property
    def mesh(self):
        return self.tensors[0].mesh

    @functools.cached_property
    def name(self) -> str:
        """The base name of the op: `aten.add_.Tensor`, `aten.add.out` and `aten.add.Tensor` are all `add`."""
        return base_name(self.op)


COMPUTED_AS_OUT = {"sum", "nansum", "prod", "cumsum", "cumprod"}
"""Ops that compute in the dtype of `out`, unless `dtype` is given. All other ops convert their result."""


UNTAGGED_DRAWS = {"binomial", "_sample_dirichlet"}
"""Ops that draw although torch does not tag them so."""


def base_name(op) -> str:
    """The name of an overload in the book. If the op is not aten's, its library's name comes first.

    >>> base_name(torch.ops.aten.add_.Tensor), base_name(torch.ops.aten._to_copy.default)
    ('add', '_to_copy')
    >>> base_name(torch.ops.prims.sin.default)  # another library's `sin` need not be aten's
    'prims::sin'
    """
    name = _torch.qualified_name(op).removeprefix("aten::")
    if name.endswith("_copy") and name not in ("_to_copy", "index_copy", "_copy"):
        return name[: -len("_copy")]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def dims_of(value, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument names, counted from the front; None and [] name all.

    >>> dims_of(-1, 3), dims_of([0, -1], 3), dims_of(None, 2)
    ((2,), (0, 2), (0, 1))

    IndexError for a dim that the tensor does not have, as torch's.
    """
    if value is None or value == [] or value == ():
        return tuple(range(ndim))
    values, least = value if isinstance(value, (list, tuple)) else (value,), max(ndim, 1)
    for d in values:
        if not -least <= d < least:
            allowed = f"[{-least}, {least - 1}]"
            raise IndexError(f"Dimension out of range (expected to be in range of {allowed}, but got {d})")
    return tuple(d % ndim for d in values) if ndim else ()
