"""compile: the user's door. A single-device train step in, a callable that runs it on a mesh out.

    step = spmd.compile(train_step, mesh,
                        params={"*.attn.[qkv].weight": {"tp": Shard(0)}},
                        inputs={"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}})
    loss = step(model, optimizer, tokens, targets)

A call finds the state in its arguments, places it on the mesh if it is not there yet, looks up the program for the
arguments it has (or captures, expands and binds it), runs it on this rank's blocks and puts the results back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from spmd._torch import pytree
from spmd.comm import agree, transport
from spmd.expand.bind import bind
from spmd.expand.capture import Argument, Captured, capture
from spmd.expand.expand import expand
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.placing import Patterns, check_patterns, placed_spec, placements_for, require_matches
from spmd.expand.program import Program
from spmd.expand.state import Slot, State, Tensors, named_leaves
from spmd.mesh import DeviceMesh
from spmd.tensor.cache import frozen
from spmd.tensor.dtensor import DTensor, distribute_tensor
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec, replicated


def compile(fn: Callable, mesh: DeviceMesh, *, params: Patterns | None = None, inputs: Patterns | None = None):
    """Make a single-device function run on a mesh, with the numbers of one device.

    fn: a function of modules, optimisers, tensors and plain values, such as a train step: forward, `loss.backward()`,
    `optimizer.step()`. It is traced on global shapes; Python in it runs at the first call only.
    params: placements of parameters by name pattern; those that no pattern matches replicate.
    inputs: placements of tensor arguments by argument name. The caller passes *global* tensors, equal on all ranks,
    or DTensors; sizes need not divide.

    Placements are given by axis name, `{"tp": Shard(0)}`, or as a list in mesh order.

    Returns a `CompiledStep`. Its first call turns the parameters, buffers and optimiser state into DTensors. Tensors
    that fn returns come back as DTensors.

    Raises ValueError for an unknown axis, at once; and at the first call, before anything is changed, for a pattern
    that matches nothing or a placement on a dim that a tensor has not.
    """
    if not callable(fn):
        raise TypeError(f"compile: {fn!r} is not callable; give the function to run, such as train_step")
    return CompiledStep(fn, mesh, params or {}, inputs or {})


class CompiledStep:
    """A function compiled for a mesh; `program` is what the last call ran."""

    def __init__(self, fn: Callable, mesh: DeviceMesh, params: Patterns, inputs: Patterns):
        self.fn, self.mesh = fn, mesh
        self._params = check_patterns(mesh, params, "params")
        self._inputs = check_patterns(mesh, inputs, "inputs")
        self._signature = inspect.signature(fn)
        self._bound: dict[tuple, list[_Bound]] = {}
        self._last: _Bound | None = None

    @property
    def program(self) -> Program:
        """The program that the last call ran: print it, list its collectives, price it."""
        if self._last is None:
            raise RuntimeError("no program yet: it is made at the first call, from the arguments it gets")
        return self._last.program

    @property
    def programs(self) -> list[Program]:
        """All programs made so far; a call with other shapes, or with new optimiser state, makes another."""
        return [b.program for bounds in self._bound.values() for b in bounds]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._named(args, kwargs)
        state = State.of(named)
        _place(state, self.mesh, self._params)
        tensors = state.tensors()
        leaves = self._leaves(named)
        numbers = state.numbers() | {path: x for path, x in leaves.items() if type(x) is float}
        bound = self._lookup(named, state, tensors, leaves, numbers)
        self._last = bound
        return bound.run(state, tensors, leaves, numbers)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def _call(self, named: dict[str, Any]) -> Any:
        bound = self._signature.bind_partial()
        bound.arguments.update(named)
        return self.fn(*bound.args, **bound.kwargs)

    def _leaves(self, named: dict[str, Any]) -> dict[str, Any]:
        """The plain arguments by path; tensors as DTensors."""
        leaves = {k: v for k, v in named_leaves(named) if not isinstance(v, (nn.Module, torch.optim.Optimizer))}
        require_matches(self._inputs, [k for k, v in leaves.items() if isinstance(v, torch.Tensor)], "inputs")
        return {k: self._placed_input(k, v) if isinstance(v, torch.Tensor) else v for k, v in leaves.items()}

    def _placed_input(self, path: str, x: torch.Tensor) -> DTensor:
        placements = placements_for(self._inputs, [path])
        if isinstance(x, DTensor):
            return x if placements is None else x.redistribute(self.mesh, placements)
        target = placed_spec(self.mesh, placements, x, path)
        return DTensor(plan(replicated(target), target).run(x.detach()), target)

    # ---- programs -----------------------------------------------------------------------------
    def _lookup(self, named, state: State, tensors: Tensors, leaves, numbers) -> _Bound:
        key = _key(state, tensors, leaves)
        for bound in self._bound.get(key, []):
            if bound.holds(numbers):
                return bound
        bound = self._build(named, state, tensors, leaves)
        self._bound.setdefault(key, []).append(bound)
        return bound

    def _build(self, named, state: State, tensors: Tensors, leaves) -> _Bound:
        """Capture, expand and bind; a rank that fails tells the others, and all compare what they made."""
        text, error = "", None
        try:
            given = _with_tensors(named, leaves)
            captured = capture(self.fn, given, self._call, state)
            program = _expanded(self.fn, self.mesh, captured, tensors, leaves)
            text = str(program)
        except Exception as e:
            error = e
        agree(text, self.mesh, f"the program of {getattr(self.fn, '__name__', 'the step')}", error)
        return _Bound.of(program, captured, self.mesh)


# ---- building ---------------------------------------------------------------------------------


def _key(state: State, tensors: Tensors, leaves: dict[str, Any]) -> tuple:
    """What a program depends on, but for the branches that numbers decide."""
    layout = tuple((slot, t._spec, t.requires_grad) for slot, t in tensors.items())
    arguments = tuple((path, _argument_key(x)) for path, x in leaves.items())
    return layout, arguments, frozen(state.constants())


def _argument_key(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x._spec, x.device, x.requires_grad
    return float if type(x) is float else frozen(x)


def _with_tensors(named: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    found, tree = pytree.tree_flatten(named)
    paths = [path for path, _ in named_leaves(named)]
    return pytree.tree_unflatten([leaves.get(path, x) for path, x in zip(paths, found, strict=True)], tree)


def _expanded(fn: Callable, mesh: DeviceMesh, captured: Captured, tensors: Tensors, leaves) -> Program:
    def given(i: Slot | Argument) -> Spec | None:
        x = tensors[i] if isinstance(i, Slot) else leaves.get(i.path)
        return x._spec if isinstance(x, DTensor) else None

    inputs = [(str(i), given(i)) for i in captured.inputs]
    names = [str(o) if isinstance(o, Slot) else f"result {o}" for o in captured.outputs]

    def output_spec(i: int, spec: Spec) -> Spec:
        slot = captured.outputs[i]
        home = tensors.get(slot) if isinstance(slot, Slot) else None
        if home is None and isinstance(slot, Slot) and slot.kind != "buffer":
            parameter = tensors[Slot("parameter", slot.path)]
            home = parameter if parameter.shape == spec.shape else None
        return _settled(spec) if home is None else spec.with_layout(home._spec.dims, home._spec.units)

    name = getattr(fn, "__name__", "step")
    return expand(
        name if name.isidentifier() else "step", mesh, captured.graph, captured.constants, inputs, names, output_spec
    )


def _settled(spec: Spec) -> Spec:
    """The same layout with all reductions done."""
    return spec.with_layout(spec.dims, spec.units)


# ---- placing ----------------------------------------------------------------------------------


def _place(state: State, mesh: DeviceMesh, patterns) -> None:
    """Put the state on the mesh, if it is not there. All placements are checked before anything is changed."""
    tensors = state.tensors()
    if all(isinstance(t, DTensor) for t in tensors.values()):
        return
    names = state.parameter_names()
    require_matches(patterns, [n for several in names.values() for n in several], "params")
    specs: dict[Slot, Spec] = {}
    for slot, t in tensors.items():
        specs[slot] = _home(slot, t, mesh, patterns, names, specs)
    state.install({slot: _distributed(slot, t, specs[slot]) for slot, t in tensors.items()})


def _home(slot: Slot, t: torch.Tensor, mesh, patterns, names, specs: dict[Slot, Spec]) -> Spec:
    """Where a tensor of the state belongs: what goes with a parameter lies as the parameter does."""
    parameter = specs.get(Slot("parameter", slot.path))
    if slot.kind in ("grad", "kept"):
        fits = parameter is not None and parameter.shape == tuple(t.shape)
        return placed_spec(mesh, parameter.placements if fits else None, t, str(slot))
    placements = placements_for(patterns, names[slot.path]) if slot.kind == "parameter" else None
    if placements is None and isinstance(t, DTensor):
        return t._spec
    return placed_spec(mesh, placements, t, str(slot))


def _distributed(slot: Slot, t: torch.Tensor, spec: Spec) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(t, DTensor):
            out = t if t._spec is spec else t.redistribute(spec.mesh, spec.placements)
        else:
            out = distribute_tensor(t.detach(), spec.mesh, spec.placements)
    return nn.Parameter(out, requires_grad=t.requires_grad) if slot.kind == "parameter" else out


# ---- running ----------------------------------------------------------------------------------


@dataclass
class _Bound:
    """A program bound to this rank, with where its inputs come from and its outputs go."""

    program: Program
    captured: Captured
    module: fx.GraphModule
    dropped: tuple[Slot, ...]
    _held: dict[tuple, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, captured: Captured, mesh: DeviceMesh) -> _Bound:
        module = bind(program, mesh.get_coordinate(), transport())
        slots = [i if isinstance(i, Slot) and i.kind != "grad" else None for i in captured.inputs]
        reuse_memory(module, owned=[slot is not None and slot in captured.outputs for slot in slots])
        unread = {n for n in module.graph.nodes if n.op == "placeholder" and not n.users}
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        dropped = tuple(
            i
            for i, n in zip(captured.inputs, placeholders, strict=True)
            if n in unread and isinstance(i, Slot) and i.kind == "grad"
        )
        return cls(program, captured, module, dropped)

    def holds(self, numbers: dict[str, float]) -> bool:
        """Whether the branches that the trace took on numbers are those it would take now."""
        key = tuple(numbers.values())
        if key not in self._held:
            self._held.clear()
            self._held[key] = self.captured.symbols.still_hold(numbers)
        return self._held[key]

    def run(self, state: State, tensors: Tensors, leaves: dict[str, Any], numbers: dict[str, float]) -> Any:
        """Run the program on this rank's blocks, and put back what it changed."""
        flat = [self._input(i, tensors, leaves, numbers) for i in self.captured.inputs]
        for slot in self.dropped:  # gradients of the step before, which nobody reads: free them now
            _parameter(tensors, slot).grad = None
        with torch.no_grad():
            out = self.module(*flat)
        del flat
        results: dict[int, Any] = {}
        new: Tensors = {}
        for where, value, (_, spec) in zip(self.captured.outputs, out, self.program.outputs, strict=True):
            wrapped = value if spec is None else self._put(where, value, spec, tensors)
            (new if isinstance(where, Slot) else results)[where] = wrapped
        self._settle_state(state, tensors, new)
        values = [results.get(i, leaf) for i, leaf in enumerate(self.captured.leaves)]
        return pytree.tree_unflatten(values, self.captured.tree)

    def _input(self, i: Slot | Argument, tensors: Tensors, leaves, numbers) -> Any:
        if i in self.dropped:
            return None
        if isinstance(i, Slot):
            return tensors[i]._local_tensor
        return numbers[i.path] if i.path in numbers else leaves[i.path]._local_tensor

    def _put(self, where: Slot | int, value: torch.Tensor, spec: Spec, tensors: Tensors) -> DTensor:
        """A result as a DTensor; what had a home is written into it."""
        home = tensors.get(where) if isinstance(where, Slot) and where.kind != "grad" else None
        if home is None:
            return DTensor(value, spec)
        if value is not home._local_tensor:
            home._local_tensor.copy_(value)
        return home

    def _settle_state(self, state: State, before: Tensors, new: Tensors) -> None:
        """Gradients are new tensors each step; state that appeared or went is installed."""
        kept = {s for s in new if s.kind == "kept"}
        if kept != {s for s in before if s.kind == "kept"}:
            state.install(new)
        for slot, t in before.items():
            if slot.kind == "parameter":
                t.grad = new.get(Slot("grad", slot.path))


def _parameter(tensors: Tensors, slot: Slot) -> torch.Tensor:
    return tensors[Slot("parameter", slot.path)]
