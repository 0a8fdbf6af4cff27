"""torch.distributed.checkpoint: which ranks save together."""

from __future__ import annotations

import sys

import torch.distributed as dist

_SAVER = "torch.distributed.checkpoint.state_dict_saver"


def ranks_that_save() -> tuple[int, ...] | None:
    """The ranks of the `save` that the running code was called by; None for all ranks, or where there is no such call.

    torch tells nobody that it was asked to save without the other ranks (`no_dist=True`), or with some of them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_save_state_dict" and frame.f_globals.get("__name__") == _SAVER:
            alone, group = frame.f_locals.get("no_dist"), frame.f_locals.get("process_group")
            if alone:
                return (dist.get_rank() if dist.is_initialized() else 0,)
            return None if group is None else tuple(dist.get_process_group_ranks(group))
        frame = frame.f_back
    return None
