"""Explicit mode: only communication that the user asks for is allowed.

    with spmd.explicit():
        y = x + w                                          # error, if one of x and w has to be moved
        y = x + w.redistribute(placements=x.placements)    # asked for

Without this mode an op moves its operands to where it needs them. In this mode that is an
`ImplicitCommunicationError`. It is raised before anything is sent, and says what would move, how many bytes, and what
to write. The user asks for communication by `redistribute` and `full_tensor` (their gradients are asked for, too),
`distribute_tensor`, `from_local(run_check=True)` and collectives. A step that sends nothing, such as taking a shard of
a replicated tensor, is no communication.

A gradient that owes a reduction stays Partial in `.grad`. An optimiser that reads it would reduce it, so reduce it
before: `p.register_post_accumulate_grad_hook`, or `p.grad = p.grad.redistribute(placements=p.placements)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from spmd import _torch
from spmd.comm.user_line import caller
from spmd.tensor.modes.switch import Switch

_switch = Switch("explicit")


class ImplicitCommunicationError(RuntimeError):
    """An op would have to communicate, and `spmd.explicit()` is on."""

    part: str | None = None  # the message about the inner op, if the op that the user called is made of several

    def of(self, op: object) -> ImplicitCommunicationError:
        """The same error for the op that the user called, which is made of other ops here."""
        part = self.part or str(self)
        first, *moves, _ = part.splitlines()
        error = ImplicitCommunicationError("\n".join([
            f"{op} is made of other ops here, and {first}",
            *moves,
            f"Redistribute the operands of {op} before it, so that the dims that it reduces are not sharded, or "
            "let it pass with spmd.explicit(False).",
        ]))  # fmt: skip
        error.part = part
        return error


def explicit(on: bool = True) -> AbstractContextManager[None]:
    """Inside the block, in this thread and in the backward passes that it starts, implicit communication is an error.

    `explicit(False)` allows it again. Blocks nest; the innermost counts.

    >>> with explicit():
    ...     is_on()
    True
    """
    return _switch.turned(on)


def set_explicit(on: bool) -> None:
    """Turn the mode on or off for the process from now on. Inside `explicit` blocks, the block counts."""
    _switch.set(on)


def is_on() -> bool:
    """Whether implicit communication is an error here."""
    return _switch.is_on()


def check(asked: object, moves: Sequence[tuple[str, Any]]) -> None:
    """Raise ImplicitCommunicationError if the mode is on and a plan sends. moves: names of operands and their plans."""
    if is_on():
        sent = [(name, plan.effective) for name, plan in moves if any(step.sends for step in plan.steps)]
        if sent:
            raise ImplicitCommunicationError(_text(asked, sent))


def check_message(asked: str, why: str, instead: str) -> None:
    """As `check`, for communication that is no plan: why something is sent, and what to write instead."""
    if is_on():
        raise ImplicitCommunicationError(f"{asked} at {caller()} would {why}, and spmd.explicit() is on. {instead}")


READS = {
    "aten._local_scalar_dense.default": "x.full_tensor().item()",
    "aten.equal.default": "torch.equal(a.full_tensor(), b.full_tensor())",
    "tolist": "x.full_tensor().tolist()",
}
"""What to write instead of an op that reads the values of a tensor."""


def _text(asked: object, sent: list[tuple[str, Any]]) -> str:
    lines = [f"    {name}: {plan.src} -> {plan.dst}: {_moves(plan)}" for name, plan in sent]
    first, plan = sent[0]
    write = f"{first}.redistribute(placements={list(plan.instead.placements)})"
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


def _moves(plan: Any) -> str:
    sends = [step for step in plan.steps if step.sends]
    return f"{', '.join(s.move.show(s.before, s.after) for s in sends)}, {sum(s.nbytes for s in sends):,} bytes a rank"
