"""Every row of every rule, asked of the op itself: even, uneven and empty shards, forward and backward."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest
import torch

from spmd.tensor.rules.book import book
from spmd.tensor.rules.families import all_whole
from spmd.tensor.rules.rule import Factor, laws
from tests.tensor.missing import missing
from tests.tensor.oracle import Case, Sample, Tally, captured, sweep
from tests.tensor.samples import ELSEWHERE, PARTS, aten, samples_of, table

NO_RULE = {
    "view.dtype": "reads bits",
    "index.Tensor": "with a mask, how many elements it takes is in its values",
}
"""Ops of the book that have no rule for some samples, with the reason."""


@pytest.fixture(autouse=True)
def quiet_and_steady():
    """One thread and one seed; torch warns of what its own samples do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def cases(samples) -> list[Case]:
    return [case for case in map(Case, samples) if case.rule is not None]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_row_is_what_the_op_gives(part):
    """Split as the row says, run on each rank, join as the row says: the op itself."""
    tally = Tally()
    for case in cases(samples_of(part)):
        case.check_each_row((2, 3), tally)
    print(tally)
    assert not tally.wrong, tally.report()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_right_rows_are_right_together(part):
    """Any row on one axis goes with any row on another, but for kinds of Partial that do not commute."""
    tally, rng = Tally(), random.Random(0)
    for case in cases(samples_of(part)):
        case.check_pairs(6, rng, tally)
    print(tally)
    assert not tally.wrong, tally.report()


@pytest.mark.parametrize(
    "dtype, per_op, every",
    [(torch.float64, 2, 3), (torch.int64, 2, 7), (torch.bool, 2, 11), (torch.bfloat16, 1, 7)],
    ids=str,
)
def test_rows_hold_for_the_samples_of_torch(dtype, per_op, every):
    """The same for what torch's own op database calls; a part of it here, all of it in benchmarks/oracle.py."""
    tally = sweep(captured(dtype, per_op, every=every))
    print(tally)
    assert tally.right > 100
    assert not tally.wrong, tally.report()


def test_each_op_of_the_book_is_asked():
    """An op without a sample is a rumour; one that cannot run here has a reason."""
    asked = {case.call.name for case in cases(table())}
    assert set(book) - asked == set(ELSEWHERE)


def test_samples_without_a_rule_have_a_reason():
    found = {str(c.sample.op).removeprefix("aten.") for c in map(Case, table()) if c.rule is None}
    assert found == set(NO_RULE)


# ---- the oracle itself ------------------------------------------------------------------------


def found_wrong(change, op, *args, **kwargs) -> list[str]:
    """The rows that the oracle finds wrong when the op's rule is changed so."""
    case, tally = Case(Sample(op, args, kwargs)), Tally()
    case.rule = change(case.rule)
    case.check_each_row((2, 3), tally)
    return sorted({str(row) for failure in tally.wrong for row in failure.rows})


def with_laws(*texts):
    return lambda rule: replace(rule, laws=laws(*texts))


def with_free(dim):
    """The rule that calls this dim free."""

    def free(dims):
        return tuple(Factor("new") if d == dim else f for d, f in enumerate(dims))

    return lambda rule: replace(rule, ins=(free(rule.ins[0]), *rule.ins[1:]), outs=tuple(map(free, rule.outs)))


def with_unit(unit):
    return lambda rule: replace(rule, outs=((replace(rule.outs[0][0], unit=unit),),))


def test_the_oracle_finds_laws_that_do_not_hold():
    """Each of these is a trap that rules have fallen into."""
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    p, pp, pr = "Partial() -> Partial()", "Partial(), Partial() -> Partial()", "Partial(), Replicate() -> Partial()"
    assert found_wrong(with_laws("sum avg: p -> p"), aten.add.Scalar, x, 2.0) == [p]
    assert found_wrong(with_laws("sum avg: p r -> p"), aten.add.Tensor, x, y) == [pr]
    assert found_wrong(with_laws("sum: p p -> p"), aten.mul.Tensor, x, y) == [pp]
    assert found_wrong(with_laws("sum: p r -> p"), aten.div.Tensor_mode, x, y, rounding_mode="floor") == [pr]
    assert found_wrong(with_laws("sum: p -> p"), aten._to_copy.default, x * 5, dtype=torch.int64) == [p]
    assert found_wrong(with_laws("max: p -> p"), aten.neg.default, x) == ["Partial('max') -> Partial('max')"]


@pytest.mark.parametrize("op, args", [("_softmax", (0, False)), ("cumsum", (0,)), ("flip", ([0],)), ("triu", ())])
def test_the_oracle_finds_dims_that_are_not_free(op, args):
    assert found_wrong(with_free(0), getattr(aten, op).default, torch.randn(4, 5), *args) == ["Shard(0) -> Shard(0)"]


def test_the_oracle_finds_cut_units():
    """Of [5, 6] seen as [30], rows of 6 stay together: three ranks have 12, 12 and 6, not 10 each."""
    x = torch.randn(5, 6)
    assert not found_wrong(with_unit(6), aten.view.default, x, [30])
    assert found_wrong(with_unit(1), aten.view.default, x, [30]) == ["Shard(0) -> Shard(0)"]


def test_the_oracle_finds_factors_that_a_result_does_not_depend_on():
    """Input channels are no factor of a bias's gradient: each rank has all of it, and a sum would count it twice."""
    x, w, g = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 1, 1), torch.randn(2, 3, 5, 5)
    one, zero = [1, 1], [0, 0]

    def with_channels(rule):
        grad, image, kernel = rule.ins
        c = Factor("c")
        image, kernel = (image[0], c, *image[2:]), (kernel[0], c, None, None)
        return replace(rule, ins=(grad, image, kernel), outs=(image, kernel, rule.outs[2]))

    args = g, x, w, [3], one, zero, one, False, zero, 1, [True, True, True]
    wrong = found_wrong(with_channels, aten.convolution_backward.default, *args)
    assert wrong == ["Replicate(), Shard(1), Shard(1) -> Shard(1), Shard(1), Partial()"]


# ---- rows that are missing --------------------------------------------------------------------


def test_rows_that_a_rule_leaves_out_are_found(monkeypatch):
    """With a rule that keeps all dims whole, the rows of the right one are missing; with the right one none is."""
    samples = [Sample(aten.mm.default, (torch.randn(4, 5), torch.randn(5, 6)), {})]
    assert missing(samples) == []
    monkeypatch.setitem(book, "mm", all_whole)
    found = missing(samples)
    assert sorted(str(m.row) for m in found) == [
        "Partial(), Replicate() -> Partial()",
        "Replicate(), Partial() -> Partial()",
        "Replicate(), Shard(1) -> Shard(1)",
        "Shard(0), Replicate() -> Shard(0)",
        "Shard(1), Shard(0) -> Partial()",
    ]
    assert all((m.op, m.right, m.asked) == ("mm", 1, 1) for m in found)
