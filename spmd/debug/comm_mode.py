"""CommDebugMode: counts what is sent, by collective, by op and by module, with the methods of torch's own mode.

    with spmd.debug.CommDebugMode() as comm:
        model(x).sum().backward()
    comm.get_total_counts()                            # 3
    comm.get_comm_counts()                             # {c10d_functional.all_reduce: 2, ...}
    print(comm.generate_comm_debug_tracing_table())

                                 forward                       backward
    Sequential                   all_reduce 1                  all_reduce 1
      weight f32[8, 8@tp]
      aten.linear.default(f32[4, 8@tp], f32[8, 8@tp]) at train.py:12: all_reduce 1, 128 bytes
    ...

It counts eager ops on DTensors, the collectives of `spmd.comm`, and compiled steps, forward and backward: those that
this rank launches, of simulated ranks the first one's. What ranks send to compare programs or shapes is not counted.
torch's own CommDebugMode does not see what an op on DTensors sends; there it is an error that names this one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.module_tracker import ModuleTracker

from spmd import _torch
from spmd.comm.listen import Launched, listening
from spmd.comm.user_line import caller
from spmd.mesh.rank import current_rank, rank_simulator
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.spec import Spec


class Counted(NamedTuple):
    """One collective.

    op: the op on DTensors that sent it, with the specs of its operands, as text; empty where no such op did. where: the
    user's line. modules: those that were running, by name; "Global" is always among them.
    """

    kind: str
    nbytes: int
    op: str
    where: str
    modules: frozenset[str]
    backward: bool

    @property
    def phase(self) -> str:
        return "backward" if self.backward else "forward"


class CommDebugMode:
    """Counts the collectives of the block; see the module. A new block begins at zero."""

    def __init__(self) -> None:
        self._tracker, self._stack = _Modules(), ExitStack()
        self.counted: list[Counted] = []

    def __enter__(self) -> CommDebugMode:
        simulator, me = rank_simulator(), current_rank()
        self._rank = me if simulator is None else simulator.ranks[0]
        self.counted, self._tracker = [], _Modules()
        self._stack.enter_context(self._tracker)
        self._stack.enter_context(listening(self._hear))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _hear(self, sent: Launched) -> None:
        if sent.rank == self._rank:
            tracker = self._tracker
            self.counted.append(
                Counted(sent.kind, sent.nbytes, _running_op(), caller(), frozenset(tracker.parents), tracker.is_bw)
            )

    # ---- counts -------------------------------------------------------------------------------
    def get_total_counts(self) -> int:
        """How many collectives were launched."""
        return len(self.counted)

    def get_comm_counts(self) -> dict[Any, int]:
        """How many of each kind, by torch's ops: {torch.ops.c10d_functional.all_reduce: 2}."""
        return {_torch.counted_name(kind): n for kind, n in Counter(each.kind for each in self.counted).items()}

    def get_op_counts(self) -> dict[str, dict[Any, int]]:
        """The same for each op on DTensors, with the specs of its operands; "" for collectives that no op sent."""
        return _by([(each.op, each.kind) for each in self.counted])

    def get_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """The same for each module, {name: {"forward": {op: 2}}}; a module counts what its submodules send, too."""
        phases = {(name, each.phase) for each in self.counted for name in each.modules}
        found: dict[str, dict[str, dict[Any, int]]] = {}
        for name, phase in sorted(phases):
            mine = [("", each.kind) for each in self.counted if name in each.modules and each.phase == phase]
            found.setdefault(name, {})[phase] = _by(mine)[""]
        return found

    # ---- parameters ---------------------------------------------------------------------------
    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that ran, by name."""
        return {name: parameters for name, parameters in self._tracker.parameters.items() if parameters}

    def get_sharding_info(self) -> dict[str, tuple]:
        """The placements of each parameter that is a DTensor: {"Linear.weight": (Shard(0), Replicate())}."""
        return {
            f"{name}.{key}": x.placements
            for name, parameters in self._tracker.parameters.items()
            for key, x in parameters.items()
            if isinstance(x, DTensor)
        }

    # ---- text ---------------------------------------------------------------------------------
    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The counts as text. noise_level: 0 the modules; 1 their parameters, too; 2 and more the ops that sent."""
        lines = [f"{'':<40} {'forward':<40} backward"]
        counts = self.get_module_counts()
        for name in ["Global", *self._tracker.parameters]:
            depth, of = ("  " * self._tracker.depth(name)), counts.get(name, {})
            columns = [_text(of.get(phase, {})) for phase in ("forward", "backward")]
            lines.append(f"{depth + name:<40} {columns[0]:<40} {columns[1]}".rstrip())
            if noise_level >= 1:
                for key, x in self._tracker.parameters.get(name, {}).items():
                    lines.append(f"{depth}  {key} {x._spec if isinstance(x, DTensor) else list(x.shape)}")
            if noise_level >= 2:
                lines += [f"{depth}  {line}" for line in self._sent_by(name)]
        return "\n".join(lines)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table into a file, without the escape codes of torch's."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def _sent_by(self, name: str) -> list[str]:
        """What the module sent itself, and no submodule: a line for each op, line of the user and phase."""
        mine = [each for each in self.counted if self._tracker.innermost(each.modules) == name]
        lines = []
        for op, where, phase in dict.fromkeys((each.op, each.where, each.phase) for each in mine):
            these = [each for each in mine if (each.op, each.where, each.phase) == (op, where, phase)]
            kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(each.kind for each in these).items())
            lines.append(f"{op or 'a collective'} at {where}, {phase}: {kinds}, {sum(e.nbytes for e in these):,} bytes")
        return lines

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(each.kind for each in self.counted).items())
        placed = "".join(f"\n  {name}: {list(placements)}" for name, placements in self.get_sharding_info().items())
        return f"CommDebugMode({self.get_total_counts()} collectives{': ' if kinds else ''}{kinds}){placed}"


def _by(pairs: list[tuple[str, str]]) -> dict[str, dict[Any, int]]:
    found: dict[str, dict[Any, int]] = {}
    for (name, kind), n in Counter(pairs).items():
        found.setdefault(name, {})[_torch.counted_name(kind)] = n
    return found


def _text(counts: dict[Any, int]) -> str:
    return ", ".join(f"{str(op).split('.')[-1]} {n}" for op, n in counts.items())


def _running_op() -> str:
    """The outermost op on DTensors that runs here, with the specs of its operands."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        if frame.f_code is DTensor.__torch_dispatch__.__func__.__code__:
            given = frame.f_locals
            specs = [x._spec for x in _torch.pytree.tree_leaves((given["args"], given["kwargs"])) if type(x) is DTensor]
            found = _op_text(given["op"], specs)
        frame = frame.f_back
    return found


def _op_text(op: Any, specs: list[Spec]) -> str:
    return f"{op}({', '.join(map(str, specs))})"


class _Modules(ModuleTracker):
    """The modules that run in this thread, by name, and the parameters of all that ran.

    torch's hooks of modules are the process's, and ranks may be threads: what another thread runs is not this one's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[str, dict[str, torch.Tensor]] = {}
        self._thread = get_ident()

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if get_ident() == self._thread:
            super()._fw_pre_hook(mod, self._hooked(input, self._get_pop_fn(self._get_mod_name(mod), True)))
            self.parameters.setdefault(self._get_mod_name(mod), dict(mod.named_parameters(recurse=False)))

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        if get_ident() == self._thread:
            super()._fw_post_hook(mod, input, self._hooked(output, self._get_append_fn(self._get_mod_name(mod), True)))

    def _hooked(self, values: Any, note: Callable[..., None]) -> list[torch.Tensor]:
        """Of the tensors among the values those that torch can wait for together, in any backward pass.

        `autograd.grad`, by which torch's pipelines take the gradients of a stage, raises where a hook of several
        tensors has a leaf. If there are only leaves, `note` is called at the first gradient of one.
        """
        with_gradient = [x for x in _torch.pytree.tree_leaves(values) if _has_gradient(x)]
        computed = [x for x in with_gradient if not x.is_leaf]
        if with_gradient and not computed:
            self._hooks.append(register_multi_grad_hook(with_gradient, note, mode="any"))
        return computed

    def depth(self, name: str) -> int:
        """How far inside the module is."""
        return 0 if name == "Global" else 1 + name.count(".")

    def innermost(self, names: frozenset[str]) -> str:
        """The innermost of modules that were running together."""
        return max(names, key=self.depth)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad
