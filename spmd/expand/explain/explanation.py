"""What a program says about a module, a parameter or a line: values that print.

    print(step.program.explain("blocks.*.mlp.up"))

    blocks.*.mlp.up: 18.2 of 412.6 us, chosen by op
    forward   linear x2            f32[8@dp, 4, 16], f32[64@tp, 16] -> f32[8@dp, 4, 64@tp]
                                   work 0.1 us
    ...
    next best of blocks.*.mlp.up, f32[8@dp, 4, 64@tp]: 31.0 us more, with
        placements={'blocks.*.mlp.up': {'dp': None, 'tp': Shard(1)}}
"""

from __future__ import annotations

from typing import NamedTuple

from spmd.tensor.spec import Spec


class Sent(NamedTuple):
    """Modelled microseconds of moves, and the bytes that a rank puts in."""

    us: float = 0.0
    nbytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.us + other.us, self.nbytes + other.nbytes)

    def __str__(self):
        return f"{self.us:,.1f} us, {self.nbytes:,} bytes"


class Explained(NamedTuple):
    """Equal ops of a program, each of which costs this.

    phase: forward, backward or update. times: how many there are. where: the modules, or else the lines, that they are
    from. operands, results: the specs with which they run. moves: what is moved for their operands; what is moved once
    for several readers counts for the first. work: microseconds of local work. owes: the reductions of their results.
    """

    op: str
    phase: str
    times: int
    where: tuple[str, ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    moves: Sent
    work: float
    owes: Sent

    @property
    def us(self) -> float:
        """Of all of them together."""
        return self.times * (self.moves.us + self.work + self.owes.us)

    def rows(self) -> tuple[str, ...]:
        """What each axis of the mesh does to the operands and the results: `tp: Replicate(), Shard(0) -> Shard(2)`."""
        mesh = (*self.operands, *self.results)[0].mesh
        sides = [", ".join(repr(spec.on(a)) for spec in side) for a in range(mesh.ndim) for side in self._sides]
        return tuple(f"{mesh.axis_name(a)}: {sides[2 * a]} -> {sides[2 * a + 1]}" for a in range(mesh.ndim))

    @property
    def _sides(self) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        return self.operands, self.results

    def __str__(self):
        head = f"{self.phase:<9} {self.op}{f' x{self.times}' if self.times > 1 else ''}"
        specs = [", ".join(map(str, side)) for side in self._sides]
        costs = [f"moves {self.moves}"] * bool(self.moves.us) + [f"work {self.work:,.1f} us"]
        costs += [f"owes {self.owes}"] * bool(self.owes.us)
        return f"{head:<30} {specs[0]} -> {specs[1]}\n{'':<30} {'; '.join(costs)}"


class Option(NamedTuple):
    """Another layout of a value, as the user would say it, and by how much the whole program would cost more.

    said: the argument of `spmd.compile`, such as `placements={...}`. key, placements: the same as values.
    """

    said: str
    key: str
    placements: dict
    rise: float


class Alternative(NamedTuple):
    """What else a value could be. value: its name. spec: what it is. options: those on one axis, the cheapest first."""

    value: str
    spec: Spec
    options: tuple[Option, ...]

    @property
    def next_best(self) -> Option:
        return self.options[0]

    def __str__(self):
        option = self.next_best
        by = f"{abs(option.rise):,.1f} us {'more' if option.rise >= 0 else 'less'}"
        return f"next best of {self.value}, {self.spec}: {by}, with\n    {option.said}"


class Explanation(NamedTuple):
    """Why a part of a program is as it is. `print` shows it.

    of: what was asked for. chosen: "by op" or "for the program". us: the modelled cost of the whole program. ops: what
    comes from there. alternatives: for the values that can be pinned, what each could be instead.
    """

    of: str
    chosen: str
    us: float
    ops: tuple[Explained, ...]
    alternatives: tuple[Alternative, ...]

    def __str__(self):
        head = f"{self.of}: {sum(op.us for op in self.ops):,.1f} of {self.us:,.1f} us, chosen {self.chosen}"
        return "\n".join(map(str, (head, *self.ops, *self.alternatives)))
