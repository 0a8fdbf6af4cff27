"""Mixed precision: parameters kept in one dtype, computed with in another, and gradients reduced in a third.

    w: f32[64@dp, 16]                     stored, and the optimiser's state
    _to_copy(w, bf16)                     bf16[64@dp, 16]: cast first,
    all_gather(...)                       bf16[64, 16]: then gathered
    gradient: bf16 -> f32 +sum@dp         reduced in the dtype for it, and added to what is kept

While a step is captured, the attributes of its modules give their parameters cast. `parameters()` and the optimiser see
those that are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.phases import mark


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a step, under the names of torch's `MixedPrecisionPolicy`, which does in its place.

    param_dtype: of parameters in forward and backward, None for the one that they are kept in. reduce_dtype: of
    gradients while they are reduced, None for the one that they are made in; it may be wider. output_dtype: of the
    results of the step's modules. cast_forward_inputs: whether tensors that these get are cast to param_dtype.

    >>> MixedPrecision(torch.bfloat16, torch.float32).reduce_dtype
    torch.float32
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    @classmethod
    def of(cls, policy: Any) -> MixedPrecision:
        """The same from any object with these attributes. TypeError for others; ValueError where sums would round."""
        names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        if not all(hasattr(policy, name) for name in names):
            raise TypeError(f"mixed_precision is {policy!r}; give spmd.MixedPrecision or torch's MixedPrecisionPolicy")
        found = cls(*(getattr(policy, name) for name in names))
        made, reduced = found.param_dtype, found.reduce_dtype
        if made and reduced and torch.promote_types(made, reduced) != reduced:
            raise ValueError(f"reduce_dtype is {reduced}, narrower than the {made} that gradients are made in")
        return found

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of this dtype is computed with."""
        return self.param_dtype if self.param_dtype and dtype.is_floating_point else dtype


class _Kept(torch.autograd.Function):
    """A parameter as its readers' gradients are added up: in the dtype in which they are reduced."""

    @staticmethod
    def forward(ctx, parameter, dtype, path):
        ctx.dtype, ctx.path = parameter.dtype, path
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx, gradient):
        return mark(gradient, ctx.path).to(ctx.dtype), None, None


class _Computed(torch.autograd.Function):
    """The same for one reader, in the dtype to compute with. cast: its value, where an earlier reader has made it."""

    @staticmethod
    def forward(ctx, kept, parameter, dtype, cast):
        ctx.dtype = kept.dtype
        return parameter.to(dtype) if cast is None else cast.view_as(cast)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype), None, None, None


class _CastParameters(dict):
    """The parameters of one module by name: whoever asks for one gets it cast, whoever lists them as they are kept."""

    def __init__(self, kept: dict, cast: _Casts):
        super().__init__(kept)
        self._cast = cast

    def __getitem__(self, name: str) -> torch.Tensor | None:
        return self._cast.of(super().__getitem__(name))


class _Casts:
    """The cast of each parameter, made once as long as the parameter is not written. paths: by identity.

    Each reader has its own gradient, which is cast before they are added: a sum of two in bfloat16, as of a table that
    reads and writes words, could be reduced before it is cast.
    """

    def __init__(self, precision: MixedPrecision, paths: dict[int, str]):
        self.precision, self.paths = precision, paths
        self.made: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        if parameter is None or self.precision.computed(parameter.dtype) == parameter.dtype:
            return parameter
        key = id(parameter), parameter._version, torch.is_grad_enabled()
        _, kept, cast = self.made.get(key, (None, None, None))  # a parameter is kept alive: its identity stays its own
        if kept is None:
            reduced = self.precision.reduce_dtype or self.precision.param_dtype
            kept = _Kept.apply(parameter, reduced, self.paths.get(id(parameter), ""))
        read = _Computed.apply(kept, parameter, self.precision.param_dtype, cast)
        self.made.setdefault(key, (parameter, kept, read))
        return read


@contextlib.contextmanager
def computed_in(
    precision: MixedPrecision | None, modules: Iterable[nn.Module], paths: dict[int, str] | None = None
) -> Iterator[None]:
    """Inside, the modules compute in this precision. paths: names for the gradients of parameters, by identity."""
    if precision is None:
        yield
        return
    roots, casts = list(modules), _Casts(precision, paths or {})
    kept = {id(m): (m, m._parameters) for root in roots for m in root.modules()}
    hooks = [hook for root in roots for hook in _hooks(root, precision)]
    try:
        for m, parameters in kept.values():
            m._parameters = _CastParameters(parameters, casts)
        yield
    finally:
        for m, parameters in kept.values():
            m._parameters = parameters
        for hook in hooks:
            hook.remove()


def _hooks(root: nn.Module, precision: MixedPrecision) -> Iterator[Any]:
    """Hooks that cast what a module gets and gives."""
    if precision.param_dtype is not None and precision.cast_forward_inputs:
        yield root.register_forward_pre_hook(
            lambda module, args, kwargs: _cast((args, kwargs), precision.param_dtype), with_kwargs=True
        )
    if precision.output_dtype is not None:
        yield root.register_forward_hook(lambda module, args, out: _cast(out, precision.output_dtype))


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    leaves, structure = pytree.tree_flatten(tree)
    return _torch.unflatten([x.to(dtype) if _is_float(x) else x for x in leaves], structure)


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
