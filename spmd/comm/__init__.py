"""The seam to the network: collectives of the current rank, as plain functions over plain tensors.

    y = transport().all_reduce(x, "sum", transport().group(mesh, "tp"))
    y = transport().wait_tensor(y)

There are two transports: torch.distributed's (the default) and the simulator's threads (`spmd.sim`). Code above this
seam cannot tell which one it runs on.
"""

from __future__ import annotations

from spmd.comm.agree import agree
from spmd.comm.transport import C10dTransport, Transport, transport, use_transport

__all__ = ["C10dTransport", "Transport", "agree", "transport", "use_transport"]
