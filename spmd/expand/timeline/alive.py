"""How much is alive at each place of a program, read no further than is asked for.

    ..., reduce_scatter(g), adamw, adamw, ...     gradients are sent until here; updates make little and send nothing

Most nodes of a train step update its parameters, and a pass that sends gradients and parameters otherwise asks nothing
of that part but whether more is alive there than before. All that its nodes make answers that, in most programs, though
all of it were there at once: then it takes no replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import fx

from spmd import _torch
from spmd.expand.timeline.prices import Prices, Sending
from spmd.expand.timeline.work import Life, Lives, Reader, keeps_sent, made
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step

if TYPE_CHECKING:
    from spmd.expand.program import Program


LITTLE = 8
"""Of what a train step makes, seldom less than an eighth is alive at one time."""


class Alive(NamedTuple):
    """The bytes that are alive while each of the first nodes of a program runs; the most of all nodes, of those that
    `_Reading.most` has; and what the first nodes send."""

    nbytes: np.ndarray
    most: int
    sends: list[Sending | None]


def alive_until(program: Program, asked: Sequence[fx.Node]) -> Alive:
    """What is alive at the places up to the last of some nodes. It may be told further: while something is sent, there
    is more than will be."""
    reading = _Reading(program)
    sending = next((n for n in reversed(reading.nodes) if isinstance(n.target, (Step, Bucket))), reading.nodes[0])
    stop = 1 + max([reading.reader.places[node] for node in (sending, *asked)])
    reading.read(stop)
    nbytes = reading.alive() if reading.may_end else None
    if nbytes is None or nbytes[-1] > reading.most(nbytes[: reading.known]):
        reading.read(len(reading.nodes))
        nbytes = reading.alive()
    nbytes = nbytes[: reading.known]
    return Alive(nbytes, reading.most(nbytes), [life[4] for life in reading.lives])


def most_beside_inputs(program: Program) -> int:
    """The most bytes that are alive while a program runs, beside its inputs."""
    inputs = program.graph.find_nodes(op="placeholder")
    return alive_until(program, inputs[:1]).most - sum(map(made, inputs))


class _Reading:
    """A program, and what memory asks of its nodes as far as they were read."""

    def __init__(self, program: Program) -> None:
        self.reader, self.prices, self.keeps_sent = Reader(program), Prices(program.mesh), keeps_sent(program)
        self.nodes = self.reader.read(self.prices)
        self.held = self.reader.held(self.nodes)
        self.lives: list[Life] = []
        self.rest: list[Life] = []

    @property
    def known(self) -> int:
        """The place up to which nodes were read."""
        return len(self.lives)

    def read(self, stop: int) -> None:
        """Read on up to a place."""
        found = self.nodes[self.known : stop]
        self.reader.find_overwriting(found)
        self.lives += self.reader.lives(found, self.prices)
        self.rest = [self._rest()] if stop < len(self.nodes) else []

    @property
    def may_end(self) -> bool:
        """Whether it is worth a try not to read further: the rest makes little, beside what was made before."""
        return not self.rest or self.rest[0][2] * LITTLE < sum([life[2] for life in self.lives])

    def alive(self) -> np.ndarray:
        """The bytes that are alive while each node runs that was read; last what is alive at most while others do."""
        lives = Lives.of([*self.lives, *self.rest])
        return np.array(lives.alive(range(len(lives.makes)), self.held, self.keeps_sent), np.int64)

    def most(self, alive: np.ndarray) -> int:
        """The most bytes that are alive while one of the first nodes runs.

        An op of several results may be written as several, between which operands are freed: so what is alive beside it
        is at most what is said, and the most is looked for elsewhere.
        """
        nodes = self.nodes[: len(alive)]
        single = [type(node.meta.get("spec")) is not tuple or node.op == "output" for node in nodes]
        return int(alive[single].max(initial=0))

    def _rest(self) -> Life:
        """The nodes that were not read, as one task: all that they make is there at once, and all that comes to be put
        in order, beside all that they read."""
        places, known, rest = self.reader.places, self.known, self.nodes[self.known :]
        operands = dict.fromkeys([n for node in rest for n in _torch.operands_of(node)])
        waits = tuple(dict.fromkeys([self.reader.sent[n] for n in operands if n in self.reader.sent]))
        sent = [self.lives[at][4] for at in waits] + [self.prices.sending(node) for node in rest]
        makes = sum([made(node) for node in rest]) + sum([_buffers(each) for each in sent if each is not None])
        reads = tuple([places[n] for n in operands if places[n] < known])
        return reads, waits, makes, known, None, True, 0


def _buffers(sent: Sending) -> int:
    """All bytes that there may be of something that is sent beside its result."""
    return sent.packed + sent.joined + sent.terms
