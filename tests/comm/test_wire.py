"""The encoding for the network: the reductions that exist, marks for NaN, and tensors as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd.comm import wire
from tests.comm.plain import LAYOUTS, MOVED, REDUCE_OPS, SUMMED, data, is_legal


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (0, 2), (3, 0), (4,), (2, 3, 2)], ids=str)
def test_a_tensor_comes_back_from_its_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = data(1, shape, dtype)
    y = wire.as_rows_of_bytes(x)
    assert y.shape == (shape[0], x[:1].numel() * x.itemsize if shape[0] else y.shape[1])
    back = wire.from_rows_of_bytes(y, dtype, shape[1:])
    assert back.dtype == dtype and back.shape == shape
    assert torch.equal(back.to(torch.complex128), x.to(torch.complex128))


@pytest.mark.parametrize("layout", ["conjugate", "transposed", "strided"])
def test_bytes_are_those_of_the_values_and_not_of_the_memory(layout: str) -> None:
    x = LAYOUTS[layout](data(1, (3, 4), torch.complex64))
    assert torch.equal(wire.from_rows_of_bytes(wire.as_rows_of_bytes(x), torch.complex64, (4,)), x)


@pytest.mark.parametrize("shape, stride", [((1,), (2,)), ((1, 1), (3, 2)), ((3, 1), (1, 7)), ((0, 2), (4, 2))], ids=str)
def test_a_contiguous_tensor_may_have_strange_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """The strides of dims of size 1 have no meaning, but views as bytes depend on them."""
    x = torch.arange(10, dtype=torch.int16).as_strided(shape, stride)
    assert x.is_contiguous()
    assert torch.equal(wire.from_rows_of_bytes(wire.as_rows_of_bytes(x), torch.int16, shape[1:]), x)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("op", REDUCE_OPS)
def test_a_reduction_exists_or_is_refused(op: str, dtype: torch.dtype) -> None:
    if dtype in SUMMED and is_legal(op, dtype):
        sent, sent_op = wire.reduced_as(dtype, op)
        assert sent.is_floating_point == dtype.is_floating_point and sent_op in REDUCE_OPS
    elif dtype not in (torch.uint16, torch.uint32, torch.complex128):
        with pytest.raises(TypeError, match=f"{op} of {dtype} is no reduction"):
            wire.reduced_as(dtype, op)


def test_an_unknown_reduction_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="reduce_op is 'mean'; it must be one of sum, avg"):
        wire.reduced_as(torch.float32, "mean")


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from(["max", "min"]))
def test_a_marked_nan_wins_where_the_wire_loses_it(rows: list[list[float]], op: str) -> None:
    """fmax and fmin drop NaN, as gloo may."""
    xs = [torch.tensor(row) for row in rows]
    lossy, lossless = {"max": (torch.fmax, torch.maximum), "min": (torch.fmin, torch.minimum)}[op]
    came, expected = wire.with_marks(xs[0], xs[0].dtype, op), xs[0]
    for x in xs[1:]:
        came, expected = lossy(came, wire.with_marks(x, x.dtype, op)), lossless(expected, x)
    assert torch.allclose(wire.without_marks(came, (3,)), expected, rtol=0, atol=0, equal_nan=True)
