"""Whether somebody has written to dicts, told by the numbers that they get with each change.

    quiet = Unwritten([vars(module), vars(other)])
    quiet.are_so()                # True: a look-up for each, however many attributes there are
    module.rate = 0.5
    quiet.are_so()                # False

torch's compiler reads these numbers. Those of Python before 3.12 are in the dict; later ones tell torch of each write.
The order of an OrderedDict is no part of the dict, and changes without one; and a dict of a class of its own may give
what is not in it.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from torch._C._dynamo.guards import dict_version as version_of


def dict_behind(box: Any) -> dict | None:
    """The dict of a class's attributes, or a dict itself; None for what has no number that tells all."""
    if type(box) is MappingProxyType:
        (box,) = gc.get_referents(box)
    return box if type(box) in (dict, defaultdict) else None


class Unwritten:
    """Dicts, and whether nobody has written to them since this was made."""

    def __init__(self, dicts: Iterable[dict]) -> None:
        self._dicts = list(dicts)
        self._versions = list(map(version_of, self._dicts))

    def are_so(self) -> bool:
        """Whether they are as they were."""
        return list(map(version_of, self._dicts)) == self._versions

    def written(self) -> list[dict]:
        """Those to which somebody has written."""
        return [x for x, before in zip(self._dicts, self._versions, strict=True) if version_of(x) != before]
