"""In a trace, an op that was met before gives what it gave, and views of sizes that are symbols ask for none."""

import pytest
import torch

from spmd import _torch
from spmd._torch.quick_views import QUICK_VIEWS

aten = torch.ops.aten


class Sizes:
    """A trace's fake mode with a batch of x and a length of y."""

    def __init__(self):
        symbols = _torch.Symbols()
        self.sizes, self.mode = _torch.SizeSymbols(symbols), symbols.fake_mode()
        self.x, self.y = (self.sizes.size(name, name, n) for name, n in (("x", 6), ("y", 4)))

    def empty(self, *shape, dtype=torch.float32):
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def run(self, op, *args, **kwargs):
        with self.mode:
            return op(*args, **kwargs)


def layout(out):
    """What code can see of results, with the expressions of their sizes."""
    several = out if isinstance(out, (tuple, list)) else (out,)
    return [(str(t.shape), str(t.stride()), str(t.storage_offset()), t.dtype, t.device) for t in several]


def memories(out):
    several = out if isinstance(out, (tuple, list)) else (out,)
    return [_torch.memory_of(t) for t in several]


OPS = {
    "mul": lambda a: (aten.mul.Tensor, a, a),
    "to_bool": lambda a: (aten.gt.Scalar, a, 0),
    "sum": lambda a: (aten.sum.dim_IntList, a, [1], True),
    "cat": lambda a: (aten.cat.default, [a, a], 1),
    "norm": lambda a: (aten.native_layer_norm.default, a, [8], None, None, 1e-5),
    "split": lambda a: (aten.split.Tensor, a, 4, 2),
    "slice": lambda a: (aten.slice.Tensor, a, 2, 1, 5),
    "select": lambda a: (aten.select.int, a, 2, 3),
    "expand": lambda a: (aten.expand.default, a, [2, -1, -1, -1]),
    "view": lambda a: (aten.view.default, a, [-1, 16]),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_again_what_it_gave(name):
    """The same shapes, in memory of its own or in that of the operand, and no size is asked for again."""
    sizes = Sizes()
    first_of, again_of = (sizes.empty(sizes.x, sizes.y, 8) for _ in range(2))
    op, *args = OPS[name](first_of)
    first = sizes.run(op, *args)
    asked, hits = sizes.sizes.decisions, sizes.mode.results.hits
    op, *args = OPS[name](again_of)
    again = sizes.run(op, *args)
    assert sizes.mode.results.hits > hits
    assert sizes.sizes.decisions == asked
    assert layout(again) == layout(first)
    is_view = memories(first)[0] == _torch.memory_of(first_of)
    if is_view:
        assert set(memories(again)) == {_torch.memory_of(again_of)}
    else:
        shared = {*memories(first), _torch.memory_of(first_of), _torch.memory_of(again_of)}
        assert shared.isdisjoint(memories(again)) and len({*memories(again)}) == len(memories(again))


def test_other_operands_are_asked_about():
    """A number of another type, another dtype, other strides and another order of equal sizes are other operands."""
    sizes = Sizes()
    a, b = sizes.empty(sizes.x, sizes.y), sizes.empty(sizes.y, sizes.x)
    whole = sizes.empty(sizes.x, sizes.y, dtype=torch.int64)
    ran = [(a, 2), (b, 2), (whole, 2), (whole, 2.0), (whole, True), (a.t(), 2)]
    outs = [sizes.run(aten.mul.Scalar, t, n) for t, n in ran]
    assert [t.dtype for t in outs] == [torch.float32] * 2 + [torch.int64, torch.float32, torch.int64, torch.float32]
    assert [(t.shape, t.stride()) for t in outs] == [(t.shape, t.stride()) for t, _ in ran]


@pytest.mark.parametrize("op, dtype", [(aten.view_as_real.default, torch.complex64), (aten.view.dtype, torch.float32)])
def test_a_view_as_numbers_of_another_kind_is_one_again(op, dtype):
    sizes = Sizes()
    more = () if op is aten.view_as_real.default else (torch.int32,)
    first, again = (sizes.run(op, sizes.empty(sizes.x, 4, dtype=dtype), *more) for _ in range(2))
    assert layout(first) == layout(again) and again.dtype is not dtype


def test_what_was_written_or_known_is_not_kept():
    """A write gives its operand, and a constant keeps its value."""
    sizes = Sizes()
    a = sizes.empty(sizes.x)
    assert sizes.run(aten.add_.Tensor, a, 1) is a is sizes.run(aten.add_.Tensor, a, 1)
    assert sizes.run(aten.to.dtype, a, torch.float32) is a is sizes.run(aten.to.dtype, a, torch.float32)


x, y = "x", "y"
VIEWS = [
    (aten.view.default, (x, y, 8), lambda s: [[s.x * s.y, 8]]),
    (aten.view.default, (x, y, 8), lambda s: [[s.x, s.y, 2, 4]]),
    (aten.view.default, (x, y, 8), lambda s: [[s.x * s.y * 8]]),
    (aten.view.default, (x, y, 8), lambda s: [[-1, 8]]),
    (aten.view.default, (x, y, 8), lambda s: [[s.x, s.y, -1, 4]]),
    (aten.view.default, (x, 1, 8), lambda s: [[s.x, 8, 1]]),
    (aten.transpose.int, (x, y, 8), lambda s: [1, -1]),
    (aten.t.default, (x, y), lambda s: []),
    (aten.permute.default, (x, y, 8), lambda s: [[2, 0, -2]]),
    (aten.unsqueeze.default, (x, y, 8), lambda s: [1]),
    (aten.unsqueeze.default, (x, y), lambda s: [-1]),
    (aten.detach.default, (x, y), lambda s: []),
    (aten.as_strided.default, (x, y), lambda s: [[s.y, s.x], [1, s.y], 0]),
]


@pytest.mark.parametrize("op, shape, args", VIEWS)
def test_a_quick_view_is_the_view_of_torch(op, shape, args, monkeypatch):
    """In shape, strides and memory; and it takes nothing for granted."""
    quick, slow = Sizes(), Sizes()
    given = [s.empty(*(getattr(s, n) if isinstance(n, str) else n for n in shape)) for s in (quick, slow)]
    before = quick.sizes.decisions
    found = quick.run(op, given[0], *args(quick))
    assert quick.sizes.decisions == before and quick.mode.results.misses == 1  # that of `given`
    assert _torch.memory_of(found) == _torch.memory_of(given[0])
    monkeypatch.delitem(QUICK_VIEWS, op)
    expected = slow.run(op, given[1], *args(slow))
    assert _torch.strides_text(found) == _torch.strides_text(expected)
    assert layout(found)[0][0] == layout(expected)[0][0] and found.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.view.default, lambda s: [[s.x, s.y + 1]]),  # not as many elements
        (aten.view.default, lambda s: [[s.x, 4]]),  # as many only at this size
        (aten.view.default, lambda s: [[-1, 4]]),
        (aten.view.default, lambda s: [[-1, -1]]),
        (aten.transpose.int, lambda s: [0, 2]),
        (aten.permute.default, lambda s: [[0, 2]]),
        (aten.unsqueeze.default, lambda s: [4]),
    ],
)
def test_a_view_that_needs_an_answer_or_is_wrong_is_left_to_torch(op, args):
    s = Sizes()
    assert QUICK_VIEWS[op](s.empty(s.x, s.y), *args(s)) is NotImplemented


def test_a_view_of_what_is_not_contiguous_is_left_to_torch():
    s = Sizes()
    assert QUICK_VIEWS[aten.view.default](s.empty(s.x, s.y).t(), [s.y * s.x]) is NotImplemented
