"""AsyncTensor: the result of a collective that was launched and not yet waited for.

    y = all_reduce(x, "sum", mesh)      # launched, in flight
    z = x * 2                           # computes in the meantime
    y.shape, y.dtype                    # known at once
    rows = y.view(-1, 4)[1:]            # a view is in flight, too
    z + y                               # waits, once

A view of an AsyncTensor is an AsyncTensor, of the same memory. Every other op waits first; `wait` does so by hand. The
results of ops are plain tensors. A trace
makes no AsyncTensors: the wait directly follows its collective there, and passes move it. An AsyncTensor that is an
input of a trace is waited for. Until the result has arrived, nobody may write to the tensor that is sent; such a write
is found when the result is waited for, and is an error.

Left out: accesses that torch does not dispatch to the class. `x.data = y` into a plain tensor x and
`y.untyped_storage()` find no data; write `wait(y)` there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spmd import _torch

pytree = _torch.pytree

Receive = Callable[[torch.Tensor], torch.Tensor]
"""From the raw output of a launched collective to its value; waits."""


class AsyncTensor(torch.Tensor):
    """A tensor that is in flight; the functional collectives make it."""

    _sent: torch.Tensor | None
    _receive: Receive | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        sent: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        receive: Receive,
    ) -> AsyncTensor:
        """`receive(sent)` waits for the collective and returns the value: contiguous, of this shape and dtype."""
        t = _torch.wrapper_tensor(cls, sent, shape, None, False, dtype)
        t._sent, t._receive, t._value = sent, receive, None
        return t

    __torch_function__ = _torch.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if torch.Tag.inplace_view in op.tags:
            raise RuntimeError(f"{op} changes the shape of a tensor that is on its way; use spmd.comm.wait(x) first")
        if _stays_in_flight(op, args):
            return _view_in_flight(op, args, kwargs or {})
        own_args, own_kwargs = pytree.tree_map_only(cls, _wait_for, (args, kwargs or {}))
        out = _torch.run_with_bits(op, *own_args, **own_kwargs)
        # An op that writes in place has written into the value. Autograd wants the AsyncTensor itself as the result.
        return args[0] if _torch.writes_first(op) and isinstance(args[0], cls) else out

    @property
    def arrived(self) -> torch.Tensor:
        """The value, after a wait. AOTAutograd reads this attribute and gives it to the compiled function."""
        return _wait_for(self)

    def __tensor_flatten__(self):
        return ["arrived"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, shape, stride):
        t = _torch.wrapper_tensor(cls, inner["arrived"], shape, stride, False)
        t._sent, t._receive, t._value = None, None, inner["arrived"]
        return t

    def wait(self) -> torch.Tensor:
        """Wait, and return the plain tensor; gradients flow through."""
        # Traces and autograd record ops, so the wait is an op for them.
        if _torch.is_tracing(self) or (self.requires_grad and torch.is_grad_enabled()):
            return torch.ops.aten.alias.default(self)
        return _wait_for(self)

    @property
    def completed(self) -> bool:
        """Whether it has been waited for."""
        return self._value is not None

    @property
    def data(self):
        return _wait_for(self).data

    @data.setter
    def data(self, value):
        raise RuntimeError("x.data = y on a tensor that is on its way; use x = spmd.comm.wait(x) first")

    def tolist(self):
        return _wait_for(self).tolist()

    def numpy(self, *, force: bool = False):
        return self.detach().numpy(force=force)  # to detach waits

    def __array__(self, *args, **kwargs):
        return self.detach().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs):
        return _wait_for(self).__dlpack__(**kwargs)

    def data_ptr(self) -> int:
        return _wait_for(self).data_ptr()

    def storage(self):
        return _wait_for(self).storage()

    def share_memory_(self):
        _wait_for(self).share_memory_()
        return self

    def __deepcopy__(self, memo):
        return _wait_for(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return _wait_for(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        state = _wait_for(self) if self.completed else f"on its way, shape={tuple(self.shape)}, dtype={self.dtype}"
        return f"AsyncTensor({state})"


def _wait_for(x: AsyncTensor) -> torch.Tensor:
    if x._value is None:
        with _torch.untraced(), _torch.below_autograd():
            x._value = x._receive(x._sent)
        x._sent = x._receive = None  # the tensor that was sent may be freed
    return x._value


# ---- views in flight --------------------------------------------------------------------------

_WAITING_VIEWS = {
    torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten._conj.default,
    torch.ops.aten._neg_view.default,
}  # fmt: skip
"""Views that wait: they are how a wait is recorded, or set a bit that a tensor without data cannot have."""


def _stays_in_flight(op: _torch.OpOverload, args: tuple) -> bool:
    """Whether the op is a view of its first argument, which has not been waited for, and of no other tensor."""
    if not _torch.is_view(op) or op in _WAITING_VIEWS or not isinstance(args[0], AsyncTensor):
        return False
    others = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(args[1:]))
    return args[0]._value is None and not others and not _torch.is_tracing(args[0])


def _view_in_flight(op: _torch.OpOverload, args: tuple, kwargs: dict) -> object:
    """The views, in flight: who waits for one waits for the tensor, and takes the view of its value."""
    whole, *plain = args
    size = whole.storage_offset() + max(1, whole.numel())  # enough for a view; a meta tensor takes no memory
    memory = torch.empty(size, dtype=whole.dtype, device="meta")
    like = memory.as_strided(whole.shape, whole.stride(), whole.storage_offset())
    leaves, tree = pytree.tree_flatten(op(like, *plain, **kwargs))

    def received(i: int) -> Receive:
        return lambda whole: pytree.tree_leaves(op(_wait_for(whole), *plain, **kwargs))[i]

    views = []
    for i, x in enumerate(leaves):
        view = _torch.new_wrapper(
            AsyncTensor, x.shape, strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype,
            device=whole.device,
        )  # fmt: skip
        view._sent, view._receive, view._value = whole, received(i), None
        views.append(view)
    return pytree.tree_unflatten(views, tree)


def unless_written(sent: torch.Tensor, receive: Receive, reader: str) -> Receive:
    """`receive`, with an error if somebody has written into the sent tensor in the meantime.

    In that case either the old or the new values may have been sent. `reader`: the name of the collective, which reads
    the sent tensor until it has arrived.
    """
    if sent.is_inference():  # torch does not count the writes into inference tensors
        return receive
    version = sent._version  # all views of its memory have one version counter

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
    """Wait for an AsyncTensor and return its plain tensor; any other tensor is returned as it is.

    >>> x = torch.ones(2)
    >>> wait(x) is x
    True
    """
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor
