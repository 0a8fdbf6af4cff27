"""What a program says about a module, a parameter or a line: values that print.

    print(step.program.explain("blocks.*.mlp.up"))

    blocks.*.mlp.up: 18.2 of 412.6 us, chosen by op
    forward   linear x2            f32[8@dp, 4, 16], f32[64@tp, 16] -> f32[8@dp, 4, 64@tp]
                                   work 0.1 us
    ...
    blocks.*.mlp.up, f32[8@dp, 4, 64@tp], stays so with
        placements={'blocks.*.mlp.up': {'dp': Shard(0), 'tp': Shard(2)}}
    next best: 31.0 us more in sum, the step 12.5 us longer, with
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


class Price(NamedTuple):
    """What a program costs. us: the sum of all moves and all work, before buckets. step: microseconds of a step as it
    runs, by the timeline. nbytes, collectives: what a rank sends, before buckets."""

    us: float
    step: float
    nbytes: int
    collectives: int

    def is_like(self, other: Price) -> bool:
        """Whether both are the same but for rounding."""
        return self[2:] == other[2:] and all(abs(a - b) < 1e-6 for a, b in zip(self[:2], other[:2], strict=True))


class Option(NamedTuple):
    """Another layout of a value, as the user would say it, and what the whole program would cost.

    said: the argument of `spmd.compile`, such as `placements={...}`. key, placements: the same as values. price: of the
    program with it. rise: by how much the sum of all costs would be more. longer: by how much a step would be longer,
    where what is sent and what is computed overlap.
    """

    said: str
    key: str
    placements: dict
    price: Price
    rise: float
    longer: float

    @property
    def worse(self) -> float:
        """The larger of the two: a choice takes only what costs less in sum and takes no longer."""
        return max(self.rise, self.longer)

    def __str__(self):
        rise = f"{abs(self.rise):,.1f} us {'more' if self.rise >= 0 else 'less'} in sum"
        longer = f"the step {abs(self.longer):,.1f} us {'longer' if self.longer >= 0 else 'shorter'}"
        return f"{rise}, {longer}, with\n    {self.said}"


class Alternative(NamedTuple):
    """What else a value could be.

    value: its name. spec: what it is. options: those on one axis, the best first; and the pin to where it lies, where
    that changes the program, as by a gradient that lies elsewhere. stays: the pin to where it lies, where nothing
    changes; None where there is none.
    """

    value: str
    spec: Spec
    options: tuple[Option, ...]
    stays: Option | None = None

    @property
    def next_best(self) -> Option:
        return self.options[0]

    def __str__(self):
        head = f"{self.value}, {self.spec}"
        if self.stays is None:
            return f"next best of {head}: {self.next_best}"
        return f"{head}, stays so with\n    {self.stays.said}\nnext best: {self.next_best}"


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
