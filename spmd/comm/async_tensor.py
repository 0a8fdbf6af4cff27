"""AsyncTensor: the result of a collective, launched and not waited for.

    y = all_reduce(x, "sum", mesh)      # on its way
    z = x * 2                           # computes meanwhile
    y.shape, y.dtype                    # known at once
    z + y                               # waits, once

Any op that touches it waits by itself; `wait` does so by hand. What comes out of an op is a plain tensor. In a trace
no AsyncTensors are made: there the wait stands right behind its collective, and passes move it. One that is an input
of a trace has arrived there. Until it has arrived, what is sent must not be written to: an error says so where it was.

Left out: what torch does not ask it for. `x.data = y` into a plain tensor x and `y.untyped_storage()` find no data;
write `wait(y)` there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spmd import _torch

pytree = _torch.pytree


Receive = Callable[[torch.Tensor], torch.Tensor]


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

    @property
    def arrived(self) -> torch.Tensor:
        """Its value, waited for: what AOTAutograd, which reads attributes, hands to what it has compiled."""
        return _arrived(self)

    def __tensor_flatten__(self):
        return ["arrived"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, shape, stride):
        t = _torch.wrapper_tensor(cls, inner["arrived"], shape, stride, False)
        t._sent, t._receive, t._value = None, None, inner["arrived"]
        return t

    def wait(self) -> torch.Tensor:
        """The plain tensor, arrived; gradients flow through."""
        # An op, where somebody takes note of ops.
        if _torch.is_tracing(self) or (self.requires_grad and torch.is_grad_enabled()):
            return torch.ops.aten.alias.default(self)
        return _arrived(self)

    @property
    def completed(self) -> bool:
        """Whether it has been waited for."""
        return self._value is not None

    @property
    def data(self):
        return _arrived(self).data

    @data.setter
    def data(self, value):
        raise RuntimeError("x.data = y on a tensor that is on its way; use x = spmd.comm.wait(x) first")

    def tolist(self):
        return _arrived(self).tolist()

    def numpy(self, *, force: bool = False):
        return self.detach().numpy(force=force)

    def __array__(self, *args, **kwargs):
        return self.detach().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs):
        return _arrived(self).__dlpack__(**kwargs)

    def data_ptr(self) -> int:
        return _arrived(self).data_ptr()

    def storage(self):
        return _arrived(self).storage()

    def share_memory_(self):
        _arrived(self).share_memory_()
        return self

    def __deepcopy__(self, memo):
        return _arrived(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return _arrived(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        state = _arrived(self) if self.completed else f"on its way, shape={tuple(self.shape)}, dtype={self.dtype}"
        return f"AsyncTensor({state})"


def _arrived(x: AsyncTensor) -> torch.Tensor:
    if x._value is None:
        with _torch.untraced(), _torch.below_autograd():
            x._value = x._receive(x._sent)
        x._sent = x._receive = None  # what was sent may be freed
    return x._value


def unless_written(sent: torch.Tensor, receive: Receive, reader: str) -> Receive:
    """`receive`, and an error where somebody has meanwhile written into what is sent: the old values or the new ones
    may have gone out. `reader`: what sends it, and reads it until it has arrived.
    """
    if sent.is_inference():  # which nobody counts the writes of
        return receive
    version = sent._version  # shared by all views of its memory

    def checked(raw: torch.Tensor) -> torch.Tensor:
        y = receive(raw)
        if sent._version != version:
            raise RuntimeError(
                f"the input of {reader} was written to while it was on its way, so what the other ranks got is either "
                "the old or the new values. Wait for the result before the write, or give a clone: x.clone()."
            )
        return y

    return checked


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, arrived: a plain tensor for an AsyncTensor, any other tensor as it is.

    >>> x = torch.ones(2)
    >>> wait(x) is x
    True
    """
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor
