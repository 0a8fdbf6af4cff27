"""The memory that a rank needs while it runs a program: how much at most, when, and what is alive then.

    print(program.memory())

    4,194,304 bytes at most, at mm_3
      parameter        1,048,576
      optimizer        2,097,152
      activation         786,432   relu_1 524,288 at model.py:31, view_2 262,144 at model.py:32
      sent               262,144   all_gather_2 262,144 at model.py:31

The graph that the rank runs is replayed on tensors without data. A node's result is new memory, or a view of memory
that is there; memory is given back when the last node that shows it was read for the last time, as in the run. What
a collective sends is held until it has been waited for, on a device that runs behind its program; gloo does not hold
it. Inputs are held by the caller, all the time. What was copied to host memory does not count, where that is not the
device's. A draw of random numbers holds those of a few tiles for a moment ("workspace"). Left out is what kernels and
backends take for themselves.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.nodes import LINE, MADE_FOR, is_collective
from spmd.expand.passes.aliasing import is_loop, may_alias_operand
from spmd.tensor.call import READS_VALUE
from spmd.tensor.recipes.host import ON_HOST, arrived, from_host, on_host, to_host
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.stream import later


@dataclass(frozen=True)
class Alive:
    """Memory that is alive: the input or the node that made it, its kind, its bytes, and the user's line that made it.

    A line may be followed by "backward": autograd made it for an op of the line. Inputs have none. of: the node of the
    program that it was made for, by name; empty where a pass over the rank's code made it.
    """

    name: str
    kind: str
    nbytes: int
    line: str = ""
    of: str = ""

    def __str__(self):
        return f"{self.name} {self.nbytes:,}{f' at {self.line}' if self.line else ''}"


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in bytes.

    peak: the most at one time. at: the node that runs then. alive: what is alive then, the largest first. timeline:
    for each node the bytes while it runs.
    """

    peak: int
    at: str
    alive: tuple[Alive, ...]
    timeline: tuple[tuple[str, int], ...]

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes at the peak by kind: parameter, buffer, grad, optimizer, argument, activation, gathered, ..."""
        return _totals((each.kind, each.nbytes) for each in self.alive)

    @property
    def by_line(self) -> dict[str, int]:
        """The bytes at the peak by the user's lines that made them. Those of inputs are not among them."""
        return _totals((each.line, each.nbytes) for each in self.alive if each.line)

    def __str__(self):
        return "\n".join([f"{self.peak:,} bytes at most, at {self.at}", *map(self._line, self.by_kind)])

    def _line(self, kind: str) -> str:
        largest = [each for each in self.alive if each.kind == kind][:3]
        return f"  {kind:<12} {self.by_kind[kind]:>16,}   {', '.join(map(str, largest))}"


def _totals(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sums by name, the largest first."""
    found: Counter[str] = Counter()
    for name, nbytes in entries:
        found[name] += nbytes
    return dict(found.most_common())


def memory_of_run(
    module: fx.GraphModule,
    coordinate: tuple[int, ...],
    device: torch.device,
    inputs: Sequence[tuple[str, str]],
    host_is_apart: bool = False,
) -> Memory:
    """The memory of a run of the code that is bound for the rank at `coordinate`.

    Each tensor that a rank is given, or draws, says its spec in the node's `meta["spec"]`. inputs: of each placeholder
    the name and the kind. host_is_apart: whether host memory is another one than the device's.
    """
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    ledger = _Ledger()
    replay = _Replay(module.graph, coordinate, device, dict(zip(given, inputs, strict=True)), host_is_apart, ledger)
    with _torch.uncached_fake_mode(), torch.no_grad():
        timeline = tuple(replay.run())
    name, peak = max(timeline, key=lambda entry: entry[1], default=("nothing", 0))
    return Memory(peak, name, ledger.alive_at_peak, timeline)


NUMBER = 0.5
"""Stands for any number: no size depends on it."""

SETTLED = 2
"""How many rounds of a loop are replayed: the later ones have what the second has."""


@dataclass
class _Ledger:
    """The memory that is alive, by the identity of its storage. users: how many values show it. storages: keep
    identities apart while they are alive."""

    users: Counter[int] = field(default_factory=Counter)
    blocks: dict[int, Alive] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)
    now: int = 0
    most: int = 0
    alive_at_peak: tuple[Alive, ...] = ()

    def take(self, tensor: torch.Tensor, name: Callable[[], Alive]) -> int:
        """Count the memory of a tensor, if it was not there before. Returns its identity."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.blocks:
            self.storages[key], self.blocks[key] = storage, name()
            self.now += storage.nbytes()
        return key

    def hold(self, values: Any) -> list[int]:
        """Count values as shown once more. Returns what is to be released."""
        tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
        keys = [x.untyped_storage()._cdata for x in tensors]
        self.users.update(keys)
        return keys

    def release(self, keys: Iterable[int]) -> None:
        """Free what nobody else shows."""
        for key in keys:
            self.users[key] -= 1
            if not self.users[key]:
                self.now -= self.blocks.pop(key).nbytes
                del self.storages[key], self.users[key]

    def note_peak(self, held: list[Alive]) -> int:
        """The bytes that are alive with what is held for a moment."""
        now = self.now + sum(each.nbytes for each in held)
        if now > self.most:
            self.most = now
            self.alive_at_peak = tuple(sorted([*self.blocks.values(), *held], key=lambda each: -each.nbytes))
        return now


@dataclass
class _Replay:
    """Runs a graph on fake tensors and counts the memory that is alive. given: the values of the inputs; by default
    blocks of their specs. outputs: what the graph gives."""

    graph: fx.Graph
    at: tuple[int, ...]
    device: torch.device
    inputs: Mapping[fx.Node, tuple[str, str]]
    host_is_apart: bool
    ledger: _Ledger
    given: Mapping[fx.Node, Any] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    held: dict[fx.Node, set[int]] = field(default_factory=dict)
    outputs: Sequence[Any] = ()

    def run(self) -> Iterator[tuple[str, int]]:
        """Replay the run. Yields the name of each node and the bytes that are alive while it runs."""
        dying = _last_reads(self.graph, holds_operands=self.device.type != "cpu")
        for node in self.graph.nodes:
            if node.op == "output":
                self.outputs = fx.map_arg(node.args[0], self.values.__getitem__)
                return
            held = ()
            if is_loop(node):
                held = yield from self._loop(node)
            else:
                self.values[node] = self._result(node)
            self._take(node)
            self.ledger.release(held)
            if node.op.startswith("call"):
                yield node.name, self.ledger.note_peak(self._workspace(node))
            for dead in dying.get(node, ()):
                self._release(dead)

    def _loop(self, node: fx.Node) -> Iterator[tuple[str, int]]:
        """Replay the rounds of a loop. Returns what is held of them until its results are there."""
        loop, body = node.target.loop, node.target.module.graph
        inputs = body.find_nodes(op="placeholder")
        rounds = node.target.rounds(fx.map_arg(node.args, self.values.__getitem__))
        held, every, given = [], [], next(rounds)
        for number in range(loop.times):
            if number < SETTLED or loop.every:
                values = dict(zip(inputs, given, strict=True))
                replay = replace(self, graph=body, inputs={}, given=values, values={}, held={})
                yield from replay.run()
                self.ledger.release(held)
                held = self.ledger.hold(replay.outputs)
                every += self.ledger.hold(replay.outputs[loop.carried + loop.last :])
                for inner in list(replay.held):
                    replay._release(inner)
            try:
                given = rounds.send(replay.outputs)
            except StopIteration as end:
                self.values[node] = end.value
        return held + every

    def _result(self, node: fx.Node) -> Any:
        """A node's result without data."""
        if node.op == "placeholder":
            return self.given[node] if self.given else self._input(node)
        if node.op == "get_attr" or isinstance(node.target, Draw):
            return self._block(node)
        if node.target in READS_VALUE or node.target is later:
            return NUMBER
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        if node.target in (to_host, from_host):
            return torch.empty_like(args[0])
        if node.target in (on_host, arrived):
            return args[0]
        if node.target is _torch.c10d_functional.wait_tensor.default:  # the same memory
            return args[0]
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)

    def _input(self, node: fx.Node) -> Any:
        """A block, or a number. The old gradients are freed before the run, if nothing reads them."""
        if node.meta.get("spec") is None or (self.inputs[node][1] == "grad" and not node.users):
            return NUMBER
        return self._block(node)

    def _block(self, node: fx.Node) -> torch.Tensor:
        spec = node.meta["spec"]
        stride = spec.local_stride(self.at)
        return torch.empty_strided(spec.local_shape(self.at), stride, dtype=spec.dtype, device=self.device)

    def _take(self, node: fx.Node) -> None:
        """Count the memory of a new value that was not there before."""
        mine = self.held[node] = set()
        if node.target in ON_HOST and self.host_is_apart:
            return
        for tensor in pytree.tree_leaves(self.values[node]):
            if isinstance(tensor, torch.Tensor):
                mine.add(self.ledger.take(tensor, functools.partial(self._alive, node, tensor)))
        self.ledger.users.update(mine)

    def _alive(self, node: fx.Node, tensor: torch.Tensor) -> Alive:
        return Alive(*self._named(node), tensor.untyped_storage().nbytes(), *_notes(node))

    def _release(self, node: fx.Node) -> None:
        del self.values[node]
        self.ledger.release(self.held.pop(node))

    def _workspace(self, node: fx.Node) -> list[Alive]:
        """What the node holds while it runs, beside its operands and results."""
        if not isinstance(node.target, Draw):
            return []
        nbytes = node.target.workspace(*fx.map_arg(node.args, self.values.__getitem__))
        return [Alive(node.name, "workspace", nbytes, *_notes(node))]

    def _named(self, node: fx.Node) -> tuple[str, str]:
        """The name and the kind of memory that a node makes."""
        if node.op == "get_attr":
            return node.name, "constant"
        if node.target in ON_HOST:
            return node.name, "host"
        sent = is_collective(node) or _is_overwritten(node)
        return self.inputs.get(node) or (node.name, "sent" if sent else "activation")


def _notes(node: fx.Node) -> tuple[str, str]:
    """The user's line of a node, and the node of the program that it was made for."""
    return node.meta.get(LINE, ""), node.meta.get(MADE_FOR, "")


def _is_overwritten(node: fx.Node) -> bool:
    """Whether a collective writes its result into the memory of the node: what waits to be sent is sent memory, too."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if is_collective(user):
            return _torch.writes_first(user.target)
        if not may_alias_operand(user):
            return False
        node = user
    return False


def _last_reads(graph: fx.Graph, holds_operands: bool) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that are read there for the last time. Inputs and constants are held by the caller.

    holds_operands: whether what a collective sends is held until it has been waited for.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op.startswith("call"):
            readers = [node, *node.users]
            readers += [wait for user in node.users if holds_operands and is_collective(user) for wait in user.users]
            found.setdefault(max(readers, key=order.__getitem__), []).append(node)
    return found
