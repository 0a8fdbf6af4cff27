"""Rules for custom ops are parsed, proved by the oracle, and used by eager, simulated and compiled code."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd import LocalTensorMode, debug, rules
from spmd.expand.compile import compile as spmd_compile
from spmd.sim import run_ranks
from spmd.tensor.cache import forget_decisions
from spmd.tensor.eager.dispatch import lowerings
from spmd.tensor.eager.dtensor import distribute_tensor
from spmd.tensor.rules.book import book
from tests.tensor.single import S0, S1, SUM, R, agree, mesh_of, on_ranks
from tests.ways import run, same

F64 = torch.float64


@torch.library.custom_op("spmdtest::scaled_mm", mutates_args=())
def scaled_mm(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
    return x @ w * scale


scaled_mm.register_fake(lambda x, w, scale: x.new_empty(x.shape[0], w.shape[1]))
scaled_mm.register_autograd(
    lambda ctx, g: (scaled_mm(g, ctx.w.t(), ctx.scale), scaled_mm(ctx.x.t(), g, ctx.scale), None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(x=inputs[0], w=inputs[1], scale=inputs[2]),
)


@torch.library.custom_op("spmdtest::rms", mutates_args=())
def rms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x * x.pow(2).mean(-1, keepdim=True).rsqrt() * weight
    return y if bias is None else y + bias


rms.register_fake(lambda x, weight, bias=None: torch.empty_like(x))


@torch.library.custom_op("spmdtest::low_high", mutates_args=())
def low_high(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.exp() for x in xs]


low_high.register_fake(lambda xs: [torch.empty_like(x) for x in xs])


@torch.library.custom_op("spmdtest::mm", mutates_args=())
def upside_down(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An op with the name of aten's mm, but a different one: each row of its result depends on the first row."""
    return (x + x[:1]) @ w


upside_down.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))


@torch.library.custom_op("spmdtest::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


BILINEAR = ("sum avg: p r -> p", "sum avg: r p -> p")


@pytest.fixture
def rule():
    """`register_rule`; the rules are removed after the test."""
    kept = []

    def register(*args, **kwargs):
        kept.append(spmd.register_rule(*args, **kwargs))
        return kept[-1]

    yield register
    for handle in kept:
        handle.remove()


def two(*shapes):
    return [torch.randn(s, dtype=F64) for s in shapes]


# ---- proofs -----------------------------------------------------------------------------------

RULES = {
    "letters": (scaled_mm, ("m k, k n -> m n",), {"laws": BILINEAR}, [(*two((5, 3), (3, 4)), 2.0)]),
    "dots, and what is optional": (
        rms, ("... _, _, _ -> ... _",), {}, [tuple(two((3, 5, 4), (4,))), tuple(two((5, 4), (4,), (4,)))],
    ),
    "lists": (low_high, ("... -> ...",), {"laws": ["max min: p... -> p..."]}, [(two((5, 2), (5, 2)),)]),
    "a family": (torch.ops.aten.special_i1e.default, (rules.elementwise(),), {}, [tuple(two((5, 2)))]),
    "a function": (
        scaled_mm, (lambda call: rules.equation("m _, _ _ -> m _")(call),), {}, [(*two((5, 3), (3, 4)), 1.5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_right_rules_are_proved(name, rule):
    op, written, options, samples = RULES[name]
    rule(op, *written, **options)
    tally = debug.prove_rule(op, samples)
    assert tally.right >= 6 and not tally.wrong


WRONG = {
    "a dim that is not free": (rms, "... d, d, d -> ... d", {}, "Shard(1), Shard(0) -> Shard(1)"),
    "a kind that is not a sum": (scaled_mm, "m k, k n -> m n", {"kind": "max"}, "-> Partial('max')"),
    "a law that does not hold": (scaled_mm, "m k, k n -> m n", {"laws": ["sum: p p -> p"]}, "Partial(), Partial() ->"),
}
GIVEN = {rms: tuple(two((5, 4), (4,))), scaled_mm: (*two((5, 3), (3, 4)), 2.0)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found_with_their_row(name, rule):
    op, text, options, row = WRONG[name]
    rule(op, text, **options)
    with pytest.raises(debug.WrongRow, match="wrong") as caught:
        debug.prove_rule(op, [GIVEN[op]])
    found = {str(r) for failure in caught.value.tally.wrong for r in failure.rows}
    assert any(row in r for r in found), found


def test_a_proof_of_nothing_is_none(rule):
    x = torch.randn(4, dtype=F64)
    with pytest.raises(ValueError, match="no rule"):
        debug.prove_rule(scaled_mm, [GIVEN[scaled_mm]])
    rule(scaled_mm, "_ _, _ _ -> _ _")
    for samples in ([], [GIVEN[scaled_mm]]):
        with pytest.raises(ValueError, match="nothing was tested"):
            debug.prove_rule(scaled_mm, samples)
    with pytest.raises(TypeError, match=r"write \(x,\)"):
        debug.prove_rule(scaled_mm, [x])
    rule(shapeless, "... -> ...")
    with pytest.raises(ValueError, match="register_fake"):
        debug.prove_rule(shapeless, [(x,)])


# ---- in use -----------------------------------------------------------------------------------

PLACED = ([[R, S0], [R, R]], [[S0, S1], [R, S0]], [[S1, S1], [S0, S0]], [[SUM, R], [R, S1]], [[S0, R], [SUM, S1]])


@pytest.mark.parametrize("registered", [True, False])
def test_custom_ops_give_what_one_device_gives(registered, rule):
    """Forward, and backward by register_autograd, with a rule and without one."""
    if registered:
        rule(scaled_mm, "m k, k n -> m n", laws=BILINEAR)
    x, w = (t.requires_grad_() for t in two((5, 6), (6, 3)))
    agree(lambda x, w: scaled_mm(x.tanh(), w, 2.0).sin(), [x, w], *PLACED)


def test_a_rule_keeps_shards_where_they_are(rule):
    def rank(mesh):
        x, w = distribute_tensor(torch.ones(4, 6), mesh, [S0, S1]), distribute_tensor(torch.ones(6, 3), mesh, [R, S0])
        debug.fallbacks.clear()
        return str(scaled_mm(x, w, 1.0)._spec), len(debug.fallbacks())

    assert on_ranks(rank)[0][0] == "f32[4, 3]"
    rule(scaled_mm, "m k, k n -> m n")
    assert set(on_ranks(rank)) == {("f32[4@dp, 3] +sum@tp", 0)}  # the cached lowering was forgotten


def test_what_has_the_name_of_an_op_of_aten_is_not_that_op():
    """`lib::mm` has no rule because aten has an mm."""
    agree(upside_down, two((4, 6), (6, 2)), [[S0, R], [R, R]], [[S1, R], [S0, R]])


def test_an_op_that_says_no_shapes_runs_on_whole_tensors():
    agree(shapeless, two((5, 4)), [[S0, S1]], [[SUM, R]])


def test_a_function_of_autograd_needs_no_rule():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * g * x * x

    agree(lambda x: Cube.apply(x).exp(), [torch.randn(5, 3, dtype=F64, requires_grad=True)], [[S0, R]], [[SUM, S1]])


def placed_step():
    mesh = mesh_of((2, 2))
    x, w = torch.arange(24.0).reshape(4, 6), torch.arange(18.0).reshape(6, 3).sin()
    x, w = distribute_tensor(x, mesh, [S0, S1]), distribute_tensor(w, mesh, [R, S0]).requires_grad_()
    y = scaled_mm(x, w, 0.5)
    y.square().sum().backward()
    return y.full_tensor(), w.grad.full_tensor()


@pytest.mark.parametrize("way", ["simulated", "gloo"])
def test_each_way_of_running_ranks(way, gloo4):
    found = run(way, gloo4, registered_step)
    x, w = torch.arange(24.0).reshape(4, 6), torch.arange(18.0).reshape(6, 3).sin().requires_grad_()
    y = scaled_mm(x, w, 0.5)
    y.square().sum().backward()
    for got in found:
        torch.testing.assert_close(got, (y.detach(), w.grad))
    assert all(same(found[0], other) for other in found)


def registered_step():
    handle = spmd.register_rule(scaled_mm, "m k, k n -> m n", laws=BILINEAR)
    try:
        return placed_step()
    finally:
        handle.remove()


def test_compiled(rule):
    rule(scaled_mm, "m k, k n -> m n", laws=BILINEAR)
    x, layer = torch.randn(8, 6), torch.nn.Linear(6, 4, bias=False)

    def step(layer, x):
        loss = scaled_mm(x, layer.weight.t(), 0.5).square().sum()
        loss.backward()
        return loss

    want = step(layer, x).detach()
    grad, layer.weight.grad = layer.weight.grad, None
    with LocalTensorMode(4):
        compiled = spmd_compile(step, mesh_of((2, 2)), params={"weight": {"tp": S1}}, inputs={"x": {"dp": S0}})
        got = compiled(layer, x)
        assert not compiled.program.gathered
        torch.testing.assert_close(got.full_tensor().reconcile(), want)
        torch.testing.assert_close(layer.weight.grad.full_tensor().reconcile(), grad)


# ---- mistakes ---------------------------------------------------------------------------------

MISTAKES = {
    "no arrow": ((scaled_mm, "m k, k n"), "one arrow"),
    "a letter from nowhere": ((scaled_mm, "m k, k n -> m z"), "'z' is on the right only"),
    "a letter twice": ((scaled_mm, "m m, m n -> m n"), "'m' is twice in one term"),
    "dots in the middle": ((scaled_mm, "m ..., k n -> m n"), "comes first"),
    "no name": ((scaled_mm, "m 3, k n -> m n"), "'3' is no name"),
    "too few terms": ((scaled_mm, "m k -> m k"), r"1 terms for the 2 tensor arguments .*\(x, w\)"),
    "too many results": ((scaled_mm, "m k, k n -> m, n"), "2 terms for the 1 results"),
    "an unknown op": (("spmdtest::nothing", "m -> m"), "no op that torch knows"),
    "no op at all": ((len, "m -> m"), "no op that torch knows"),
    "no rule at all": ((scaled_mm, 3), "is no rule"),
    "an op of the book": ((torch.ops.aten.mm.default, "m k, k n -> m n"), "has a rule"),
    "an op made of others": ((torch.ops.aten.linear.default, "m k, n k, n -> m n"), "decomposed into other ops"),
    "an op that is rewritten": ((torch.ops.aten.addmm.default, "m n, m k, k n -> m n"), "decomposed into other ops"),
    "random numbers": ((torch.ops.aten.poisson.default, "... -> ..."), "draws random numbers"),
    "no tensors": ((torch.ops.aten.scalar_tensor.default, "->"), "does not make tensors of tensors"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    given, message = MISTAKES[name]
    before = dict(book)
    with pytest.raises((ValueError, TypeError), match=message):
        spmd.register_rule(*given)
    assert book == before


@pytest.mark.parametrize(
    "law, message",
    [("sum: p p p -> p", "has 3 letters for the 2 tensor"), ("total: p r -> p", "'total' is no reduce kind"),
     ("sum: p x -> p", "'x'"), ("sum p r -> p", "is no law"), ("sum: p r -> p p", "2 letters for the 1 results")],
)  # fmt: skip
def test_laws_are_read(law, message):
    with pytest.raises(ValueError, match=message):
        spmd.register_rule(scaled_mm, "m k, k n -> m n", laws=[law])


def test_registering_twice(rule):
    first = rule(scaled_mm, "m k, k n -> m n")
    with pytest.raises(ValueError, match="has a rule, 'm k, k n -> m n'"):
        spmd.register_rule("spmdtest::scaled_mm", "m _, _ n -> m n")
    first.remove()
    second = rule(torch.ops.spmdtest.scaled_mm.default, "m _, _ n -> m n")
    first.remove()  # a second remove() does nothing
    assert book["spmdtest::scaled_mm"] is second.rule


def test_a_call_that_does_not_fit_says_so(rule):
    rule(rms, "tokens _, _, _ -> tokens _")

    def rank(mesh):
        x, w = distribute_tensor(torch.ones(2, 4, 3), mesh, [S0, R]), distribute_tensor(torch.ones(3), mesh, [R, R])
        with pytest.raises(ValueError, match=r"says 'tokens _' of f32.*which has 3 dims"):
            rms(x, w)
        return True

    assert all(on_ranks(rank))


def test_registering_drops_what_was_decided(rule):
    run_ranks(lambda rank: distribute_tensor(torch.ones(4), mesh_of((1,)), [S0]) + 1, 1)
    assert len(lowerings)
    rule(scaled_mm, "m k, k n -> m n")
    assert not len(lowerings)
    forget_decisions()
