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

Both runs meet the same ops (`one_device.py`). Each result is compared block by block, without moves (`compare.py`): so
a wrong move is reported at the op that it was made for. Random numbers are not compared: the ranks continue with those
of one device.

Left out: tensors in the closure of a function, which are used as they are; the ops inside a decomposed op, which is
compared as one op; redistributions in the function, whose errors are reported at the op that reads the result.
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
from spmd.comm.user_line import is_library
from spmd.debug.compare import Gap, Tolerance, difference, overwrite
from spmd.debug.one_device import IGNORED, Log, OneDevice, OpRecord, metadata_text, results_of
from spmd.debug.place import NamedTensor, placements_of, tensors_of
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import simulated_by
from spmd.sim import LocalTensorMode, localize
from spmd.sim.local_int import values_of
from spmd.sim.report import Report
from spmd.tensor.call import Call
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from spmd.tensor.eager.view_copies import block
from spmd.tensor.redistribute.plan import Plan, Step, steps_made

pytree = _torch.pytree


@dataclass(frozen=True)
class Difference:
    """The first difference between the runs.

    kind: "value", "shape", "error", or "parted" if the runs do not call the same ops. number: the position of the op
    in the run, counted from 1; 0 before the first op. op, where: the op and the user's line. what: the difference in
    words. ins, outs: specs. moves: the plans that were carried out for the op. gap: the difference of the values.
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
        verb = {"error": "fails", "parted": "is a different op"}.get(self.kind, "differs")
        moves = [line for plan in self.moves for line in str(plan).splitlines()]
        rows = [("in", self.ins), ("out", self.outs), ("moves", moves or ["none"]), ("found", self.what.splitlines())]
        number, where = f"op {self.number} " if self.number else "", f" at {self.where}" if self.where else ""
        return "\n".join([f"{number}{verb}, {self.op}{where}", *(line for row in rows for line in _indented(*row))])


@dataclass(frozen=True)
class Checked:
    """The result of `check`. ops: how many results were compared; first: the first difference, or None; sent: what
    the ranks have sent.
    """

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
    """Compare `fn(*args, **kwargs)` on one device with the same call on the simulated ranks of the mesh, op by op.

    fn: a function or module for one device. The tensors among the arguments, also in lists and dicts, and the
    parameters and buffers of modules become DTensors; the originals are not changed.
    placements: the placements of these tensors, one of
        a list with a placement for each axis, or a dict by axis name: for every tensor argument, not for modules
        a list with one of these, or None, for each argument
        a dict from patterns of names to these: "x", "batch.tokens", "*.weight". The names are those of the arguments
        and of the parameters of fn; in a module that is an argument, `model.0.weight`
    A tensor that is not named is replicated.
    backward: compare gradients too. Float arguments then require a gradient. Outputs get fixed, uneven cotangents,
    because a plain sum has no gradient through a softmax.
    rtol, atol: as in torch.testing.assert_close, with its defaults by dtype.
    limit: keep and compare only the results of the first `limit` ops; every kept result is a copy in memory.

    A difference, or an error on the ranks, is reported and not raised. An error of fn on one device is raised. Plain
    tensors that fn makes itself may meet DTensors only under `spmd.implicit_replication()`.
    """
    tensors = tensors_of(fn, args, kwargs)
    placed = placements_of(placements, tensors, len(args), mesh)
    log = Log(limit)

    def on_one_device(x: NamedTensor) -> torch.Tensor:
        return OneDevice(x.tensor.detach().to(mesh.device_type, copy=True), log, _wants_grad(x, backward))

    with torch.random.fork_rng([]):
        want = _run(fn, args, kwargs, tensors, on_one_device, backward)
    with torch.random.fork_rng([]), LocalTensorMode(mesh.ranks) as mode:
        comparison = Comparison(log, Tolerance(rtol, atol))

        def distributed(x: NamedTensor, where: Sequence) -> torch.Tensor:
            y = distribute_tensor(localize(x.tensor.detach()), mesh, where, src_data_rank=None)
            comparison.compare_placed(x, y)
            return y.requires_grad_(_wants_grad(x, backward))

        places = dict(zip(map(id, tensors), placed, strict=True))
        with comparison.watching():
            got = _run(fn, args, kwargs, tensors, lambda x: distributed(x, places[id(x)]), backward, comparison)
            comparison.compare_end(want, got)
    return Checked(mesh, comparison.count, comparison.first, mode.report(mesh))


def _wants_grad(x: NamedTensor, backward: bool) -> bool:
    differentiable = x.tensor.is_floating_point() or x.tensor.is_complex()
    return x.tensor.requires_grad or (backward and differentiable and not x.in_module)


# ---- one run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResult:
    """The result of a run, and the gradients of its inputs by name."""

    out: Any
    grads: dict[str, torch.Tensor | None]


def _run(
    fn: Callable, args: tuple, kwargs: dict, tensors: Sequence[NamedTensor],
    convert: Callable[[NamedTensor], torch.Tensor], backward: bool, mode: Any = None,
) -> RunResult:  # fmt: skip
    """Run fn under a mode, with each tensor replaced by its converted copy."""
    converted = [_as_class_of(x.tensor, convert(x)) for x in tensors]
    memo = {id(x.tensor): y for x, y in zip(tensors, converted, strict=True)}
    fn_copy, args_copy, kwargs_copy = copy.deepcopy((fn, args, kwargs), memo)
    need_grad = {x.name: y for x, y in zip(tensors, converted, strict=True) if y.requires_grad}
    if mode is None:
        return _call(fn_copy, args_copy, kwargs_copy, need_grad if backward else {})
    with mode:
        return _call(fn_copy, args_copy, kwargs_copy, need_grad if backward else {})


def _as_class_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(y, x.requires_grad) if isinstance(x, torch.nn.Parameter) else y


def _call(fn: Callable, args: tuple, kwargs: dict, need_grad: dict[str, torch.Tensor]) -> RunResult:
    out = fn(*args, **kwargs)
    ends = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not need_grad or not ends:
        return RunResult(out, {})
    found = torch.autograd.grad(ends, list(need_grad.values()), [_cotangent(x) for x in ends], allow_unused=True)
    return RunResult(out, dict(zip(need_grad, found, strict=True)))


def _cotangent(x: torch.Tensor) -> torch.Tensor:
    """Uneven numbers of about 1 with the shape and class of x; for a DTensor, replicated."""
    plain = torch.arange(1, x.numel() + 1, dtype=torch.float64).cos().add(1.5).to(x.dtype).reshape(x.shape)
    if isinstance(x, OneDevice):
        return OneDevice(plain, x._log)
    return distribute_tensor(plain, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else plain


# ---- the run on ranks -------------------------------------------------------------------------


class EndOfRun(Exception):
    """Raised at the first difference, to end the run: all later results would differ too."""


@dataclass(eq=False)
class Comparison(_torch.TorchDispatchMode):
    """Compares the results of ops on DTensors with those of the same ops on one device."""

    log: Log
    tolerance: Tolerance
    first: Difference | None = None
    count: int = 0
    at: int = 0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.lines = Log(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, an error becomes the first difference, unless there is one already."""
        with steps_made() as self.steps:
            try:
                yield
            except EndOfRun:
                pass
            except Exception as error:
                if self.first is None:
                    where = _raised_at(error)
                    self.first = Difference("error", self.at, "fn", where, _error_text(error), moves=self._moves())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op in IGNORED or not any(issubclass(t, DTensor) for t in types):
            return _torch.run_with_bits(op, *args, **kwargs)
        if self.first is not None:
            raise EndOfRun
        self.at += 1
        where = self.lines.where()
        ins = _specs(pytree.tree_leaves((args, kwargs)))
        try:
            out = op(*args, **kwargs)
        except Exception as error:
            raise self._difference_found("error", str(op), where, _error_text(error), ins) from error
        self._compare_op(op, where, ins, results_of(op, args, kwargs, out), Call(op, args, kwargs, ()).draws)
        self.steps.clear()
        return out

    def _compare_op(self, op: Callable, where: str, ins: tuple[str, ...], results: list, draws: bool) -> None:
        expected = self.log.records[self.at - 1] if self.at <= len(self.log.records) else None
        metadata = tuple(map(metadata_text, results))
        if expected is None or (expected.op, expected.metadata) != (str(op), metadata):
            actual = OpRecord(str(op), where, (), metadata)
            what = f"one device: {_record_text(expected)}\nranks:      {_record_text(actual)}"
            raise self._difference_found("parted", str(op), where, what, ins, results)
        for want, x in zip(expected.results, results, strict=True):
            if want is not None and draws:
                overwrite(want, x)
            elif want is not None:
                self._compare(want, x, str(op), expected.where, ins, results)

    def _compare(self, want: Any, x: Any, op: str, where: str, ins: tuple = (), results: Iterable = ()) -> None:
        self.count += 1
        if isinstance(x, DTensor):
            block(x)  # brings a view that had to be copied up to date, on all ranks together
        with _torch.no_modes(), simulated_by(None):  # one at a time, by ranks' numbers
            found = _difference(want, x, self.tolerance)
        if found is not None:
            kind, gap = ("value", found) if isinstance(found, Gap) else ("shape", None)
            raise self._difference_found(kind, op, where, str(found), ins, results, gap)

    def _difference_found(
        self, kind: str, op: str, where: str, what: str, ins: tuple = (), results: Iterable = (), gap: Gap | None = None
    ) -> EndOfRun:
        outs = _specs(results)
        self.first = Difference(kind, self.at, op, where, what, ins, outs, self._moves(), gap)
        return EndOfRun()

    def _moves(self) -> tuple[Plan, ...]:
        """The plans carried out since the last op, made from its steps: steps of one tensor are chained into a plan."""
        chains: list[list[Step]] = []
        for step in self.steps:
            if chains and chains[-1][-1].after is step.before:
                chains[-1].append(step)
            else:
                chains.append([step])
        return tuple(Plan(chain[0].before, chain[-1].after, tuple(chain)) for chain in chains)

    # Arguments and results

    def compare_placed(self, x: NamedTensor, placed: DTensor) -> None:
        """Compare a tensor that was just distributed."""
        self._compare(x.tensor.detach(), placed, f"distribute_tensor of {x.name or 'a tensor'}", "")
        self.steps.clear()

    def compare_end(self, want: RunResult, got: RunResult) -> None:
        """Compare the return values and the gradients, after both runs have ended."""
        if self.first is not None:  # fn has caught the error that ends the run
            return
        if len(self.log.records) > self.at:
            what = f"one device: {_record_text(self.log.records[self.at])}\nranks:      have ended"
            record = self.log.records[self.at]
            raise self._difference_found("parted", record.op, record.where, what)
        self._compare_trees("the result", want.out, got.out)
        for name, grad in want.grads.items():
            self._compare_trees(f"the gradient of {name}", grad, got.grads.get(name))

    def _compare_trees(self, what: str, want: Any, got: Any) -> None:
        wants, shape = pytree.tree_flatten(want)
        gots, other = pytree.tree_flatten(got)
        if shape != other:
            raise self._difference_found("parted", what, "", f"one device: {shape}\nranks:      {other}")
        for a, b in zip(wants, gots, strict=True):
            self._compare(a._tensor.detach() if isinstance(a, OneDevice) else a, b, what, "")


def _difference(want: Any, x: Any, tolerance: Tolerance) -> Gap | str | None:
    """How a result of the ranks differs from that of one device. None if it does not."""
    if isinstance(want, torch.Tensor) and isinstance(x, torch.Tensor):
        return difference(want, x, tolerance)
    of = values_of(x) or {0: x}
    unlike = {rank: value for rank, value in of.items() if not _is_close(want, value, tolerance)}
    if not unlike:
        return None
    rank, value = next(iter(unlike.items()))
    return f"{want!r} on one device, {value!r} distributed, on rank {rank}"


def _is_close(want: Any, value: Any, tolerance: Tolerance) -> bool:
    if not isinstance(want, (int, float, complex)) or not isinstance(value, (int, float, complex)):
        return type(want) is type(value) and (want is value or bool(want == value))
    a, b = torch.tensor(want), torch.tensor(value)
    rtol, atol = tolerance.of(torch.float32) if isinstance(want, (float, complex)) else (0.0, 0.0)
    return a.dtype == b.dtype and torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True).item()


# ---- text -------------------------------------------------------------------------------------


def _specs(values: Iterable) -> tuple[str, ...]:
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    return tuple(str(x._spec) if isinstance(x, DTensor) else metadata_text(x) for x in tensors)


def _record_text(done: OpRecord | None) -> str:
    return f"{done.op} at {done.where}, to {', '.join(done.metadata) or 'nothing'}" if done else "has ended"


def _indented(name: str, texts: Sequence[str]) -> list[str]:
    return [f"  {name if i == 0 else '':<7} {text}" for i, text in enumerate(texts)]


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raised_at(error: BaseException) -> str:
    """The innermost line of user code in the traceback of an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
