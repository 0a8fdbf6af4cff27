"""Tools for finding what went wrong.

`check` runs a function on one device and on the simulated ranks of a mesh, side by side, and names the first op whose
results differ. `fallbacks` lists the ops that had to see whole tensors, and `on_fallback` warns of them or refuses.
`caches` counts what is kept in order to be fast. `prove_rule` asks an op whether a rule that was registered for it is
right.
"""

from __future__ import annotations

from spmd.debug.caches import CacheSize, CacheSizes, caches
from spmd.debug.check import Checked, Difference, check
from spmd.debug.compare import Gap
from spmd.debug.prove import WrongRow, prove_rule
from spmd.tensor.fallback import Fallback, FallbackError, FallbackWarning, fallbacks, on_fallback

__all__ = [
    "CacheSize", "CacheSizes", "Checked", "Difference", "Fallback", "FallbackError", "FallbackWarning", "Gap",
    "WrongRow", "caches", "check", "fallbacks", "on_fallback", "prove_rule",
]  # fmt: skip
