"""A plan: which modules of a model get which style, and which parameters lie where.

    {"layers.*.up": ColwiseParallel()}        modules by name pattern, each with a style
    {"layers.*.up.weight": Shard(0)}          parameters by name pattern, each with its placement
    model.tp_plan                             transformers' names of styles (`named_styles`)

Everything that a plan can get wrong is found here, before a model is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.heads import check_heads
from spmd.parallel.named_styles import with_styles
from spmd.parallel.style import ParallelStyle
from spmd.tensor.annotations.patterns import matches, matches_module, what_there_is
from spmd.tensor.eager.meta_models import Init
from spmd.tensor.placement import REPLICATE, Placement

Styled = Mapping[str, ParallelStyle]
Plan = ParallelStyle | Mapping[str, Any] | None

class ModelPlan(Mapping, ABC):
    """A plan that knows all that a model becomes, and does it; as a mapping it is placements of parameters.

    mesh: all axes that it is for.
    """

    mesh: DeviceMesh

    @abstractmethod
    def apply(self, model: nn.Module, *, init: Init = True) -> nn.Module:
        """Do it, in place, and return the model. init: as in `parallelize_module`."""


@dataclass(frozen=True)
class Parts:
    """What a plan says: of modules, by their names, and of parameters, by patterns."""

    styles: Styled
    params: Mapping[str, Any]


def parts(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> Parts:
    """The plan for this model, checked. ValueError, TypeError and NotImplementedError name the entry of the plan."""
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    if not isinstance(plan, Mapping):
        raise TypeError(f"parallelize_plan is {plan!r}; give a style, or a dict from names of modules to styles")
    modules = dict(module.named_modules())
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    styles: dict[str, ParallelStyle] = {}
    params: dict[str, Any] = {}
    for pattern, said in with_styles(module, plan).items():
        style = _style(pattern, said)
        if style is None:
            if not any(matches(pattern, name) for name in names):
                raise _nothing(pattern, "parameter", names)
            params[pattern] = said
            continue
        found = [name for name in modules if matches_module(pattern, name)]
        if not found:
            raise _nothing(pattern, "module", modules)
        if all(repr(styles.get(name, style)) != repr(style) for name in found):
            raise _too_late(pattern, style, found[0], styles[found[0]])
        for name in found:
            styles.setdefault(name, style)
    for name, style in styles.items():
        style.check(modules[name], name or type(module).__name__)
    _check_ties(module, styles)
    check_heads(modules, styles, mesh)
    return Parts(styles, params)


def _style(pattern: str, said: Any) -> ParallelStyle | None:
    """The style that an entry says; None for placements of parameters."""
    if isinstance(said, ParallelStyle):
        return said
    if isinstance(said, (Placement, Mapping, list, tuple)):
        return None
    raise TypeError(
        f"parallelize_plan {pattern!r}: {said!r} is no style; give one, such as ColwiseParallel(), or placements"
    )


def _nothing(pattern: str, what: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"parallelize_plan {pattern!r} matches no {what}. {what_there_is(pattern, names)}")


def _too_late(pattern: str, style: ParallelStyle, name: str, first: ParallelStyle) -> ValueError:
    return ValueError(
        f"parallelize_plan {pattern!r}: {name!r} has {first} already, and so each module that matches has its style by "
        f"an entry before this one; the first that matches counts. Put {pattern!r} first for {style}"
    )


def _check_ties(module: nn.Module, styles: Styled) -> None:
    """ValueError for a parameter with two names that would be placed in two ways."""
    told: dict[int, tuple[str, Placement]] = {}
    names = dict(module.named_modules())
    for name, style in styles.items():
        for key, placement in style.params(names[name]).items():
            p = names[name].get_parameter(key)
            at = _counted(placement, p.ndim)
            first = told.setdefault(id(p), (f"{name}.{key}", at))
            if first[1] != at:
                raise ValueError(
                    f"parallelize_plan: {first[0]} and {name}.{key} are one tensor, and the plan places it as "
                    f"{first[1]} and as {at}; give both modules styles that agree"
                )


def _counted(placement: Placement, ndim: int) -> Placement:
    return placement.at(placement.dim % ndim) if placement.is_shard() else REPLICATE
