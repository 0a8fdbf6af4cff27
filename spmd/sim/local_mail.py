"""Messages from one simulated rank to another: what `dist.send` has sent and `dist.recv` has not yet received.

One thread plays all ranks, so a send never waits: its message lies here until the receiver asks. A receive that was
started before its message came gets it when it comes; one that is waited for before is an error, for on a real job it
would wait for ever. So is a message that nobody has received when the simulation ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spmd import _torch
from spmd.mesh import current_rank
from spmd.sim.exchange import Post, Ranks
from spmd.sim.varying import local_int, values_of


@dataclass(eq=False)
class Receipt:
    """One rank's receive. src: the rank it names, None for any; `take` is given the message's tensor."""

    rank: int
    group: Ranks
    src: int | None
    tag: int
    take: Callable[[Post], None]
    text: str
    message: Post | None = None

    def fits(self, post: Post) -> bool:
        """Whether it receives what was posted."""
        dst, tag = post.call.args
        wanted = self.src is None or self.src == post.rank
        return wanted and (self.rank, self.tag, self.group) == (dst, tag, post.group)

    def get(self, post: Post) -> None:
        """Receive it."""
        self.message = post
        self.take(post)

    def __str__(self) -> str:
        return self.text


@dataclass
class Mail:
    """The messages on their way and the receives that wait, in the order of their calls."""

    sent: list[Post] = field(default_factory=list)
    waiting: list[Receipt] = field(default_factory=list)

    def send(self, post: Post) -> None:
        """Give the message to the first that waits for it."""
        receipt = next((r for r in self.waiting if r.fits(post)), None)
        if receipt is None:
            self.sent.append(post)
        else:
            self.waiting.remove(receipt)
            receipt.get(post)

    def receive(self, receipt: Receipt) -> None:
        """Take the first message that fits, now or when it comes."""
        post = next(filter(receipt.fits, self.sent), None)
        if post is None:
            self.waiting.append(receipt)
        else:
            self.sent = [other for other in self.sent if other is not post]
            receipt.get(post)

    def give_up(self, receipt: Receipt) -> RuntimeError:
        """What to tell of a receive whose message has not come, and will not."""
        self.waiting.remove(receipt)
        others = [str(post) for post in self.sent if post.call.args[0] == receipt.rank]
        more = f" What waits for rank {receipt.rank}: {'; '.join(others)}." if others else ""
        return RuntimeError(
            f"{receipt}, but no such message was sent; a real job would hang. One thread plays all ranks: send "
            f"first, or start with irecv and wait after the send.{more}"
        )

    def check_empty(self) -> None:
        """RuntimeError where a message was not received, or a receive got none."""
        if self.sent:
            raise RuntimeError(f"{self.sent[0]}, but it is never received; a real job would hang")
        if self.waiting:
            raise self.give_up(self.waiting[0])


class Receiving(_torch.FakeWork):
    """The work of a receive: done when all ranks that the thread plays have their messages."""

    def __init__(self, receipts: list[Receipt], mail: Mail) -> None:
        super().__init__()
        self.receipts, self.mail = receipts, mail

    def is_completed(self) -> bool:
        return all(r.message is not None for r in self.receipts)

    def wait(self, timeout: object = None) -> bool:
        for receipt in self.receipts:
            if receipt.message is None:
                raise self.mail.give_up(receipt)
        return True

    def _source_rank(self) -> int:
        self.wait()
        return at_once({r.rank: r.group.index(r.message.rank) for r in self.receipts})

    source_rank = _source_rank


def at_once(of: dict[int, int]) -> int:
    """The number of each rank as one; that of the rank alone in code that plays one."""
    return local_int(of) if values_of(current_rank()) is not None else next(iter(of.values()))
