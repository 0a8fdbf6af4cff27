"""Room in the memory: how much more may be alive between two places of a program.

    room = Room([10, 40, 20], limit=50)
    room.has(0, 2, 10), room.has(2, 3, 30)      (True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np


class Room:
    """The bytes that are alive at each place, with what was put there since, below a limit.

    >>> room = Room([10, 40, 20], limit=50)
    >>> room.take(1, 3, 10)
    >>> room.has(0, 1, 40), room.has(0, 2, 1), room.has(2, 3, 20)
    (True, False, True)
    """

    def __init__(self, alive: Sequence[int] | np.ndarray, limit: float) -> None:
        self.alive, self.limit = np.array(alive, dtype=np.int64), limit

    @property
    def fullest(self) -> int:
        """The place where most is alive, the first of them; 0 if there is none."""
        return int(self.alive.argmax()) if len(self.alive) else 0

    def has(self, start: int, stop: int, nbytes: int) -> bool:
        """Whether so many bytes more can be alive from one place to before another."""
        if stop <= start or nbytes <= 0 or self.limit == inf:
            return True
        return int(self.alive[start:stop].max()) + nbytes <= self.limit

    def take(self, start: int, stop: int, nbytes: int) -> None:
        """Note that they are; or, of less than none, that they are not."""
        if nbytes and stop > start and self.limit < inf:
            self.alive[start:stop] += nbytes
