"""AsyncTensor: the result of a collective, launched and not waited for.

    y = all_reduce(x, "sum", mesh)      # on its way
    z = x * 2                           # computes meanwhile
    y.shape, y.dtype                    # known at once
    z + y                               # waits, once

Any op that touches it waits by itself; `wait` does so by hand. What comes out of an op is a plain tensor. In a trace
there are no AsyncTensors: there the wait stands right behind its collective, and passes move it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spmd import _torch

pytree = _torch.pytree


class AsyncTensor(torch.Tensor):
    """A tensor that is on its way; made by the functional collectives."""

    _sent: torch.Tensor | None
    _receive: Callable[[torch.Tensor], torch.Tensor] | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        sent: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        receive: Callable[[torch.Tensor], torch.Tensor],
    ) -> AsyncTensor:
        """`receive(sent)` waits for what was sent and gives the value: contiguous, of this shape and dtype."""
        t = _torch.wrapper_tensor(cls, sent, shape, None, False, dtype)
        t._sent, t._receive, t._value = sent, receive, None
        return t

    __torch_function__ = _torch.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if torch.Tag.inplace_view in op.tags:
            raise RuntimeError(f"{op} changes the shape of a tensor that is on its way; use spmd.comm.wait(x) first")
        out = op(*pytree.tree_map_only(cls, _arrived, args), **pytree.tree_map_only(cls, _arrived, kwargs or {}))
        # What wrote into the value has written into the tensor: autograd wants the same object back.
        return args[0] if _torch.writes_first(op) and isinstance(args[0], cls) else out

    def wait(self) -> torch.Tensor:
        """The plain tensor, arrived; gradients flow through."""
        if self.requires_grad and torch.is_grad_enabled():
            return torch.ops.aten.alias.default(self)
        return _arrived(self)

    @property
    def completed(self) -> bool:
        """Whether it has been waited for."""
        return self._value is not None

    def tolist(self):
        return _arrived(self).tolist()

    def numpy(self, *, force: bool = False):
        return self.detach().numpy(force=force)

    def __array__(self, *args, **kwargs):
        return self.detach().__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        return _arrived(self).data_ptr()

    def untyped_storage(self):
        return _arrived(self).untyped_storage()

    def __deepcopy__(self, memo):
        return _arrived(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return _arrived(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        state = _arrived(self) if self.completed else f"on its way, shape={tuple(self.shape)}, dtype={self.dtype}"
        return f"AsyncTensor({state})"


def _arrived(x: AsyncTensor) -> torch.Tensor:
    if x._value is None:
        with torch.no_grad():
            x._value = x._receive(x._sent)
        x._sent = x._receive = None  # what was sent may be freed
    return x._value


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, arrived: a plain tensor for an AsyncTensor, any other tensor as it is.

    >>> x = torch.ones(2)
    >>> wait(x) is x
    True
    """
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor
