"""What is known of a choice for a program: its cost, that of the choice by op, and how far from the best it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Certificate:
    """What a choice for a program is worth, in modelled microseconds.

    us: the program. by_op: the program in which every op decided by itself. solved: the model's cost. at_least: what no
    assignment of the model is below. taken: whether the program has a choice; it is the solved one, or one with other
    prices whose step is shorter. budget: the bytes a rank that the program had to keep to, where the first choice did
    not. within: what no assignment of the model is below that keeps to them where the programs that were tried need the
    most; none of them computes anything again.
    """

    us: float
    by_op: float
    solved: float
    at_least: float
    taken: bool
    budget: int | None = None
    within: float = 0.0

    @property
    def gap(self) -> float:
        """How far from the best choice of the model the solved one may be at most, as a part of the best."""
        return (self.solved - self.at_least) / self.at_least if self.at_least > 0 else 0.0

    def __str__(self):
        what = "chosen for the program" if self.taken else "as by op"
        text = f"{self.us:,.1f} us, by op {self.by_op:,.1f}; gap of the choice at most {self.gap:.2%}"
        if self.budget is None:
            return f"{what}: {text}"
        return f"{what}: {text}; within {self.budget:,} bytes at least {self.within:,.1f} with nothing freed"
