"""Recurrent layers made of many ops by torch's own Python code.

    with recurrent_in_python():
        out, h, c = torch.lstm(x, ...)        h is [layers, rows, hidden] in all versions
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._decomp import decompositions

from spmd._torch.modes import dispatched_in_python


@contextlib.contextmanager
def recurrent_in_python() -> Iterator[None]:
    """Inside, torch's Python code makes recurrent layers of other ops."""
    layer = decompositions.one_layer_lstm
    decompositions.one_layer_lstm = _with_last_states(layer) if _keeps_a_dim else layer
    try:
        with dispatched_in_python():
            yield
    finally:
        decompositions.one_layer_lstm = layer


_keeps_a_dim = torch.__version__ < (2, 13)
"""Before torch 2.13 its last states have a dim of one step, unless there is one row."""


def _with_last_states(layer: Any) -> Any:
    def corrected(inp: torch.Tensor, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, last = layer(inp, hidden, *args, **kwargs)
        return out, tuple([x.squeeze(0) if x.ndim > h.ndim else x for x, h in zip(last, hidden, strict=True)])

    return corrected
