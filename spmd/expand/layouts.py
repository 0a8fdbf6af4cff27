"""How arguments, parameters and buffers lie in memory, where that is not row by row, and what code asks of it.

    step(x.t())      def step(x): return x * 2 if x.is_contiguous() else x * 3

A program has its inputs row by row, whatever the caller's strides are, and so has the trace. So a step that asks for a
layout is right where all lies row by row; elsewhere it is an error that names the line. Layouts are guards, too: what
was traced of tensors that lie row by row is not used for others. A parameter that is placed on the mesh has the layout
that it had before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spmd import _torch
from spmd.expand.user_code import at_user_line, current_frames
from spmd.tensor.spec import contiguous, spec_of_value

Layout = tuple[int, ...]
"""The dims of a tensor from the outermost to the innermost in memory; of one whose elements lie apart also -1."""

_before_placed = WeakIdKeyDictionary()
"""The layouts that tensors had before they became DTensors."""


def layout_of(x: torch.Tensor) -> Layout | None:
    """The layout that the user has given to a tensor; None for one that lies row by row.

    >>> layout_of(torch.ones(2, 3)), layout_of(torch.ones(2, 3).t()), layout_of(torch.ones(2, 3)[:, 1:])
    (None, (1, 0), (0, 1, -1))
    """
    if spec_of_value(x) is not None:
        return _before_placed.get(x) if _before_placed else None
    if x.is_contiguous():
        return None
    order = sorted(range(x.ndim), key=lambda d: (-x.stride(d), d))
    return (*order, *([] if _is_dense(x, order) else [-1]))


def _is_dense(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the elements lie beside each other, the dims in this order. By numbers alone: a trace may be going on."""
    shape, strides = [x.shape[d] for d in order], [x.stride(d) for d in order]
    return all(stride == step for n, stride, step in zip(shape, strides, contiguous(shape), strict=True) if n != 1)


def note_layout(x: torch.Tensor) -> None:
    """Note the layout of a tensor that is about to become a DTensor."""
    if spec_of_value(x) is None and (layout := layout_of(x)) is not None:
        _before_placed[x] = layout


def guards_of_layouts(tensors: Mapping[Any, torch.Tensor]) -> dict[str, Layout]:
    """The layouts of those of these tensors that do not lie row by row, by name."""
    return {f"layout of {path}": layout for path, x in tensors.items() if (layout := layout_of(x)) is not None}


def asked_for(tensors: Mapping[Any, torch.Tensor]) -> dict[Callable, Callable]:
    """From a function to one of the same arguments, which is called first: it refuses to say how something lies where
    some of what a step is given does not lie row by row. tensors: what it is given."""
    otherwise = next((path for path, x in tensors.items() if layout_of(x) is not None), None)

    def of_order(*_: Any, **__: Any) -> Any:  # which is of Python, and asks for its caller
        if otherwise is not None:
            raise _refused(f"how a tensor lies in memory, and {otherwise} does not lie row by row, as in its program")
        return NotImplemented

    def ask(*_: Any, **__: Any) -> Any:
        return of_order() if _torch.asked_by_user(sys._getframe(1)) else NotImplemented

    functions = {torch.Tensor.is_contiguous: ask, torch.Tensor.stride: ask, torch.Tensor.dim_order: of_order}
    return functions | {torch.Tensor.storage_offset: _refuse_offset}



def _refuse_offset(*_: Any, **__: Any) -> Any:
    if _torch.asked_by_user(sys._getframe(1)):
        raise _refused("where a tensor begins in its memory, which its program would freeze")
    return NotImplemented


def _refused(what: str) -> RuntimeError:
    return RuntimeError(
        f"the step asks {what}; give the step contiguous() tensors, or decide outside of it, and pass the answer as an "
        f"argument{at_user_line(current_frames())}"
    )
