"""Random programs on DTensors give the results of one device, with cold caches and with warm ones.

`benchmarks/fuzz.py` does this for any length of time. The programs that it once found to differ are in the table below.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from spmd import Shard
from tests.tensor.fuzz import Given, Program, differences, fails_like, shrink, write
from tests.tensor.single import MAX, S0, S1, SUM, R


def a(*shape: int, on, dtype="float64", name="a", **options) -> Given:
    return Given(name, shape, dtype, 1, tuple(on), **options)


FOUND = {
    "a maximum of blocks in units, of which one is empty": Program(
        (2, 3), (a(2, 6, on=[Shard(0, unit=2), R]),), ("b = a.view(-1)", "c = b.max()")
    ),
    "a sum into a result of another dtype": Program(
        (2, 2), (a(4, 3, on=[S0, SUM]), a(4, on=[R, S0], dtype="int64", name="b")),
        ("torch.sum(a, 1, out=b)", "torch.prod(a, 1, out=b)"),
    ),
    "a list op that writes what autograd has saved": Program(
        (2,), (a(4, on=[S0], grad=True),),
        ("b = a * 1", "c = (b * b).sum()", "with torch.no_grad(): torch._foreach_mul_([b], 2)", "c.backward()"),
    ),
    "a list op that writes a view of many": Program(
        (2,), (a(4, 2, on=[MAX]), a(2, on=[R], name="b", grad=True)),
        ("c = b * 1", "d = c.split(1)[0]", "with torch.no_grad(): torch._foreach_neg_([c])", "d.is_leaf"),
    ),
    "a sum times infinity, or by zero": Program(
        (2,), (a(3, on=[SUM]),), ("b = a * float('inf')", "c = a / 0", "d = a / 0.0", "e = float('inf') * (a + a)")
    ),
    "whole numbers made floats of another default dtype": Program(
        (2,), (a(4, on=[S0], dtype="int32"),),
        ("b = a / 2", "torch.set_default_dtype(torch.float64)", "c = a / 2", "d = a.sqrt()",
         "torch.set_default_dtype(torch.float32)", "e = a / 2", "f = a.sqrt()"),
    ),
    "a maximum made a sum on one axis and an average on the other": Program(
        (2, 2), (a(4, 6, on=[MAX, MAX]),),
        ("b = move(a, (Partial('avg'), Partial()))", "c = move(a, (Partial(), Partial('avg')))", "d = b + c"),
    ),
    "a product of complex numbers": Program(
        (3,), (a(4, 3, on=[S0], dtype="complex128"),), ("b = a.prod()", "c = a.prod(0)", "d = a.prod(1)")
    ),
    "a loss whose target has another dtype": Program(
        (3,), (a(4, 3, on=[S0]), a(4, 3, on=[S0], dtype="float32", name="b")),
        ("c = F.binary_cross_entropy_with_logits(a, b)", "d = F.binary_cross_entropy_with_logits(b, a)",
         "e = F.binary_cross_entropy_with_logits(a, b.long())"),
    ),
    "blocks that lie in memory otherwise than the tensor": Program(
        (3,), (a(4, 2, on=[S0], turned=True),),
        ("b = torch.kron(a[:1], a)", "c = torch.view_as_complex(a)", "c.mul_(2)", "d = a.view(torch.int32)"),
    ),
    "strides that are those of one device": Program(
        (2,), (a(4, 6, on=[S0]),),
        ("b = a.mT.softmax(-1)", "c = a.mT.diagonal_scatter(a.diagonal() + 1)", "d = F.layer_norm(a.mT, (4,))",
         "e = a.mT.logsumexp(-1)"),
    ),
    "strides of the results of list ops": Program(
        (2,), (a(4, 6, on=[S0]),),
        ("b = a[:, ::2]", "with torch.no_grad(): c = torch._foreach_mul([b, b], [2.0, 0.5])[0]",
         "d = a[:, :1].expand(4, 3)", "with torch.no_grad(): e = torch._foreach_add([d], 1)[0]"),
    ),
    "averages of whole numbers that are to be summed": Program(
        (2, 3), (a(3, 3, 5, on=[R, SUM], dtype="int64"),), ("b = F.avg_pool1d(a, 2)", "c = F.avg_pool1d(a, 3, 1)")
    ),
    "a sum of bools into one": Program(
        (4,), (a(4, 2, on=[S0], dtype="bool"),), ("b = a.new_zeros(a.shape)", "torch.sum(a, 0, out=b)")
    ),
    "images without channels": Program((2,), (a(0, 4, on=[R]),), ("b = F.conv1d(a[None], a[None])",)),
    "writes through .data, which autograd is not to see": Program(
        (2,), (a(4, 3, on=[S0], grad=True),),
        ("b = a * 1", "c = (b * b).sum()", "b.data.mul_(2)", "b.data[1:].add_(1)", "c.backward()",
         "d = a.chunk(2)[0]", "a.data.zero_()", "e = d * 1"),
    ),
    "blocks of one complex number": Program(
        (2, 2), (a(1, 6, 6, on=[S1, S1], dtype="complex128"),),
        ("b = a[..., 0]", "b[..., 1:] = 2", "c = a[:, 0, 0] * 1"),
    ),
    "one dim squeezed twice": Program((2,), (a(1, 4, on=[R]),), ("b = a.squeeze((0, -2))", "c = a.squeeze((0, 1))")),
    "a view copied in turn by deepcopy": Program(
        (2,), (a(4, 3, on=[S0]),),
        ("b = a[1:].t()", "c = copy.deepcopy(b)", "b.mul_(2)", "c.add_(1)", "a.data = b", "a.add_(1)"),
    ),
    "writes through views of views that cut shards": Program(
        (3,), (a(4, 5, on=[S0]), a(4, on=[S0], name="b")),
        ("c = a[1:].t()[::2]", "c.mul_(3)", "d = a.flatten()[3:9].view(2, 3)", "d[0] = b[1]", "e = c.sum(0)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found_stays_found(name):
    assert not differences(FOUND[name])


@pytest.mark.parametrize("programs", [30, 80])
def test_random_programs(programs, record_property):
    """Views and writes through them, numbers and 0-dim tensors, lists, dtypes, gradients, and moves between them."""
    seen = []

    @settings(max_examples=programs, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.integers(0, 2**32 - 1))
    def run(seed):
        program = write(random.Random(seed))
        seen.append(program)
        if differences(program):
            small = shrink(program, fails_like(program))
            raise AssertionError(f"{small}\n\n" + "\n".join(differences(small)))

    run()
    assert len(seen) == programs
    record_property("cases", f"{len(seen)} random programs of {sum(len(p.steps) for p in seen)} steps, each run twice")
