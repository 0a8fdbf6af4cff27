"""Messages between simulated ranks: those that `dist.send` has sent and `dist.recv` has not yet received.

One thread plays all ranks, so a send never waits: the mailbox keeps its message until it is received. A receive may
start before its message is sent; it gets the message at the send. To wait for a receive whose message was not yet sent
is an error, because in a real job it would wait forever. A message that no rank has received when the simulation ends
is also an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spmd import _torch
from spmd.mesh import current_rank
from spmd.sim.exchange import Post, Ranks
from spmd.sim.local_int import local_int, values_of


@dataclass(eq=False)
class PendingReceive:
    """One rank's receive. src: the rank to receive from, None for any; `on_message` is called with the message."""

    rank: int
    group: Ranks
    src: int | None
    tag: int
    on_message: Callable[[Post], None]
    text: str
    message: Post | None = None

    def matches(self, post: Post) -> bool:
        """Whether this receive takes the posted message."""
        dst, tag = post.call.args
        wanted = self.src is None or self.src == post.rank
        return wanted and (self.rank, self.tag, self.group) == (dst, tag, post.group)

    def deliver(self, post: Post) -> None:
        """Receive the message."""
        self.message = post
        self.on_message(post)

    def __str__(self) -> str:
        return self.text


@dataclass
class Mailbox:
    """The messages that were sent and the receives that wait for one, in the order of their calls."""

    sent: list[Post] = field(default_factory=list)
    waiting: list[PendingReceive] = field(default_factory=list)

    def send(self, post: Post) -> None:
        """Deliver the message to the first receive that waits for it, or keep it."""
        pending = next((r for r in self.waiting if r.matches(post)), None)
        if pending is None:
            self.sent.append(post)
        else:
            self.waiting.remove(pending)
            pending.deliver(post)

    def receive(self, pending: PendingReceive) -> None:
        """Deliver the first message that matches, now or when it is sent."""
        post = next(filter(pending.matches, self.sent), None)
        if post is None:
            self.waiting.append(pending)
        else:
            self.sent = [other for other in self.sent if other is not post]
            pending.deliver(post)

    def missing_message(self, pending: PendingReceive) -> RuntimeError:
        """The error for a receive whose message was not sent; the receive is dropped."""
        self.waiting.remove(pending)
        others = [str(post) for post in self.sent if post.call.args[0] == pending.rank]
        more = f" What waits for rank {pending.rank}: {'; '.join(others)}." if others else ""
        return RuntimeError(
            f"{pending}, but no such message was sent; a real job would hang. One thread plays all ranks: send "
            f"first, or start with irecv and wait after the send.{more}"
        )

    def check_empty(self) -> None:
        """RuntimeError where a message was not received, or a receive got none."""
        if self.sent:
            raise RuntimeError(f"{self.sent[0]}, but it is never received; a real job would hang")
        if self.waiting:
            raise self.missing_message(self.waiting[0])


class ReceiveWork(_torch.FakeWork):
    """The work of a receive: done when all played ranks have their messages."""

    def __init__(self, receives: list[PendingReceive], mail: Mailbox) -> None:
        super().__init__()
        self.receives, self.mail = receives, mail

    def is_completed(self) -> bool:
        return all(r.message is not None for r in self.receives)

    def wait(self, timeout: object = None) -> bool:
        for pending in self.receives:
            if pending.message is None:
                raise self.mail.missing_message(pending)
        return True

    def _source_rank(self) -> int:
        self.wait()
        return join_numbers({r.rank: r.group.index(r.message.rank) for r in self.receives})

    source_rank = _source_rank


def join_numbers(by_rank: dict[int, int]) -> int:
    """The numbers of the ranks as one; the plain number in code that runs for one rank."""
    return local_int(by_rank) if values_of(current_rank()) is not None else next(iter(by_rank.values()))
