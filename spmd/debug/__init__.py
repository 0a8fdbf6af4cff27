"""Tools for finding what went wrong.

`check` runs a function on one device and on the simulated ranks of a mesh, side by side, and names the first op whose
results differ.
"""

from __future__ import annotations

from spmd.debug.check import Checked, Difference, check
from spmd.debug.compare import Gap

__all__ = ["Checked", "Difference", "Gap", "check"]
