"""A write in place around `spmd.constrain` is seen as on one device, or is an error that names its line."""

from __future__ import annotations

import inspect

import pytest
import torch

import spmd
from spmd import Shard

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
X = torch.arange(12.0).reshape(4, 3) / 7


def lies(x):
    return spmd.constrain(x, {"dp": Shard(0)})


# ---- what is right ----------------------------------------------------------------------------


def read_before(x):
    h = x * 2
    y = lies(h) * 3
    h += 1
    return y, h


def goes_on_with_the_result(x):
    h = lies(x * 2)
    h += x
    h = lies(h.relu_())
    h[0] = 0
    return h


def beside_a_part(x):
    """The rows that are written are others than those that are constrained."""
    h = x * 2
    y = lies(h[:2])
    h[2:].mul_(5)
    return y, h


def of_a_copy(x):
    h = x * 2
    y = lies(h.clone())
    h += 1
    return y, h


def with_gradients(x):
    w = (x * 1).requires_grad_()
    y = lies(w * 2) + 0
    y += 1
    y.square().sum().backward()
    w.grad.mul_(2)
    return w.grad


RIGHT = read_before, goes_on_with_the_result, beside_a_part, of_a_copy, with_gradients


@pytest.mark.parametrize("step", RIGHT)
def test_steps_that_read_what_they_wrote_are_as_on_one_device(step):
    want, found = step(X.clone()), spmd.compile(step, LINE)(X)
    for a, b in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (found, want)), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


# ---- what would be another value --------------------------------------------------------------


def adds(x):
    h = x * 2
    y = lies(h)
    h += 1  # written
    return y


def copies(x):
    h = x * 2
    y = lies(h)
    h.copy_(x)  # written
    return y


def sets_an_element(x):
    h = x * 2
    y = lies(h)
    h[1, 0] = 7.0  # written
    return y


def by_a_view(x):
    h = x * 2
    rows = h[:2]
    view = lies(h)[:1]
    rows.mul_(5)  # written
    return view


def by_out(x):
    h = x * 2
    y = lies(h)
    torch.add(x, 1, out=h)  # written
    return y


def twice(x):
    h = x * 2
    z = lies(lies(h))
    h.zero_()  # written
    return z


def in_vmap(x):
    h = x * 2
    y = torch.func.vmap(lambda row: spmd.constrain(row, {"dp": None}))(h)
    h.zero_()  # written
    return y


def the_result(x):
    h = x * 2
    y = lies(h)
    y += 1  # written
    return h


def the_result_of_a_part(x):
    h = x * 2
    first, _ = h.chunk(2)
    lies(first).zero_()  # written
    return h


def the_argument(x):
    lies(x).add_(1)  # written
    return x * 2


def for_the_backward(x):
    """One device refuses it, too."""
    w = (x * 1).requires_grad_()
    h = w.sin()
    y = lies(h)
    z = y.square()
    with torch.no_grad():
        h += 1  # written
    z.sum().backward()
    return w.grad


WRONG = (
    adds, copies, sets_an_element, by_a_view, by_out, twice, in_vmap, the_result, the_result_of_a_part, the_argument,
    for_the_backward,
)  # fmt: skip


@pytest.mark.parametrize("step", WRONG)
def test_other_writes_are_refused_with_their_line(step):
    with pytest.raises(RuntimeError, match=r"writes in place into what spmd.constrain .*") as error:
        spmd.compile(step, LINE)(X)
    lines, first = inspect.getsourcelines(step)
    line = first + next(i for i, text in enumerate(lines) if "# written" in text)
    assert f"test_constrained_writes.py:{line}, in {step.__name__}" in str(error.value)
