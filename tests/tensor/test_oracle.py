"""Every row of every rule, asked of the op itself: on 2 and 3 ranks; even, uneven and empty shards; forward, backward."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest
import torch

from spmd.tensor.rules.book import book
from spmd.tensor.rules.rule import Row, Rule, laws, rows
from tests.tensor.oracle import Case, Sample, Tally, captured
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
    "dtype, per_op",
    [(torch.float64, 6), (torch.int64, 3), (torch.bool, 3), (torch.complex64, 2), (torch.bfloat16, 2), (torch.uint8, 2)],
    ids=str,
)
def test_rows_hold_for_the_samples_of_torch(dtype, per_op):
    """The same for what torch's own op database calls."""
    tally, rng = Tally(), random.Random(0)
    for case in cases(captured(dtype, per_op)):
        case.check_each_row((2, 3), tally)
        case.check_pairs(1, rng, tally)
    print(tally)
    assert tally.right > 1000
    assert not tally.wrong, tally.report()


def test_each_op_of_the_book_is_asked():
    """An op without a sample is a rumour; one that cannot run here has a reason."""
    asked = {case.call.name for case in cases(table())}
    assert set(book) - asked == set(ELSEWHERE)


def test_samples_without_a_rule_have_a_reason():
    found = {str(c.sample.op).removeprefix("aten.") for c in map(Case, table()) if c.rule is None}
    assert found == set(NO_RULE)


# ---- the oracle itself ------------------------------------------------------------------------


def wrong_rows(op, *args, rule=lambda rule: rule, **kwargs) -> list[str]:
    """The rows that the oracle finds wrong when the rule is changed so."""
    case, tally = Case(Sample(op, args, kwargs)), Tally()
    case.rule = rule(case.rule)
    case.check_each_row((2, 3), tally)
    return sorted({str(row) for failure in tally.wrong for row in failure.rows})


def with_law(text):
    return lambda rule: replace(rule, laws=laws(text))


def with_free(dim):
    """The rule that also calls this dim of the first operand and the first result free."""

    def change(rule: Rule) -> Rule:
        source = rows(replace(rule, kind=None, laws=()))
        assert source
        from spmd.tensor.rules.rule import Factor

        def free(dims):
            return tuple(Factor("new") if d == dim else f for d, f in enumerate(dims))

        return replace(rule, ins=(free(rule.ins[0]), *rule.ins[1:]), outs=(free(rule.outs[0]), *rule.outs[1:]))

    return change


def test_the_oracle_finds_what_is_wrong():
    """Each of these is a trap that a rule fell into somewhere."""
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    affine = wrong_rows(aten.add.Scalar, x, 2.0, rule=with_law("sum: p -> p"))
    product = wrong_rows(aten.mul.Tensor, x, y, rule=with_law("sum: p p -> p"))
    rounded = wrong_rows(aten.div.Tensor_mode, x, y, rounding_mode="floor", rule=with_law("sum: p r -> p"))
    to_int = wrong_rows(aten._to_copy.default, x * 5, dtype=torch.int64, rule=with_law("sum avg: p -> p"))
    falling = wrong_rows(aten.neg.default, x, rule=with_law("max: p -> p"))
    assert affine == rounded[:1] == ["Partial() -> Partial()"] or affine == ["Partial() -> Partial()"]
    assert product == ["Partial(), Partial() -> Partial()"]
    assert rounded == ["Partial(), Replicate() -> Partial()"]
    assert to_int == ["Partial() -> Partial()", "Partial('avg') -> Partial('avg')"]
    assert falling == ["Partial('max') -> Partial('max')"]


def test_the_oracle_finds_dims_that_are_not_free():
    x = torch.randn(4, 5)
    for op, args in ((aten._softmax, (x, 0, False)), (aten.cumsum, (x, 0)), (aten.flip, (x, [0])), (aten.triu, (x,))):
        assert wrong_rows(op.default, *args, rule=with_free(0)) == [
            str(Row((shard(0),), (shard(0),)))
        ], op


def shard(dim):
    from spmd.tensor.placement import Shard

    return Shard(dim)


def test_the_oracle_finds_cut_units():
    """[6, 5] to [30] on 4 ranks: rows of 5 stay together."""
    x = torch.randn(6, 5)

    def cut(rule):
        (dims,), (out,) = rule.ins, rule.outs
        return replace(rule, ins=(dims,), outs=((replace(out[0], unit=1),),))

    assert not wrong_rows(aten.view.default, x, [30])
    assert not wrong_rows(aten.view.default, x, [30], rule=cut)  # on 2 and 3 ranks the cuts agree
    x = torch.randn(5, 6)
    assert wrong_rows(aten.view.default, x, [30], rule=cut) == ["Shard(0) -> Shard(0)"]
