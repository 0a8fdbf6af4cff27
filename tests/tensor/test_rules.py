"""The book on one page, groups and units of views, the notation of laws, and decompositions against their ops."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from spmd.tensor.rules.book import book, rule_of
from spmd.tensor.rules.counts import count_decompositions
from spmd.tensor.rules.decompositions import IN_PLACE, decompose, decompositions
from spmd.tensor.rules.distances import distance_decompositions
from spmd.tensor.rules.families import groups
from spmd.tensor.rules.joins import join_decompositions
from spmd.tensor.rules.linear_algebra import matrix_decompositions
from spmd.tensor.rules.lists import list_decompositions
from spmd.tensor.rules.masked import mask_decompositions
from spmd.tensor.rules.norms import norm_decompositions
from spmd.tensor.rules.random_ops import random_decompositions
from spmd.tensor.rules.rule import Factor, Law, Rule, laws, rows
from spmd.tensor.rules.scans import scan_decompositions
from tests.tensor.oracle import Capture, Case, Sample, call_of, close
from tests.tensor.samples import aten, b, d, f, i, pos, s, table

PAGE = Path(__file__).parent / "golden" / "book.txt"


# ---- the page ---------------------------------------------------------------------------------


def line(case: Case) -> str:
    """A line for one op: the shapes of its operands, its rule, and the other fields of the rule."""
    rule = case.rule
    shapes = ", ".join(str(list(x.shape)) for x in case.ins)
    more = [f"{rule.kind}" if summed(rule) else "", f"sizes={rule.sizes}" if rule.sizes else ""]
    more += [f"nonempty={' '.join(sorted(map(str, rule.nonempty)))}" if rule.nonempty else ""]
    more += [f"added={' '.join(map(str, sorted(rule.added)))}" if rule.added else ""]
    more += [f"[{'; '.join(map(spelled, rule.laws))}]" if rule.laws else ""]
    return f"{case.call.name}({shapes}): {'  '.join([str(rule), *filter(None, more)])}"


def summed(rule: Rule) -> bool:
    """Whether some factor leaves a Partial."""
    return any(p.is_partial() for row in rows(rule) if row.factor is not None for p in row.outs)


def spelled(law: Law) -> str:
    return f"{' '.join(law.kinds)}: {' '.join(law.ins)} -> {' '.join(law.outs)}"


def page() -> str:
    """The first sample of each op that has a rule, in the order of the book."""
    first: dict[str, str] = {}
    for sample in table():
        case = Case(sample)
        if case.rule is not None and case.call.name in book:
            first.setdefault(case.call.name, line(case))
    return "".join(f"{first[name]}\n" for name in book if name in first)


def test_the_book_reads_as_it_did():
    """A changed rule is a changed line here. To accept: SPMD_ACCEPT=1 pytest tests/tensor/test_rules.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = page()
    if os.environ.get("SPMD_ACCEPT"):
        PAGE.write_text(now)
    assert now == PAGE.read_text()


# ---- what has a rule --------------------------------------------------------------------------


def rule(sample: Sample) -> Rule | None:
    return Case(sample).rule


def test_pointwise_ops_need_no_row():
    assert "cos" not in book
    assert str(rule(s("cos", f(4, 5)))) == "0 1 -> 0 1"


@pytest.mark.parametrize(
    "sample",
    [
        s("bernoulli", pos(4)),
        s("rrelu", f(4), 0.1, 0.3, True),
        s("native_dropout", f(4), 0.5, True),
        s("equal", f(4), f(4)),
        s("nonzero", f(4)),
        s("squeeze", f(4, 1)),
        s("view.dtype", f(4), torch.int32),
        s("_scaled_dot_product_flash_attention_for_cpu", f(1, 2, 3, 4), f(1, 2, 3, 4), f(1, 2, 3, 4), 0.0),
    ],
    ids=lambda sample: str(sample.op),
)
def test_random_and_shapeless_ops_have_no_rule(sample):
    if "attention" in str(sample.op):  # the CPU kernel refuses dropout, so the call is run without it
        sample, want = Sample(sample.op, (*sample.args[:3], 0.5), {}), [f(1, 2, 3, 4), f(1, 2, 3)]
        assert rule_of(call_of(sample, want)) is None
    else:
        assert rule(sample) is None


def attention_call(name, *more, outs, heads=6, **kwargs):
    """A call of an op without a kernel here. The shapes of its results are given."""
    q, kv = f(4, 6, 64, 16), f(4, heads, 64, 16)
    return call_of(Sample(getattr(aten, name).default, (q, kv, kv, *more), kwargs), outs)


def test_attention_of_accelerators():
    """Batch and head are free; random state, sequence bounds and lengths are the same on every rank."""
    out, lse, one = f(4, 6, 64, 16), f(4, 6, 64), i()
    heads, stats = "b h _ _", "b h _"
    flash = attention_call(
        "_scaled_dot_product_flash_attention", 0.0, True, outs=[out, lse, None, None, 64, 64, i(2), one, f(0)]
    )
    assert str(rule_of(flash)) == f"{heads}, {heads}, {heads} -> {heads}, {stats}, *, *, *, *, *, *, *"
    efficient = attention_call(
        "_scaled_dot_product_efficient_attention", f(4, 1, 64, 64), True, outs=[out, lse, one, one]
    )
    assert str(rule_of(efficient)) == f"{heads}, {heads}, {heads}, b _ _ _ -> {heads}, {stats}, *, *"
    stats_4d = [out, f(4, 6, 64, 1), None, None, 64, 64, one, one, None]
    cudnn = attention_call("_scaled_dot_product_cudnn_attention", None, True, outs=stats_4d)
    assert str(rule_of(cudnn)) == f"{heads}, {heads}, {heads} -> {heads}, b h _ _, *, *, *, *, *, *, *"
    shared = attention_call(
        "_scaled_dot_product_flash_attention", outs=[out, lse, None, None, 64, 64, i(2), one, f(0)], heads=2
    )
    assert str(rule_of(shared)).startswith("b 3*h _ _, b h _ _, b h _ _ -> b 3*h _ _, b 3*h _")


def test_attention_backward_of_accelerators():
    """The gradient of a bias that heads share is summed over them."""
    q, lse, one, bias = f(4, 6, 64, 16), f(4, 6, 64), i(), f(4, 1, 64, 64)
    op = aten._scaled_dot_product_efficient_attention_backward.default
    args = (q, q, q, q, bias, q, lse, one, one, 0.0, [True, True, True, True])
    efficient = rule_of(call_of(Sample(op, args, {}), [q, q, q, bias]))
    h = "b h _ _"
    assert str(efficient) == f"{h}, {h}, {h}, {h}, b _ _ _, {h}, b h _, ,  -> {h}, {h}, {h}, b _ _ _"
    by_head = next(row for row in rows(efficient) if row.factor == "h")
    assert str(by_head.outs[3]) == "Partial()"
    op = aten._scaled_dot_product_flash_attention_backward.default
    args = (q, q, q, q, q, lse, None, None, 64, 64, 0.0, True, i(2), one)
    flash = rule_of(call_of(Sample(op, args, {}), [q, q, q]))
    assert str(flash) == f"{h}, {h}, {h}, {h}, {h}, b h _, _,  -> {h}, {h}, {h}"


def test_rms_norm_backward_of_accelerators():
    x, w = f(4, 5, 6), f(6)
    args = (x, x, [6], f(4, 5, 1), w, [True, True])
    found = rule_of(call_of(Sample(aten._fused_rms_norm_backward.default, args, {}), [x, w]))
    assert str(found) == "0 1 _, 0 1 _, 0 1 _, _ -> 0 1 _, _"
    assert [str(row.outs[1]) for row in rows(found) if row.factor is not None] == ["Partial()", "Partial()"]


# ---- laws and dtypes --------------------------------------------------------------------------


def kinds(sample: Sample) -> set[str]:
    return {kind for law in rule(sample).laws for kind in law.kinds}


def test_dtypes_narrow_the_laws():
    """Integers have no average, bools no sum, complex numbers no order, and a narrowing cast is not linear."""
    assert kinds(s("clone", f(4))) == {"sum", "avg", "max", "min", "product"}
    assert kinds(s("clone", i(4))) == {"sum", "max", "min", "product"}
    assert kinds(s("clone", b(4))) == {"max", "min"}
    assert kinds(s("clone", f(4, dtype=torch.complex64))) == {"sum", "avg"}
    assert kinds(s("neg", i(4, dtype=torch.uint8))) == {"sum"}
    bf16 = f(4, dtype=torch.bfloat16)
    assert kinds(s("_to_copy", f(4), dtype=torch.bfloat16)) == {"max", "min"}
    assert kinds(s("_to_copy", bf16, dtype=torch.float32)) == {"sum", "avg", "max", "min"}
    assert kinds(s("_to_copy", f(4), dtype=torch.int64)) == set()
    assert kinds(s("sum", i(4, dtype=torch.int32))) == set()  # the terms may wrap around where the sum does not


# ---- notation and rows ------------------------------------------------------------------------


def test_rows_of_a_contraction():
    found = rows(rule(s("mm", f(4, 5), f(5, 3))))
    assert [str(row) for row in found] == [
        "Replicate(), Replicate() -> Replicate()",
        "Shard(0), Replicate() -> Shard(0)",
        "Shard(1), Shard(0) -> Partial()",
        "Replicate(), Shard(1) -> Shard(1)",
        "Partial(), Replicate() -> Partial()",
        "Partial('avg'), Replicate() -> Partial('avg')",
        "Replicate(), Partial() -> Partial()",
        "Replicate(), Partial('avg') -> Partial('avg')",
    ]


def test_laws_repeat_their_last_letter_and_turn_around():
    assert laws("sum: p r... -> p...") == (Law(("sum",), ("p", "r..."), ("p...",)),)
    three = Rule(((Factor(0),),) * 3, ((Factor(0),), None), laws=laws("sum: p r... -> p..."))
    assert str(rows(three)[-1]) == "Partial(), Replicate(), Replicate() -> Partial(), Replicate()"
    falling = Rule(((Factor(0),),), ((Factor(0),),), laws=laws("max min: p -> q"))
    assert [str(row) for row in rows(falling)[-2:]] == [
        "Partial('max') -> Partial('min')",
        "Partial('min') -> Partial('max')",
    ]
    assert len(rows(Rule(((Factor(0),),), ((Factor(0),),), laws=laws("sum: p p -> p")))) == 2  # about two operands


def test_a_factor_without_a_kind_is_not_summed():
    """With no kind, a factor that only operands have must be replicated, not left as a Partial."""
    assert Rule(((Factor("k"),),), ((),)).factors == ()
    assert Rule(((Factor("k"),),), ((),), "sum").factors == ("k",)


# ---- reshape ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst, expected",
    [
        ((6, 5), (30,), "0 _ -> 5*0"),
        ((30,), (6, 5), "5*0 -> 0 _"),
        ((4, 6), (8, 3), "0 _ -> 2*0 _"),
        ((6, 4), (8, 3), "3*0 _ -> 4*0 _"),
        ((2, 3, 4), (6, 4), "0 _ 2 -> 3*0 2"),
        ((4, 1, 6), (4, 6), "0 _ 2 -> 0 2"),
        ((4, 6), (1, 4, 1, 6, 1), "0 1 -> _ 0 _ 1 _"),
        ((1, 4), (4,), "_ 1 -> 1"),
        ((1, 1), (), "_ _ -> "),
        ((0, 4), (2, 0), "_ _ -> _ _"),
        ((5, 4), (2, 10), "5*0 _ -> 2*0 _"),
    ],
)
def test_reshape_ties_the_leading_dims_of_groups(src, dst, expected):
    assert str(rule(s("view", f(*src), list(dst)))) == expected


def test_groups_end_where_products_meet():
    assert groups((2, 3, 4), (6, 2, 2)) == [(range(2), range(1)), (range(2, 3), range(1, 3))]
    assert groups((0, 3), (3, 0)) == []


# ---- decompositions ---------------------------------------------------------------------------


def equal(got, want) -> bool:
    if not isinstance(want, (torch.Tensor, list, tuple)):
        return got == want
    got, want = (x if isinstance(x, (list, tuple)) else (x,) for x in (got, want))
    return all(
        g.dtype == w.dtype and g.shape == w.shape and close(g, w, 2e-2 if w.itemsize == 2 else 1e-6)
        for g, w in zip(got, want, strict=True)
    )


def nan(*shape):
    return torch.full(shape, float("nan"))


half, bf16, inf = torch.float16, torch.bfloat16, float("inf")


def decomposed():
    """Every decomposition, with samples on which it might differ from its op."""
    yield s("addmm", f(5), f(4, 3), f(3, 5))
    yield s("addmm", f(4, 5), f(4, 3), f(3, 5), beta=0.5, alpha=2)
    yield s("addmm", nan(5), f(4, 3), f(3, 5), beta=0)
    yield s("addmm", f(5), f(4, 0), f(0, 5))
    yield s("addmm", f(5), f(0, 3), f(3, 5))
    yield s("addmm", i(5), i(4, 3), i(3, 5), beta=2, alpha=3)
    yield s("addmm", f(5, dtype=bf16), f(4, 3, dtype=bf16), f(3, 5, dtype=bf16))
    yield s("addmm", f(), f(4, 3), f(3, 5), alpha=0)
    yield s("baddbmm", f(4, 5), f(2, 4, 3), f(2, 3, 5), beta=2, alpha=0.5)
    yield s("baddbmm", nan(2, 4, 5), f(2, 4, 3), f(2, 3, 5), beta=0.0)
    yield s("addmv", f(4), f(4, 3), f(3), beta=2, alpha=0.5)
    yield s("addmv", f(1), f(4, 3), f(3))
    yield s("addbmm", f(4, 5), f(2, 4, 3), f(2, 3, 5), beta=2, alpha=0.5)
    yield s("addr", f(4, 5), f(4), f(5), beta=0.5, alpha=2)
    yield s("addr", nan(5), f(4), f(5), beta=0)
    yield s("addr", f(1), f(4), f(0))
    yield s("linear", f(2, 4, 3), f(5, 3), f(5))
    yield s("linear", f(0, 3), f(5, 3), f(5))
    for x in (f(4, 5), d(4, 5), f(4, 5, dtype=half), f(4, 5, dtype=bf16), f(4, 5, dtype=torch.complex64), f(), f(0, 5)):
        yield s("mean", x)
        if x.ndim:
            yield s("mean.dim", x, [0])
            yield s("mean.dim", x, [-1], True)
            yield s("mean.dim", x, [])
            yield s("mean.dim", x, None, True)
            yield s("mean.dim", x, [0, 1])
    yield s("mean", torch.full((4096,), 60000.0, dtype=half))  # the sum overflows, the mean does not
    yield s("mean", i(4, 5), dtype=torch.float32)
    yield s("mean", f(4, 5, dtype=bf16), dtype=torch.float32)
    yield s("mean.dim", f(4, 5), [0], dtype=torch.float64)
    yield s("mean.dim", f(4, 5), [0], dtype=bf16)
    for scores, target in ((f(5, 7), i(5)), (f(0, 7), i(0)), (f(7), i()), (f(5, 7), torch.full((5,), -100))):
        for weight in (None, pos(7)):
            yield s("nll_loss_forward", scores, target, weight, 1, -100)
    yield s("nll_loss_forward", f(5, 7), torch.tensor([0, 1, -100, 2, -100]), pos(7), 1, -100)
    for n in (2, 0):
        yield s("nll_loss2d_forward", f(n, 3, 4, 2), i(n, 4, 2, high=3), pos(3), 1, -100)
    for shape in ((4, 5), (0, 5)):
        x, y, g = pos(*shape), pos(*shape), f()
        per_op = {"mse_loss": (), "smooth_l1_loss": (0.3,), "huber_loss": (0.3,), "soft_margin_loss": ()}
        for name, extra in per_op.items():
            yield s(name, x, y, 1, *extra)
            yield s(name, x, y, 2, *extra)
            yield s(f"{name}_backward", g, x, y, 1, *extra)
        yield s("binary_cross_entropy", x, y, pos(5), 1)
        yield s("binary_cross_entropy", x, y, None, 2)
        yield s("binary_cross_entropy_backward", g, x, y, pos(5), 1)
        for reduction in (0, 1, 2):
            yield s("binary_cross_entropy_with_logits", f(*shape) * 9, y, None, pos(5), reduction)
            yield s("binary_cross_entropy_with_logits", f(*shape) * 9, y, pos(5), None, reduction)
    yield s("new_empty_strided", f(4, 5), [0, 3], [3, 1])  # no value to compare
    for p in (2, 1, 0, 3, 0.5, -1, float("inf"), float("-inf")):
        yield s("linalg_vector_norm", f(4, 5), p)
        yield s("linalg_vector_norm", f(4, 5), p, [-1], True)
    with_nan = torch.tensor([1.0, inf, float("nan")])
    for x in (f(4, 5, dtype=bf16), torch.full((4, 5), 300.0, dtype=half), f(0, 5), f(), with_nan):
        yield s("linalg_vector_norm", x)
    yield s("linalg_vector_norm", f(4, 5, dtype=bf16), dtype=torch.float32)
    yield s("mse_loss", f(4, 1), f(5))  # broadcast: the count is that of the result
    for x in (f(4, 1, 5, 1), f(1), f(), f(4, 5)):
        yield s("squeeze", x)
        yield s("squeeze.dim", x, -1)
        yield s("squeeze.dim", x, 0)
        yield s("squeeze_copy", x)
        yield s("squeeze_copy.dim", x, -1)
    yield s("squeeze.dims", f(4, 1, 5), [0, 1])
    yield s("_has_same_storage_numel", f(4, 5), f(5)[:2])
    yield s("_has_same_storage_numel", f(4, 5), d(20))


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


torch.manual_seed(0)
DECOMPOSED = list(decomposed())


@pytest.mark.parametrize("sample", DECOMPOSED, ids=str)
def test_a_decomposition_is_its_op(sample, quiet):
    """Values, dtype and shape, NaN and empty tensors included."""
    got = decompose(sample.op, sample.args, sample.kwargs)
    assert got is not NotImplemented
    assert equal(got, sample.op(*sample.args, **sample.kwargs))


LEAVE_PLAIN = {
    *mask_decompositions, *count_decompositions, *matrix_decompositions, *distance_decompositions, *join_decompositions,
    *(getattr(aten, f"{name}_").default for name in IN_PLACE),
    aten.multi_margin_loss.default, aten.multi_margin_loss_backward.default, aten.batch_norm_backward.default,
    aten.multilabel_margin_loss_forward.default, aten.multilabel_margin_loss_backward.default,
    aten._embedding_bag_backward.default, aten.split.Tensor, aten.unsafe_split.Tensor,
}  # fmt: skip
"""Ops whose decompositions are for tensors that are distributed, and that stay as they are for others."""


def test_each_decomposition_has_a_sample():
    """Those of list ops are in test_lists, those that draw in test_random, others in test_norms and test_scans.

    Those that leave plain tensors alone are in test_not_gathered.

    The gradients of a product, in test_products: for them torch has no kernel on CPU. Those of a convolution, in
    tests/expand/test_spelled: they are only spelled out where a rank has no images.
    """
    elsewhere = {*list_decompositions(), *random_decompositions, *norm_decompositions, *scan_decompositions}
    elsewhere |= {aten.linear_backward.default, aten.convolution_backward.default}
    elsewhere |= LEAVE_PLAIN
    assert set(decompositions) - elsewhere == {sample.op for sample in DECOMPOSED}


@pytest.mark.parametrize(
    "sample",
    [
        s("mse_loss", f(4), f(4), 0),
        s("mse_loss_backward", f(), f(4), f(4), 2),
        s("nll_loss_forward", f(4, 3), i(4, high=3), None, 2, -100),
        s("squeeze.dims", f(4, 1), [1]),
        s("linalg_vector_norm", f(4, dtype=torch.complex64)),
        s("mm", f(4, 5), f(5, 3)),
    ],
    ids=str,
)
def test_what_is_safe_is_left_alone(sample):
    assert decompose(sample.op, sample.args, sample.kwargs) is NotImplemented


@pytest.mark.parametrize(
    "sample",
    [
        s("mean", i(4)),
        s("mean.dim", f(4), [0], dtype=torch.int64),
        s("linalg_vector_norm", f(0, 5), inf),
        s("addmm", f(2, 4, 5), f(4, 3), f(3, 5)),
        s("addmm", f(3), f(4, 3), f(3, 5)),
        s("addmm", f(7, 5), f(1, 3), f(3, 5)),
        s("addmm", d(5), f(4, 3), f(3, 5)),
    ],
    ids=str,
)
def test_what_the_op_refuses_is_refused(sample):
    with pytest.raises(RuntimeError):
        sample.op(*sample.args, **sample.kwargs)
    with pytest.raises((RuntimeError, IndexError)):
        decompose(sample.op, sample.args, sample.kwargs)


def test_no_decomposition_leaves_an_op_without_a_rule(quiet):
    """The ops of a decomposition have rules, so no operand has to be gathered."""
    for sample in DECOMPOSED:
        with Capture() as capture:
            decompose(sample.op, sample.args, sample.kwargs)
        steps = [t for t in capture.samples if t.op.namespace == "aten" and not decomposes(t)]
        without = [t for t in steps if Case(t).rule is None]
        assert not without, f"{sample}: {', '.join(map(str, without))}"


def decomposes(sample: Sample) -> bool:
    return decompose(sample.op, sample.args, sample.kwargs) is not NotImplemented
