"""Checkpoints of models and optimisers that are spread over ranks.

    import torch.distributed.checkpoint as dcp
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)       # blocks; any mesh loads them

    from spmd.checkpoint import StateDictOptions, get_model_state_dict
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))    # plain tensors

torch's `save`, `load` and `async_save` are right for DTensors as they are, because these tell torch their chunks
(`spmd.tensor.eager.chunks`). Its functions for state dicts are not: they know one class of sharded tensors, torch's
own, by `isinstance`, and hand all others on as they came. So these functions are here, under torch's names, with
torch's arguments. They take from torch what the names of parameters are and how an optimiser's state is keyed, and
gather, place and broadcast themselves.

A DTensor does not pass for torch's own class there (by a `__class__` that says so), for all other code that asks would
believe it, too: `fully_shard`, Dynamo, optimisers, libraries. They read a spec of torch's, and cut tensors by
placements that they do not know into blocks that are wrong. Nor are torch's functions replaced at import. Asked for
whole tensors of a model with DTensors, torch's own functions raise an error that names those here; without
`full_state_dict` they leave DTensors as they are, which is right.
"""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import StateDictOptions

from spmd.checkpoint.read_pretrained import LoadedKeys, load_pretrained
from spmd.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from spmd.checkpoint.write_pretrained import save_pretrained

__all__ = [
    "LoadedKeys", "StateDictOptions", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict",
    "load_pretrained", "save_pretrained", "set_model_state_dict", "set_optimizer_state_dict", "set_state_dict",
]  # fmt: skip
