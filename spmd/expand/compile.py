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
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spmd._torch import pytree
from spmd.comm import agree, transport
from spmd.expand.bind import bind
from spmd.expand.capture import Argument, Captured, Draws, capture
from spmd.expand.expand import expand
from spmd.expand.likeness import ambient, likeness
from spmd.expand.passes.bucket import bucket_all_reduces
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.passes.separate import separate_outputs
from spmd.expand.placing import Patterns, check_patterns, placed_spec, placements_for, require_matches
from spmd.expand.program import Program
from spmd.expand.state import Slot, State, Tensors, named_leaves
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor import deterministic, explicit, random
from spmd.tensor.dtensor import DTensor, distribute_tensor
from spmd.tensor.redistribute.between import between
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec, replicated


def compile(
    fn: Callable,
    mesh: DeviceMesh,
    *,
    params: Patterns | None = None,
    inputs: Patterns | None = None,
    bucket_mb: float | None = 25.0,
) -> CompiledStep:
    """Make a single-device function run on a mesh, with the numbers of one device.

    fn: a function of modules, optimisers, tensors and plain values, such as a train step: forward, `loss.backward()`,
    `optimizer.step()`. It is traced on global shapes; Python in it runs at the first call only.
    params: placements of parameters by name pattern; those that no pattern matches replicate.
    inputs: placements of tensor arguments by argument name. The caller passes *global* tensors, equal on all ranks,
    or DTensors; sizes need not divide.
    bucket_mb: all-reduces that can wait, such as those of gradients, are sent together up to so many megabytes; None
    sends each alone.

    Placements are given by axis name, `{"tp": Shard(0)}`, or as a list in mesh order.

    Returns a `CompiledStep`. Its first call turns the parameters, buffers and optimiser state into DTensors. Tensors
    that fn returns come back as DTensors.

    Raises ValueError for an unknown axis, at once; and at the first call, before anything is changed, for a pattern
    that matches nothing or a placement on a dim that a tensor has not.
    """
    if not callable(fn):
        raise TypeError(f"compile: {fn!r} is not callable; give the function to run, such as train_step")
    if bucket_mb is not None and bucket_mb < 0:
        raise ValueError(f"compile: bucket_mb is {bucket_mb}; give megabytes, or None for no buckets")
    return CompiledStep(fn, mesh, params or {}, inputs or {}, bucket_mb)


MOST_PROGRAMS = 64
"""How many programs a compiled step keeps."""


class CompiledStep:
    """A function compiled for a mesh; `program` is what the last call ran."""

    def __init__(self, fn: Callable, mesh: DeviceMesh, params: Patterns, inputs: Patterns, bucket_mb: float | None):
        self.fn, self.mesh, self.bucket_mb = fn, mesh, bucket_mb
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
        """All programs kept, the one used last at the end.

        A call with other shapes, or with new optimiser state, makes another.
        """
        return [b.program for bounds in self._bound.values() for b in bounds]

    def program_for(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments would run. Nothing is run, moved or sent, and no rank asked.

        It needs no process group: a mesh of any size can be planned on one machine.
        """
        return self._expanded(_Call.of(self._named(args, kwargs), self.mesh, self._params, self._inputs, first=True))[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, error = self._prepared(args, kwargs)
        bound = self._find(call) if call else None
        self._agree_to_run(bound, call, error)
        bound = bound or self._build(call)
        self._bound[call.key] = self._bound.pop(call.key)  # what was used last is forgotten last
        self._last = bound
        _check_explicit(self._what, bound.program)
        return bound.run(call.state, call.placed_state(self.mesh), call.placed_leaves(), call.numbers)

    def _prepared(self, args: tuple, kwargs: dict[str, Any]) -> tuple[_Call | None, Exception | None]:
        """What the call is about and where it all lies or shall lie, or why it cannot be; nothing is moved yet."""
        try:
            named = self._named(args, kwargs)
            return _Call.of(named, self.mesh, self._params, self._inputs, first=not self._bound), None
        except Exception as error:
            return None, error

    def _agree_to_run(self, bound: _Bound | None, call: _Call | None, error: Exception | None) -> None:
        """Every rank says which program it is about to run, and with which numbers; where they part, all raise.

        One small exchange a call: without it ranks that were called differently would wait for each other, or train
        apart.
        """
        what = f"the call of {getattr(self.fn, '__name__', 'the step')}"
        if error is not None:
            agree("", self.mesh, what, error)
        text = f"program: {bound.program.fingerprint if bound else 'to be made'}"
        text += _random_state(bound.captured) if bound else ""
        agree("\n".join([text, *(f"{path}: {value!r}" for path, value in call.numbers.items())]), self.mesh, what)

    @property
    def _what(self) -> str:
        return f"the program of {getattr(self.fn, '__name__', 'the step')}"

    def _find(self, call: _Call) -> _Bound | None:
        return next((b for b in self._bound.get(call.key, []) if b.holds(call.numbers)), None)

    def _build(self, call: _Call) -> _Bound:
        """Capture, expand and bind; a rank that fails tells the others, and all compare what they made."""
        text, error = "", None
        try:
            captured, program = self._expanded(call)
            text = str(program) + _random_state(captured)
        except Exception as e:
            error = e
        agree(text, self.mesh, self._what, error)
        bound = _Bound.of(program, captured, self.mesh)
        self._keep(call.key, bound)
        return bound

    def _keep(self, key: tuple, bound: _Bound) -> None:
        """Keep a program; of too many forget the one that was used longest ago, which is the same on all ranks."""
        if sum(map(len, self._bound.values())) >= MOST_PROGRAMS:
            oldest = next(iter(self._bound))
            self._bound[oldest].pop(0)
            if not self._bound[oldest]:
                del self._bound[oldest]
            warnings.warn(
                f"{self._what} is kept in {MOST_PROGRAMS} versions, and the oldest is forgotten. Each shape has one, "
                "and each value of an argument that is no tensor and no float: pass ints that count as such.",
                stacklevel=4,
            )
        self._bound.setdefault(key, []).append(bound)

    def _expanded(self, call: _Call) -> tuple[Captured, Program]:
        try:
            captured = capture(self.fn, call.named, self._run_plain, call.state, self.mesh)
        except AttributeError as error:
            raise _as_global(error) from error
        program = _expanded(self.fn, self.mesh, captured, call)
        if self.bucket_mb is not None:
            program = bucket_all_reduces(program, min(1.0, self.bucket_mb), self.bucket_mb)
        return captured, program

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def _run_plain(self, named: dict[str, Any]) -> Any:
        bound = self._signature.bind_partial()
        bound.arguments.update(named)
        return self.fn(*bound.args, **bound.kwargs)


def _as_global(error: AttributeError) -> AttributeError:
    """Says so where a method of DTensors was asked of a tensor that is traced."""
    if not isinstance(error.obj, torch.Tensor) or not hasattr(DTensor, str(error.name)):
        return error
    return AttributeError(
        f"tensors in a compiled step are global ones of torch, and have no {error.name}: say where arguments lie with "
        "inputs= and params=, and leave the rest to the compiler; move between meshes before the step or after it"
    )


def _check_explicit(what: str, program: Program) -> None:
    """A program that sends nothing may run in explicit mode: nobody wrote down what the others send."""
    if program.collectives:
        nbytes = sum(c.nbytes for c in program.collectives)
        explicit.check_message(
            what, f"send {len(program.collectives)} collectives, {nbytes:,} bytes a rank",
            "A compiled step places them itself: run it under spmd.explicit(False).",
        )  # fmt: skip


def _random_state(captured: Captured) -> str:
    """What ranks compare before they draw random numbers."""
    draws = any(isinstance(i, Draws) for i in captured.inputs)
    return f"\nrandom numbers: {random.get_rng_state()}" if draws else ""


# ---- one call ---------------------------------------------------------------------------------


@dataclass
class _Call:
    """A call: its arguments by name, the state and the plain arguments in them, and the specs of all tensors.

    Looking at a call changes nothing; `placed_state` and `placed_leaves` put things where their specs say.
    """

    named: dict[str, Any]
    state: State
    tensors: Tensors
    specs: dict[Slot, Spec]
    leaves: dict[str, Any]
    leaf_specs: dict[str, Spec]
    numbers: dict[str, float]
    key: tuple

    @classmethod
    def of(cls, named: dict[str, Any], mesh: DeviceMesh, params, inputs, first: bool) -> _Call:
        state = State.of(named)
        tensors = state.tensors()
        leaves = {k: v for k, v in named_leaves(named) if not isinstance(v, (nn.Module, torch.optim.Optimizer))}
        given = {k: v for k, v in leaves.items() if isinstance(v, torch.Tensor)}
        require_matches(inputs, list(given), "inputs")
        specs = _state_specs(state, tensors, mesh, params, first)
        leaf_specs = {k: _input_spec(k, v, mesh, placements_for(inputs, [k])) for k, v in given.items()}
        numbers = state.numbers() | {k: v for k, v in leaves.items() if isinstance(v, float)}
        tree = str(pytree.tree_structure(named))
        key = (tree, ambient(), deterministic.is_on(), *_key(state, tensors, specs, leaves, leaf_specs))
        return cls(named, state, tensors, specs, leaves, leaf_specs, numbers, key)

    def placed_state(self, mesh: DeviceMesh) -> Tensors:
        """The tensors of the state, on the mesh; the state is given those it needs to be."""
        if any(getattr(t, "_spec", None) is not self.specs[slot] for slot, t in self.tensors.items()):
            self.state.install({slot: _placed(slot, t, self.specs[slot]) for slot, t in self.tensors.items()})
            self.tensors = self.state.tensors()
        return self.tensors

    def placed_leaves(self) -> dict[str, Any]:
        """The plain arguments; of tensors this rank's blocks."""
        return {k: _block(v, self.leaf_specs[k]) if k in self.leaf_specs else v for k, v in self.leaves.items()}


def _key(state: State, tensors: Tensors, specs: dict[Slot, Spec], leaves: dict[str, Any], leaf_specs) -> tuple:
    """What a program depends on, but for the branches that numbers decide."""
    layout = tuple((slot, specs[slot], t.requires_grad) for slot, t in tensors.items())
    arguments = tuple(
        (k, (leaf_specs[k], v.device) if k in leaf_specs else float if isinstance(v, float) else likeness(v))
        for k, v in leaves.items()
    )
    return layout, arguments, tuple(state.constants().items())


# ---- where things lie -------------------------------------------------------------------------


def _state_specs(state: State, tensors: Tensors, mesh: DeviceMesh, patterns, first: bool) -> dict[Slot, Spec]:
    """Where every tensor of the state belongs: where it lies, once it was placed; else where the patterns say."""
    if not first and all(isinstance(t, DTensor) for t in tensors.values()):
        return {slot: t._spec for slot, t in tensors.items()}
    names = state.parameter_names()
    require_matches(patterns, [n for several in names.values() for n in several], "params")
    _check_memory(tensors)
    specs: dict[Slot, Spec] = {}
    for slot, t in tensors.items():
        _check_mesh(str(slot), t, mesh)
        specs[slot] = _home(slot, t, mesh, patterns, names, specs)
    return specs


def _home(slot: Slot, t: torch.Tensor, mesh, patterns, names, specs: dict[Slot, Spec]) -> Spec:
    """Where a tensor of the state belongs: what goes with a parameter lies as the parameter does."""
    if slot.kind in ("grad", "kept"):
        parameter = specs[Slot("parameter", slot.path)]
        if parameter.shape == tuple(t.shape):
            return parameter.with_tensor(t.shape, t.dtype)
    placements = placements_for(patterns, names[slot.path]) if slot.kind == "parameter" else None
    if placements is None and isinstance(t, DTensor):
        return _settled(t._spec)
    return placed_spec(mesh, placements, t, str(slot))


def _input_spec(path: str, x: torch.Tensor, mesh: DeviceMesh, placements) -> Spec:
    """Where an argument shall lie; one on another mesh of the step's ranks is brought to the step's."""
    elsewhere = isinstance(x, DTensor) and x._spec.mesh != mesh and set(x._spec.mesh.ranks) <= set(mesh.ranks)
    if not elsewhere:
        _check_mesh(path, x, mesh)
    if x.requires_grad:
        raise ValueError(
            f"argument {path} requires a gradient, which a compiled step would not leave in it: pass {path}.detach(), "
            "and take the gradient inside the step with torch.autograd.grad"
        )
    lies = placements is None and isinstance(x, DTensor) and not elsewhere
    return x._spec if lies else placed_spec(mesh, placements, x, path)


def _check_mesh(name: str, t: torch.Tensor, mesh: DeviceMesh) -> None:
    if isinstance(t, DTensor) and t._spec.mesh != mesh:
        raise ValueError(
            f"{name} lies on {t._spec.mesh!r}, but the step is compiled for {mesh!r}; use one mesh for both"
        )


@per_rank
def _check_memory(tensors: Tensors) -> None:
    """Tensors that share memory would be parted on the mesh: what is written into one would not show in the other."""
    plain = [(slot, t) for slot, t in tensors.items() if not isinstance(t, DTensor) and t.numel() and not t.is_meta]
    spans = sorted((t.device.type, t.data_ptr(), t.data_ptr() + _extent(t), str(slot)) for slot, t in plain)
    for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ValueError(f"{one} and {other} share memory; tie them by registering one tensor under both names")


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first element to behind the last."""
    return (sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _placed(slot: Slot, t: torch.Tensor, spec: Spec) -> torch.Tensor:
    with torch.no_grad():
        if not isinstance(t, DTensor):
            out = distribute_tensor(t.detach(), spec.mesh, spec.placements)
        else:
            out = t if t._spec is spec else DTensor(_block(t, spec), spec)
    return nn.Parameter(out, requires_grad=t.requires_grad) if slot.kind == "parameter" else out


def _block(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's block of a tensor: of a DTensor by moves, of a global one, the same on all ranks, by taking it."""
    x = x.detach()
    if isinstance(x, DTensor) and x._spec.mesh != spec.mesh:
        return between(x._local_tensor, x._spec, spec)
    if isinstance(x, DTensor):
        return plan(x._spec, spec).run(x._local_tensor)
    return plan(replicated(spec), spec).run(x.contiguous())


# ---- building ---------------------------------------------------------------------------------


def _expanded(fn: Callable, mesh: DeviceMesh, captured: Captured, call: _Call) -> Program:
    def given(i: Slot | Argument | Draws) -> Spec | None:
        if isinstance(i, Draws):
            return None
        return call.specs[i] if isinstance(i, Slot) else call.leaf_specs.get(i.path)

    inputs = [(str(i), given(i)) for i in captured.inputs]
    names = [str(o) if isinstance(o, Slot) else f"result {o}" for o in captured.outputs]

    def output_spec(i: int, spec: Spec) -> Spec:
        slot = captured.outputs[i]
        home = call.specs.get(slot) if isinstance(slot, Slot) else None
        if home is None and isinstance(slot, Slot) and slot.kind in ("grad", "kept"):
            parameter = call.specs[Slot("parameter", slot.path)]
            home = parameter if parameter.shape == spec.shape else None
        return _settled(spec) if home is None else spec.with_layout(home.dims, home.units)

    name = getattr(fn, "__name__", "step")
    gradients = [i for i, o in enumerate(captured.outputs) if isinstance(o, Slot) and o.kind == "grad"]
    return expand(
        name if name.isidentifier() else "step", mesh, captured.graph, captured.constants, inputs, names, output_spec,
        gradients,
    )  # fmt: skip


def _settled(spec: Spec) -> Spec:
    """The same layout with all reductions done."""
    return spec.with_layout(spec.dims, spec.units)


# ---- running ----------------------------------------------------------------------------------


@dataclass
class _Bound:
    """A program bound to this rank, with where its inputs come from and its outputs go."""

    program: Program
    captured: Captured
    module: Callable[..., Any]
    dropped: tuple[Slot, ...]
    _held: dict[tuple, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, captured: Captured, mesh: DeviceMesh) -> _Bound:
        slots = [i if isinstance(i, Slot) and i.kind != "grad" else None for i in captured.inputs]
        owned = [slot is not None and slot in captured.outputs for slot in slots]
        at = {i: k for k, i in enumerate(captured.inputs)}
        homes = [at.get(o) if isinstance(o, Slot) else None for o in captured.outputs]
        passes = (lambda graph: reuse_memory(graph, owned)), (lambda graph: separate_outputs(graph, homes))
        run = transport().bound(lambda: bind(program, mesh.get_coordinate(), transport(), passes))
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        unread = {n for n in placeholders if not n.users}
        dropped = tuple(
            i
            for i, n in zip(captured.inputs, placeholders, strict=True)
            if n in unread and isinstance(i, Slot) and i.kind == "grad"
        )
        return cls(program, captured, run, dropped)

    def holds(self, numbers: dict[str, float]) -> bool:
        """Whether the branches that the trace took on numbers are those it would take now."""
        key = tuple(numbers.values())
        if key not in self._held:
            self._held.clear()
            self._held[key] = self.captured.holds(numbers)
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

    def _input(self, i: Slot | Argument | Draws, tensors: Tensors, leaves, numbers) -> Any:
        if i in self.dropped:
            return None
        if isinstance(i, Draws):
            return random.take(self.program.mesh, i.count)
        if isinstance(i, Slot):
            return tensors[i]._local_tensor
        return numbers[i.path] if i.path in numbers else leaves[i.path]

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
