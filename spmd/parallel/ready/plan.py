"""ReadyPlan: what `plan_for` found, as a value. It says what it would do, and does it.

plan = plan_for(model, mesh)
print(plan)                      nothing has changed
model = plan.apply(model)        or parallelize_module(model, mesh, plan)

spmd.compile(train_step, mesh, params=plan, fully_shard=plan.fully_shard)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.data_parallel import data_parallel
from spmd.parallel.fully_sharded.fully_shard import fully_shard
from spmd.parallel.parallelize import parallelize_module
from spmd.parallel.plans import ModelPlan
from spmd.parallel.ready.sends import Send, together
from spmd.parallel.style import ParallelStyle
from spmd.tensor.eager.meta_models import Init
from spmd.tensor.eager.plain_tensors import ComparedReplication
from spmd.tensor.placement import Placement


@dataclass(frozen=True)
class ReadyPlan(ModelPlan):
    """What a model becomes on a mesh. As a mapping it is placements of parameters, as `spmd.compile(params=)` takes.

    title: the model in words. styles: for each axis, modules by name with their styles. params: for each parameter that
    is sharded to compute with, its placements by axis. data: "fully_shard" or "data_parallel", over `data_axes`;
    groups: the modules that are gathered one by one. experts: modules whose parameters are shared out over an axis of
    the data, so that other ranks' averages leave them alone; expert_axes: the axes of the data besides. sends: what a
    step sends, by formula. left: what stays whole, and why. notes: what else has to be known.
    """

    mesh: DeviceMesh
    title: str
    styles: Mapping[str, Mapping[str, ParallelStyle]]
    params: Mapping[str, Mapping[str, Placement]]
    data: str
    data_axes: tuple[str, ...]
    groups: tuple[str, ...]
    experts: tuple[str, ...]
    expert_axes: tuple[str, ...]
    sends: tuple[Send, ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    names: frozenset[str] = field(default=frozenset(), repr=False)

    # ---- as placements of parameters --------------------------------------------------------------
    def __getitem__(self, name: str) -> Mapping[str, Placement]:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    @property
    def fully_shard(self) -> tuple[str, ...] | None:
        """The axes for `spmd.compile(fully_shard=)`: of two axes of data the first has copies. None for copies."""
        return self.data_axes[-1:] or None if self.data == "fully_shard" else None

    # ---- eager ------------------------------------------------------------------------------------
    def apply(self, model: nn.Module, *, init: Init = True) -> nn.Module:
        """Do it, in place, and return the model. Call it before the optimiser is made.

        init: for parameters on the meta device that styles shard; False leaves them without numbers, for a checkpoint
        that is read next.

        ValueError, before anything is changed, for a model with other parameters than the one that it is for.
        """
        self._check(model)
        for axis, styles in self.styles.items():
            mesh = self._mesh(axis.split(","))
            parallelize_module(model, mesh if mesh.ndim == 1 else mesh.flatten(), styles, init=init)
        if self.data_axes and self.data == "data_parallel":
            data_parallel(model, self._mesh(self.data_axes))
        elif self.data_axes:
            self._fully_shard(model)
        _compare_plain_tensors(model)
        return model

    def _check(self, model: nn.Module) -> None:
        have = {name for name, _ in model.named_parameters()}
        if have != self.names:
            other = sorted(have ^ self.names)[:4]
            raise ValueError(
                f"this plan is for a {self.title}, and the model has other parameters: {', '.join(other)}; make one "
                "with plan_for(model, mesh)"
            )

    def _mesh(self, axes: Sequence[str]) -> DeviceMesh:
        return self.mesh[axes[0]] if len(axes) == 1 else self.mesh[tuple(axes)]

    def _fully_shard(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        alone = {p for name in self.experts for p in modules[name].parameters()}
        for name in self.experts if self.expert_axes else ():
            fully_shard(modules[name], mesh=self._mesh(self.expert_axes))
        over = self._mesh(self.data_axes)
        for name in (*self.groups, ""):
            fully_shard(modules[name], mesh=over, ignored_params=alone)

    # ---- text -------------------------------------------------------------------------------------
    def __str__(self):
        return "\n".join([self.title, *self._said_of_styles(), *self._said_of_data(), *self._said_of_sends(),
                          *self._said_of_left(), *(f"note: {note}" for note in self.notes)])  # fmt: skip

    def _said_of_styles(self) -> Iterator[str]:
        for axis, styles in self.styles.items():
            yield f"{axis}: by style"
            for pattern, (names, said) in _alike({n: _short(s) for n, s in styles.items()}).items():
                yield f"  {pattern:<40} {len(names):>3} x {said}"
        if self.params:
            yield "parameters in shards"
        for pattern, (names, said) in _alike({n: str(dict(p)) for n, p in self.params.items()}).items():
            yield f"  {pattern:<40} {len(names):>3} x {said}"

    def _said_of_data(self) -> Iterator[str]:
        if not self.data_axes:
            return
        axes = " and ".join(self.data_axes)
        yield f"{axes}: the batch, and parameters by {self.data}"
        for pattern, (names, _) in _alike(dict.fromkeys(self.groups, "")).items():
            yield f"  {pattern:<40} {len(names):>3} groups, and one of the rest"

    def _said_of_sends(self) -> Iterator[str]:
        sends = "in elements that a rank gives, with T tokens of a rank:" if self.sends else "in all: nothing"
        yield f"a step sends, {sends}"
        for send in together(self.sends):
            yield f"  {send.kind:<22} {send.axis:<6} {send.times:>4} x {send.formula:<16} {send.what}"

    def _said_of_left(self) -> Iterator[str]:
        if self.left:
            yield "left whole"
        for pattern, (names, why) in _alike(dict(self.left)).items():
            yield f"  {pattern:<40} {len(names):>3} x {why}"


def _alike(said: Mapping[str, str]) -> dict[str, tuple[list[str], str]]:
    """Names that differ in their first number alone, and of which the same is said, as one pattern."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in said.items():
        found.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1), text), []).append(name)
    out: dict[str, tuple[list[str], str]] = {}
    for (pattern, text), names in found.items():
        for key, group in ((pattern, names),) if pattern not in out and len(names) > 1 else ((n, [n]) for n in names):
            out[key] = group, text
    return out


def _short(style: ParallelStyle) -> str:
    """A style in a line: where it takes inputs, where it gives outputs, and what it hands out."""
    text = re.sub(r"input_layouts=(.*), output_layouts=(.*), use_local", r"\1 -> \2, use_local", f"{style}")
    return text.replace("use_local_output=False", "as DTensors").replace("use_local_output=True", "as blocks")


def _compare_plain_tensors(model: nn.Module) -> None:
    """Tensors that the model makes itself are replicated, by a rule that is checked; so are those of `generate`, which
    reorders caches between calls."""
    compared = ComparedReplication()
    model.register_forward_pre_hook(_Enter(compared), prepend=True)
    model.register_forward_hook(_Exit(compared), always_call=True)
    if callable(getattr(model, "generate", None)):
        model._between_calls = ComparedReplication()
        model.generate = MethodType(_generate, model)


def _generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of the model's class."""
    with model._between_calls:
        return type(model).generate(model, *args, **kwargs)


@dataclass(eq=False)
class _Enter:
    """A hook that can be copied with its model."""

    compared: ComparedReplication

    def __call__(self, *_: Any) -> None:
        self.compared.__enter__()


@dataclass(eq=False)
class _Exit:
    compared: ComparedReplication

    def __call__(self, *_: Any) -> None:
        self.compared.__exit__()
