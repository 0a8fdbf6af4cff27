"""Samples for the oracle (`spmd.debug.oracle`) from torch's own op database."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spmd.debug.oracle import Case, Sample, Tally, call_of, close, split, sweep

__all__ = ["Capture", "Case", "Sample", "Tally", "call_of", "captured", "close", "runs", "split", "sweep"]



class Capture(TorchDispatchMode):
    """Records the aten calls made under it, with copies of their arguments."""

    def __init__(self):
        super().__init__()
        self.samples: list[Sample] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs or {})
        )
        self.samples.append(Sample(op, args, kwargs))
        return op(*args, **kwargs)


def captured(
    dtype: torch.dtype, per_op: int, per_entry: int = 6, largest: int = 20_000, every: int = 1
) -> Iterator[Sample]:
    """Functional aten calls that the entries of `op_db` make, forward and backward.

    At most `per_op` samples an overload, from the first `per_entry` samples of each entry, of operands of at most
    `largest` elements in all; of all entries, or of every so many.
    """
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    seen: Counter = Counter()
    for entry in op_db[::every]:
        if dtype not in entry.dtypes or entry.name.startswith(("jiterator", "sparse", "torch.ops.aten._")):
            continue
        inputs = entry.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point)
        for given in itertools.islice(inputs, per_entry):
            for sample in _calls(entry, given):
                if seen[sample.op] < per_op and _fits(sample, largest):
                    seen[sample.op] += 1
                    yield sample


def _calls(entry, given) -> list[Sample]:
    with Capture() as capture, contextlib.suppress(Exception):  # torch itself raises an error for some samples
        out = entry.op(given.input, *given.args, **given.kwargs)
        out = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(out, [torch.randn_like(t) for t in out])
    return capture.samples


def _fits(sample: Sample, largest: int) -> bool:
    """Whether the sample is a functional aten call of a useful size on finite numbers."""
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    return (
        sample.op.namespace == "aten"
        and not sample.op._schema.is_mutable
        and bool(tensors)
        and sum(t.numel() for t in tensors) <= largest
        and torch.Tag.nondeterministic_seeded not in sample.op.tags
        and all(_sane(t) for t in tensors)
        and runs(sample)
    )


def runs(sample: Sample) -> bool:
    """Whether the op takes these arguments; some were changed in place after the call that was captured.

    Half-precision complex numbers cannot be compared, so what gives them is no sample.
    """
    try:
        out = sample.op(*sample.args, **sample.kwargs)
    except Exception:
        return False
    return all(t.dtype != torch.complex32 for t in tree_leaves(out) if isinstance(t, torch.Tensor))


def _sane(x: torch.Tensor) -> bool:
    """Whether the values look computed, and are not the contents of uninitialised memory."""
    if x.dtype == torch.complex32:
        return False  # half-precision complex numbers have almost no kernels
    if not (x.is_floating_point() or x.is_complex()):
        return True
    size = x.nan_to_num().abs()
    return not bool(((size > 1e6) | ((size > 0) & (size < 1e-20))).any())
