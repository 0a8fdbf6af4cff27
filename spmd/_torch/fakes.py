"""Fake tensors: shapes, strides and devices without data."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._library import custom_ops
from torch._library import utils as custom_op_utils
from torch._prims_common import get_computation_dtype
from torch._subclasses import fake_impls, fake_tensor

from spmd._torch.modes import no_dispatch, no_modes

FakeTensor = fake_tensor.FakeTensor


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Fake tensors in any thread.

    A torch built for CUDA puts a stand-in where no device is, which ends with the thread that put it there; simulated
    ranks are threads, and the next thread would crash.
    """

    avoid_device_init = False

    @functools.cached_property
    def blank(self) -> FakeTensor:
        """A fake tensor on the CPU that nobody else has."""
        return FakeTensor(self, torch.empty(0, device="meta"), torch.device("cpu"))


def empty_fake(mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: Any):
    """A fake tensor in memory of its own, as `empty_strided` in the mode gives it, in a tenth of the time where its
    sizes are numbers. To be called with `no_function_modes` and `no_modes`, or with what `modes_aside` gives."""
    if _needs_no_mode(shape, stride, device):
        return _plain_fake(mode.blank, shape, stride, dtype)
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def fakes_like(like: FakeTensor) -> tuple[bool, Callable[[], FakeTensor]]:
    """What makes fake tensors like this one, as `empty_fake`, and whether their sizes are numbers."""
    mode, given = like.fake_mode, (like.shape, like.stride(), like.dtype)
    if _needs_no_mode(*given[:2], like.device):
        return True, functools.partial(_plain_fake, mode.blank, *given)
    return False, functools.partial(empty_fake, mode, *given, like.device)


def _needs_no_mode(shape: Sequence[Any], stride: Sequence[Any], device: Any) -> bool:
    plain = torch.device(device).type == "cpu" and all([type(n) is int for n in (*shape, *stride)])
    return plain and not torch.is_inference_mode_enabled()


def modes_aside(likes: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager:
    """Inside, tensors like these are made and no mode hears of it.

    To take all modes from their stack and put them back takes 11 us, once for many tensors. For a few it is done only
    where one of them is made in its mode, or asks it for its sizes: to find that out takes 2 us each.
    """
    few = len(likes) <= FEW and all([x.layout is torch.strided for x in likes])
    return no_dispatch() if few and all([_needs_no_mode(x.shape, x.stride(), x.device) for x in likes]) else no_modes()


FEW = 3
"""For so many tensors it is found out whether they need their modes."""


def _plain_fake(blank: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """A fake tensor with the attributes of another one: to set all twenty takes longest."""
    new = torch.Tensor._make_subclass(
        FakeTensor, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), False, dispatch_device=True,
        device_for_backend_keys=blank.fake_device,
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(new)
    vars(new).update(vars(blank))
    return new


def detached_fake(x: FakeTensor) -> FakeTensor:
    """Another fake tensor that shows the memory of x. To be called with `no_function_modes`."""
    with fake_impls.no_python_dispatcher(), fake_tensor.in_kernel_invocation_manager(x.fake_mode):
        bare = torch.ops.aten.detach.default(x)
    return FakeTensor(x.fake_mode, bare, x.fake_device)


def uncached_fake_mode() -> FakeTensorMode:
    """A mode without torch's cache of shapes, which has no bound."""
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


# The errors of a fake tensor where a result's shape or value depends on data, or where the op has no shape function.
UNKNOWN_SHAPE = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)


if torch.__version__ < (2, 13):  # which says float32 for all sums, and makes float64 of float64

    @fake_impls.register_op_impl(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    def _attention(mode: Any, op: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, rows, _ = query.shape
        sums = query.new_empty((batch, rows, heads), dtype=get_computation_dtype(query.dtype))
        return torch.empty_like(query), sums.transpose(1, 2)


def check_has_shape_function(op: Any) -> None:
    """Raise the error of fake tensors for an op without a shape function: a custom op would raise any RuntimeError."""
    custom = custom_ops._maybe_get_opdef(op)
    if custom is not None and custom._abstract_fn is None and not custom_op_utils.can_generate_trivial_fake_impl(op):
        raise fake_tensor.UnsupportedOperatorException(op)


@contextlib.contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """An error of an op on fake tensors in this thread is not logged as well: a user's mistake is one error."""
    here = threading.get_ident()
    log = logging.getLogger(fake_tensor.__name__)

    def of_other_threads(record: logging.LogRecord) -> bool:
        return record.thread != here

    log.addFilter(of_other_threads)
    try:
        yield
    finally:
        log.removeFilter(of_other_threads)


def is_faking(*tensors: torch.Tensor) -> bool:
    """Whether ops have no data to work on: a fake mode is on, or one of the tensors is fake."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return fake or any(isinstance(x, fake_tensor.FakeTensor) for x in tensors)
