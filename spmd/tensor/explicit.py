"""Explicit mode: only what the user asks for is sent.

    with spmd.explicit():
        y = x + w                                          # error, if x and w lie so that one has to be moved
        y = x + w.redistribute(placements=x.placements)    # asked for

Without it an op moves its operands where it needs them. Inside, that is an `ImplicitCommunicationError` that says,
before anything is sent, what would move, how many bytes, and what to write. Asked for are `redistribute` and
`full_tensor` (and their gradients), `distribute_tensor`, `from_local(run_check=True)` and collectives. What moves
nothing between ranks, such as taking a shard of what is replicated, is no communication.

A gradient that is owed a reduction stays Partial in `.grad`; an optimiser that reads it would reduce it, so reduce it
before: `p.register_post_accumulate_grad_hook`, or `p.grad = p.grad.redistribute(placements=p.placements)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from spmd import _torch
from spmd.sim.exchange import caller
from spmd.tensor.redistribute.plan import Plan
from spmd.tensor.switch import Switch

_switch = Switch("explicit")


class ImplicitCommunicationError(RuntimeError):
    """An op would have to communicate, and `spmd.explicit()` is on."""

    part: str | None = None  # what was said of the op that is a part of the one that the user called

    def of(self, op: object) -> ImplicitCommunicationError:
        """The same, said of an op that is done by others here."""
        part = self.part or str(self)
        first, *moves, _ = part.splitlines()
        error = ImplicitCommunicationError("\n".join([
            f"{op} is done by other ops here, and {first}",
            *moves,
            f"Redistribute the operands of {op} before it, so that the dims are whole which it reduces, or let it pass "
            "with spmd.explicit(False).",
        ]))  # fmt: skip
        error.part = part
        return error


def explicit(on: bool = True) -> AbstractContextManager[None]:
    """Inside, in this thread and in the backward passes that it starts, implicit communication is an error.

    `explicit(False)` lets it pass again. Blocks nest; the innermost wins.

    >>> with explicit():
    ...     is_on()
    True
    """
    return _switch.turned(on)


def set_explicit(on: bool) -> None:
    """The same for all of the process, outside of `explicit` blocks, from now on."""
    _switch.set(on)


def is_on() -> bool:
    """Whether implicit communication is an error here."""
    return _switch.is_on()


def check(asked: object, moves: Sequence[tuple[str, Plan]]) -> None:
    """Raise ImplicitCommunicationError, where the mode is on, if one of these named operands has to be sent for it."""
    if is_on():
        sent = [(name, way.as_made) for name, way in moves if any(step.sends for step in way.steps)]
        if sent:
            raise ImplicitCommunicationError(_text(asked, sent))


def check_message(asked: str, why: str, instead: str) -> None:
    """The same for what is no move of a tensor: why something is sent, and what to write instead."""
    if is_on():
        raise ImplicitCommunicationError(f"{asked} at {caller()} would {why}, and spmd.explicit() is on. {instead}")


READS = {
    "aten._local_scalar_dense.default": "x.full_tensor().item()",
    "aten.equal.default": "torch.equal(a.full_tensor(), b.full_tensor())",
    "tolist": "x.full_tensor().tolist()",
}
"""What to write for what reads the values of a tensor."""


def _text(asked: object, sent: list[tuple[str, Plan]]) -> str:
    lines = [f"    {name}: {way.src} -> {way.dst}: {_moves(way)}" for name, way in sent]
    first, way = sent[0]
    write = f"{first}.redistribute(placements={list(way.dst.placements)})"
    if str(asked) in READS:
        write = READS[str(asked)]
    backward = (
        " This is in a backward pass: redistribute what the forward op reads or gives, or its gradient, with "
        "t.register_hook(lambda g: g.redistribute(placements=[...]))."
        if _torch.in_backward()
        else ""
    )
    return "\n".join([
        f"{asked} at {caller()} would communicate, and spmd.explicit() is on:",
        *lines,
        f"Write {write}, or let it pass with spmd.explicit(False).{backward}",
    ])  # fmt: skip


def _moves(way: Plan) -> str:
    sends = [step for step in way.steps if step.sends]
    return f"{', '.join(s.move.show(s.before, s.after) for s in sends)}, {sum(s.nbytes for s in sends):,} bytes a rank"
