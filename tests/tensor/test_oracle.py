"""Every row of every rule is tested against the op itself: even, uneven and empty shards, forward and backward."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import replace

import pytest
import torch

from spmd.tensor.rules.book import book
from spmd.tensor.rules.families import all_whole
from spmd.tensor.rules.rule import Factor, laws, rows
from tests.tensor.missing import missing
from tests.tensor.oracle import Case, Sample, Tally, captured, sweep
from tests.tensor.samples import (
    ELSEWHERE,
    PARTS,
    aten,
    contractions,
    gradients,
    images,
    networks,
    samples_of,
    table,
)  # fmt: skip

NO_RULE = {
    "view.dtype": "reads bits",
    "index.Tensor": "with a mask, how many elements it takes is in its values",
}
"""Ops of the book that have no rule for some samples, with the reason."""


@pytest.fixture(autouse=True)
def quiet_and_steady():
    """One thread and one seed. torch's own samples cause warnings, which are ignored."""
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
    """Splitting by the row, running on each rank and joining by the row gives the result of the op."""
    tally = Tally()
    for case in cases(samples_of(part)):
        case.check_each_row((2, 3), tally)
    print(tally)
    assert not tally.wrong, tally.report()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_right_rows_are_right_together(part):
    """Any row on one axis can be combined with any row on another, except for Partials that do not commute."""
    tally, rng = Tally(), random.Random(0)
    for case in cases(samples_of(part)):
        case.check_pairs(6, rng, tally)
    print(tally)
    assert not tally.wrong, tally.report()


OF_NETWORKS = (contractions, gradients, networks, images)
"""The parts of the table with the ops of networks and their gradients."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_rows_are_right_where_ranks_are_empty(part):
    """Five ranks shard few images, rows or channels, so that some have none, and two ranks shard something else."""
    tally, rng = Tally(), random.Random(0)
    for case in cases(samples_of(part)):
        pairs = [pair for pair in itertools.product(rows(case.rule), repeat=2) if pair[0].factor is not None]
        for pair in rng.sample(pairs, min(12 if part in OF_NETWORKS else 2, len(pairs))):
            case.check(pair, (5, 2), tally)
    print(tally)
    assert tally.right and not tally.wrong, tally.report()


@pytest.mark.parametrize("dtype, every", [(torch.float64, 23), (torch.bool, 29)], ids=str)
def test_rows_hold_for_the_samples_of_torch(dtype, every):
    """The same for the calls of torch's own op database: a part of it here, all of it in benchmarks/oracle.py."""
    check_samples(dtype, 1, every, 20)


SAMPLES = [(torch.float64, 2, 3), (torch.int64, 2, 7), (torch.bool, 2, 11), (torch.bfloat16, 1, 7)]


@pytest.mark.parametrize("dtype, per_op, every", SAMPLES)
def test_rows_hold_for_more_samples_of_torch(dtype, per_op, every):
    check_samples(dtype, per_op, every, 100)


def check_samples(dtype: torch.dtype, per_op: int, every: int, least: int) -> None:
    tally = sweep(captured(dtype, per_op, every=every))
    print(tally)
    assert tally.right > least
    assert not tally.wrong, tally.report()


def test_each_op_of_the_book_is_asked():
    """Every op of the book has a sample, or a reason why it cannot run here. A rule without a sample is not proved."""
    asked = {case.call.name for case in cases(table())}
    assert set(book) - asked == set(ELSEWHERE)


def test_samples_without_a_rule_have_a_reason():
    found = {str(c.sample.op).removeprefix("aten.") for c in map(Case, table()) if c.rule is None}
    assert found == set(NO_RULE)


# ---- the oracle itself ------------------------------------------------------------------------


def found_wrong(change, op, *args, **kwargs) -> list[str]:
    """The rows that the oracle finds wrong when the op's rule is changed by this function."""
    case, tally = Case(Sample(op, args, kwargs)), Tally()
    case.rule = change(case.rule)
    case.check_each_row((2, 3), tally)
    return sorted({str(row) for failure in tally.wrong for row in failure.rows})


def with_laws(*texts):
    return lambda rule: replace(rule, laws=laws(*texts))


def with_free(dim):
    """The rule with this dim free."""

    def free(dims):
        return tuple(Factor("new") if d == dim else f for d, f in enumerate(dims))

    return lambda rule: replace(rule, ins=(free(rule.ins[0]), *rule.ins[1:]), outs=tuple(map(free, rule.outs)))


def with_unit(unit):
    return lambda rule: replace(rule, outs=((replace(rule.outs[0][0], unit=unit),),))


def test_the_oracle_finds_laws_that_do_not_hold():
    """Each of these wrong rules is a mistake that was made once."""
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
    """When [5, 6] is viewed as [30], rows of 6 stay together: three ranks have 12, 12 and 6, not 10 each."""
    x = torch.randn(5, 6)
    assert not found_wrong(with_unit(6), aten.view.default, x, [30])
    assert found_wrong(with_unit(1), aten.view.default, x, [30]) == ["Shard(0) -> Shard(0)"]


def gradients_of_convolution(g, x, w) -> tuple:
    """The arguments of `convolution_backward` for all three gradients."""
    return g, x, w, [len(w)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]


def test_the_oracle_finds_factors_that_a_result_does_not_depend_on():
    """The gradient of a bias has no input channels: each rank has all of it, and a sum would count it twice."""
    x, w, g = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 1, 1), torch.randn(2, 3, 5, 5)

    def with_channels(rule):
        grad, image, kernel = rule.ins
        c = Factor("c")
        image, kernel = (image[0], c, *image[2:]), (kernel[0], c, None, None)
        return replace(rule, ins=(grad, image, kernel), outs=(image, kernel, rule.outs[2]))

    wrong = found_wrong(with_channels, aten.convolution_backward.default, *gradients_of_convolution(g, x, w))
    assert wrong == ["Replicate(), Shard(1), Shard(1) -> Shard(1), Shard(1), Partial()"]


def test_the_oracle_finds_sizes_that_are_not_those_of_a_block():
    """Of no images the kernel gives the bias a gradient of the size that it is told."""
    x, w, g = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 1, 1), torch.randn(2, 3, 5, 5)
    case, tally = Case(Sample(aten.convolution_backward.default, gradients_of_convolution(g, x, w), {})), Tally()
    of_batch, of_outputs = (next(row for row in rows(case.rule) if row.factor == f) for f in "no")
    case.check((of_batch, of_outputs), (3, 2), tally)
    assert tally.right and not tally.wrong, tally.report()
    case.rule = replace(case.rule, sizes=None)
    case.check((of_batch, of_outputs), (3, 2), tally)
    assert "shapes differ" in tally.report() or "blocks of" in tally.report()


# ---- rows that are missing --------------------------------------------------------------------


def test_rows_that_a_rule_leaves_out_are_found(monkeypatch):
    """With a rule that keeps all dims whole, the rows of the right rule are missing. With the right rule none is."""
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
