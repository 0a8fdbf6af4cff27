"""Tools for finding what went wrong.

`check` runs a function on one device and on the simulated ranks of a mesh, and names the first op whose results differ.
`check_equal` compares between ranks what must be equal on them. `fallbacks` lists the ops that ran on replicated
tensors because no rule knows them; `on_fallback` makes spmd warn of them or refuse them. `caches` counts the entries of
all caches. `CommDebugMode` counts what is sent. `prove_rule` tests a registered rule by running its op.
"""

from __future__ import annotations

from spmd.debug.caches import CacheSize, CacheSizes, caches
from spmd.debug.check import Checked, Difference, check
from spmd.debug.comm_mode import CommDebugMode
from spmd.debug.compare import Gap
from spmd.debug.equal import check_equal
from spmd.debug.prove import WrongRow, prove_rule
from spmd.tensor.fallback import Fallback, FallbackError, FallbackWarning, fallbacks, on_fallback

__all__ = [
    "CacheSize", "CacheSizes", "Checked", "CommDebugMode", "Difference", "Fallback", "FallbackError",
    "FallbackWarning", "Gap", "WrongRow", "caches", "check", "check_equal", "fallbacks", "on_fallback", "prove_rule",
]  # fmt: skip
