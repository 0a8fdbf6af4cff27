"""Run a function on one device and on the simulated ranks of a mesh, and name the first op that differs.

    >>> import torch, spmd
    >>> from spmd import Shard
    >>> mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> def layer(x, w):
    ...     return torch.relu(x @ w)
    >>> print(check(layer, torch.randn(5, 8), torch.randn(8, 6), mesh=mesh, backward=True,
    ...             placements={"x": {"dp": Shard(0)}, "w": {"tp": Shard(1)}}))
    check: ok, 12 results alike on dp 2 x tp 2

A report that is not ok reads

    check: op 3 differs, aten.relu.default at layer.py:12
      in      f32[5@dp, 6] +sum@tp
      out     f32[5@dp, 6] +sum@tp
      moves   none
      found   max abs 0.93, max rel 2.1 at [0, 4] on rank 0: 0.62 on one device, 1.55 distributed; ...

Both runs meet the same ops (`one_device.py`), and each result is put together from the blocks of the ranks without a
move (`compare.py`): so a wrong move is seen where it was made, and not where it was looked at. Numbers that an op
draws at random are not compared: the ranks go on with those of one device.

Left out: what a function closes over, which is taken as it is; ops inside of a decomposed op, which is compared as one;
redistributions written in the function, which show in the op that reads them.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spmd import _torch
from spmd.debug.compare import Gap, Tolerance, difference, take_over
from spmd.debug.one_device import UNSEEN, Done, Log, OneDevice, given, look
from spmd.debug.place import Given, placements_of, tensors_of
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import played_by
from spmd.sim import LocalTensorMode, localize
from spmd.sim.exchange import is_library
from spmd.sim.report import Report
from spmd.sim.varying import values_of
from spmd.tensor.call import Call
from spmd.tensor.dtensor import DTensor, distribute_tensor
from spmd.tensor.redistribute.plan import Plan, Step, steps_made

pytree = _torch.pytree


@dataclass(frozen=True)
class Difference:
    """Where the runs part.

    `kind`: "value", "shape", "error", or "parted" where the runs do not call the same ops. `number`: the how-manieth
    op it is, counted from 1; 0 for what comes before the first. `op`, `where`: the op and the user's line. `ins`,
    `outs`: specs. `moves`: the plans that were carried out for it. `gap`: how far values are apart. `what`: in words.
    """

    kind: str
    number: int
    op: str
    where: str
    what: str
    ins: tuple[str, ...] = ()
    outs: tuple[str, ...] = ()
    moves: tuple[Plan, ...] = ()
    gap: Gap | None = None

    def __str__(self) -> str:
        verb = {"error": "fails", "parted": "is another"}.get(self.kind, "differs")
        moves = [line for plan in self.moves for line in str(plan).splitlines()]
        rows = [("in", self.ins), ("out", self.outs), ("moves", moves or ["none"]), ("found", self.what.splitlines())]
        number, where = f"op {self.number} " if self.number else "", f" at {self.where}" if self.where else ""
        return "\n".join([f"{number}{verb}, {self.op}{where}", *(line for row in rows for line in _row(*row))])


@dataclass(frozen=True)
class Checked:
    """What `check` found. `ok`; `first`: the first difference; `ops`: how many were compared; `sent`: what was sent."""

    mesh: DeviceMesh
    ops: int
    first: Difference | None
    sent: Report

    @property
    def ok(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {n}" for name, n in zip(self.mesh.axis_names, self.mesh.shape, strict=True))
        return f"check: ok, {self.ops} results alike on {mesh}" if self.first is None else f"check: {self.first}"


def check(
    fn: Callable,
    *args: Any,
    mesh: DeviceMesh,
    placements: Any = None,
    backward: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    limit: int | None = None,
    **kwargs: Any,
) -> Checked:
    """Compare `fn(*args, **kwargs)` on one device with the same on the simulated ranks of the mesh, op by op.

    fn: a function or module for one device. Tensors among the arguments, in lists and dicts too, and the parameters
    and buffers of modules become DTensors; nothing that was given is changed.
    placements: where they lie, one of
        a list with a placement for each axis, or a dict by axis name: every tensor argument, not those of modules
        a list with one of these for each argument, or None
        a dict from patterns of names to these: "x", "batch.tokens", "*.weight". The names are those of the arguments
        and of the parameters of fn; of a module that is an argument, `model.0.weight`
    What is not named is replicated.
    backward: compare gradients too. Float arguments then require one, and outputs get fixed, uneven cotangents, for
    a plain sum has no gradient through a softmax.
    rtol, atol: as in torch.testing.assert_close, whose defaults by dtype they have.
    limit: keep and compare the results of that many ops only; every kept result is a copy in memory.

    A difference, or an error on the ranks, is reported and not raised. What fn raises on one device is raised.
    Plain tensors that fn makes itself may meet DTensors under `spmd.implicit_replication()`.
    """
    tensors = tensors_of(fn, args, kwargs)
    lying = placements_of(placements, tensors, len(args), mesh)
    log = Log(limit)

    def alone(x: Given) -> torch.Tensor:
        return OneDevice(x.tensor.detach().to(mesh.device_type, copy=True), log, _wants_grad(x, backward))

    with torch.random.fork_rng([]):
        want = _run(fn, args, kwargs, tensors, alone, backward)
    with torch.random.fork_rng([]), LocalTensorMode(mesh.ranks) as mode:
        watch = Watch(log, Tolerance(rtol, atol))

        def spread(x: Given, where: Sequence) -> torch.Tensor:
            placed = distribute_tensor(localize(x.tensor.detach()), mesh, where, src_data_rank=None)
            watch.compare_placed(x, placed)
            return placed.requires_grad_(_wants_grad(x, backward))

        places = dict(zip(map(id, tensors), lying, strict=True))
        with watch.watching():
            got = _run(fn, args, kwargs, tensors, lambda x: spread(x, places[id(x)]), backward, watch)
            watch.compare_end(want, got)
    return Checked(mesh, watch.count, watch.first, mode.report(mesh))


def _wants_grad(x: Given, backward: bool) -> bool:
    differentiable = x.tensor.is_floating_point() or x.tensor.is_complex()
    return x.tensor.requires_grad or (backward and differentiable and not x.in_module)


# ---- one run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a run gave, and by name the gradients of what it was given."""

    out: Any
    grads: dict[str, torch.Tensor | None]


def _run(
    fn: Callable, args: tuple, kwargs: dict, tensors: Sequence[Given], dress: Callable[[Given], torch.Tensor],
    backward: bool, mode: Any = None,
) -> Ran:  # fmt: skip
    """fn with other tensors in the places of those it was given, under a mode."""
    dressed = [_like(x.tensor, dress(x)) for x in tensors]
    memo = {id(x.tensor): y for x, y in zip(tensors, dressed, strict=True)}
    own_fn, own_args, own_kwargs = copy.deepcopy((fn, args, kwargs), memo)
    asked = {x.name: y for x, y in zip(tensors, dressed, strict=True) if y.requires_grad}
    if mode is None:
        return _called(own_fn, own_args, own_kwargs, asked if backward else {})
    with mode:
        return _called(own_fn, own_args, own_kwargs, asked if backward else {})


def _like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(y, x.requires_grad) if isinstance(x, torch.nn.Parameter) else y


def _called(fn: Callable, args: tuple, kwargs: dict, asked: dict[str, torch.Tensor]) -> Ran:
    out = fn(*args, **kwargs)
    ends = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not asked or not ends:
        return Ran(out, {})
    found = torch.autograd.grad(ends, list(asked.values()), [_cotangent(x) for x in ends], allow_unused=True)
    return Ran(out, dict(zip(asked, found, strict=True)))


def _cotangent(x: torch.Tensor) -> torch.Tensor:
    """Uneven numbers of about 1 in the likeness of x: on one device, or replicated."""
    plain = torch.arange(1, x.numel() + 1, dtype=torch.float64).cos().add(1.5).to(x.dtype).reshape(x.shape)
    if isinstance(x, OneDevice):
        return OneDevice(plain, x._log)
    return distribute_tensor(plain, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else plain


# ---- the run on ranks -------------------------------------------------------------------------


class Found(Exception):
    """A difference was found: the rest of the run would only repeat it."""


@dataclass(eq=False)
class Watch(_torch.TorchDispatchMode):
    """Compares what ops on DTensors give with what the same ops gave on one device."""

    log: Log
    tolerance: Tolerance
    first: Difference | None = None
    count: int = 0
    at: int = 0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.own = Log(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, what is raised is the first difference, unless one was found before."""
        with steps_made() as self.steps:
            try:
                yield
            except Found:
                pass
            except Exception as error:
                if self.first is None:
                    where = _raised_at(error)
                    self.first = Difference("error", self.at, "fn", where, _text(error), moves=self._moves())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op in UNSEEN or not any(issubclass(t, DTensor) for t in types):
            return op(*args, **kwargs)
        if self.first is not None:
            raise Found
        self.at += 1
        where = self.own.where()
        ins = _specs(pytree.tree_leaves((args, kwargs)))
        try:
            out = op(*args, **kwargs)
        except Exception as error:
            raise self._found("error", str(op), where, _text(error), ins) from error
        self._compare_op(op, where, ins, given(op, args, kwargs, out), Call(op, args, kwargs, ()).draws)
        self.steps.clear()
        return out

    def _compare_op(self, op: Callable, where: str, ins: tuple[str, ...], results: list, draws: bool) -> None:
        theirs = self.log.done[self.at - 1] if self.at <= len(self.log.done) else None
        looks = tuple(map(look, results))
        if theirs is None or (theirs.op, theirs.looks) != (str(op), looks):
            what = f"one device: {_doing(theirs)}\nranks:      {_doing(Done(str(op), where, (), looks))}"
            raise self._found("parted", str(op), where, what, ins, results)
        for want, x in zip(theirs.results, results, strict=True):
            if want is not None and draws:
                take_over(want, x)
            elif want is not None:
                self._compare(want, x, str(op), theirs.where, ins, results)

    def _compare(self, want: Any, x: Any, op: str, where: str, ins: tuple = (), results: Iterable = ()) -> None:
        self.count += 1
        with _torch.no_modes(), played_by(None):  # one at a time, by ranks' numbers
            apart = _apart(want, x, self.tolerance)
        if apart is not None:
            kind = "value" if isinstance(apart, Gap) else "shape"
            raise self._found(kind, op, where, str(apart), ins, results, apart if isinstance(apart, Gap) else None)

    def _found(self, kind: str, op: str, where: str, what: str, ins: tuple = (), results: Iterable = (),
               gap: Gap | None = None) -> Found:  # fmt: skip
        outs = _specs(results)
        self.first = Difference(kind, self.at, op, where, what, ins, outs, self._moves(), gap)
        return Found()

    def _moves(self) -> tuple[Plan, ...]:
        """The moves made since the last op, those of one tensor together."""
        chains: list[list[Step]] = []
        for step in self.steps:
            if chains and chains[-1][-1].after is step.before:
                chains[-1].append(step)
            else:
                chains.append([step])
        return tuple(Plan(chain[0].before, chain[-1].after, tuple(chain)) for chain in chains)

    # What is no op

    def compare_placed(self, x: Given, placed: DTensor) -> None:
        """A tensor that was just distributed."""
        self._compare(x.tensor.detach(), placed, f"distribute_tensor of {x.name or 'a tensor'}", "")
        self.steps.clear()

    def compare_end(self, want: Ran, got: Ran) -> None:
        """What the function returned, and the gradients; both runs have ended."""
        if self.first is not None:  # and fn caught it
            return
        if len(self.log.done) > self.at:
            what = f"one device: {_doing(self.log.done[self.at])}\nranks:      have ended"
            raise self._found("parted", self.log.done[self.at].op, self.log.done[self.at].where, what)
        self._compare_trees("the result", want.out, got.out)
        for name, grad in want.grads.items():
            self._compare_trees(f"the gradient of {name}", grad, got.grads.get(name))

    def _compare_trees(self, what: str, want: Any, got: Any) -> None:
        ours, shape = pytree.tree_flatten(want)
        theirs, other = pytree.tree_flatten(got)
        if shape != other:
            raise self._found("parted", what, "", f"one device: {shape}\nranks:      {other}")
        for a, b in zip(ours, theirs, strict=True):
            self._compare(a._whole.detach() if isinstance(a, OneDevice) else a, b, what, "")


def _apart(want: Any, x: Any, tolerance: Tolerance) -> Gap | str | None:
    """How what the ranks have differs from what one device has."""
    if isinstance(want, torch.Tensor) and isinstance(x, torch.Tensor):
        return difference(want, x, tolerance)
    of = values_of(x) or {0: x}
    unlike = {rank: value for rank, value in of.items() if not _same(want, value, tolerance)}
    if not unlike:
        return None
    rank, value = next(iter(unlike.items()))
    return f"{want!r} on one device, {value!r} distributed, on rank {rank}"


def _same(want: Any, value: Any, tolerance: Tolerance) -> bool:
    if not isinstance(want, (int, float, complex)) or not isinstance(value, (int, float, complex)):
        return type(want) is type(value) and (want is value or bool(want == value))
    a, b = torch.tensor(want), torch.tensor(value)
    rtol, atol = tolerance.of(torch.float32) if isinstance(want, (float, complex)) else (0.0, 0.0)
    return a.dtype == b.dtype and torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True).item()


# ---- words ------------------------------------------------------------------------------------


def _specs(values: Iterable) -> tuple[str, ...]:
    return tuple(str(x._spec) if isinstance(x, DTensor) else look(x) for x in values if isinstance(x, torch.Tensor))


def _doing(done: Done | None) -> str:
    return f"{done.op} at {done.where}, to {', '.join(done.looks) or 'nothing'}" if done else "has ended"


def _row(name: str, texts: Sequence[str]) -> list[str]:
    return [f"  {name if i == 0 else '':<7} {text}" for i, text in enumerate(texts)]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raised_at(error: BaseException) -> str:
    """The innermost line of the user's own that an error went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
