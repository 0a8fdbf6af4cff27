"""What is known of a choice for a program: its cost, that of the choice by op, and how far from the best it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Certificate:
    """What a choice for a program is worth, in modelled microseconds.

    us: the program. by_op: the program in which every op decided by itself. solved: the model's cost. at_least: what no
    assignment of the model is below. taken: whether the program has a choice; it is the solved one, or, where the step
    of that was longer than by op, one that is solved with other prices.
    """

    us: float
    by_op: float
    solved: float
    at_least: float
    taken: bool

    @property
    def gap(self) -> float:
        """How far from the best choice of the model the solved one may be at most, as a part of the best."""
        return (self.solved - self.at_least) / self.at_least if self.at_least > 0 else 0.0

    def __str__(self):
        what = "chosen for the program" if self.taken else "as by op"
        return f"{what}: {self.us:,.1f} us, by op {self.by_op:,.1f}; gap of the choice at most {self.gap:.2%}"
