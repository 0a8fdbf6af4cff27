"""What plans send eagerly is what their papers say, and what the table of the documentation says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANS = (
    "Megatron", "sequence parallel", "ZeRO-3", "hybrid", "hybrid, state over all", "data parallel",
    "Megatron and ZeRO-3", "ring", "ring, balanced", "ring, pass-Q", "ring, gathered", "Ulysses", "GShard", "dropless",
)  # fmt: skip
FLAGS = {
    "ZeRO-3": {"reduce_scatter": 4}, "hybrid": {"reduce_scatter": 2, "all_reduce": 1},
    "Megatron and ZeRO-3": {"reduce_scatter": 2}, "hybrid, state over all": {"reduce_scatter": 4 + 2},
    "data parallel": {"all_reduce": 1},
}  # fmt: skip
"""How often a collective has a number for each parameter, which says whether it was used."""


DIFFERS = {"hybrid, state over all": "Hybrid", "hybrid": "Hybrid", "data parallel": "Data parallel",
           "sequence parallel": "Sequence parallel"}  # fmt: skip
PAGE = (ROOT / "docs" / "design" / "counted.md").read_text()


@pytest.fixture(scope="module")
def counted():
    """The benchmark as a module, which imports its helpers from its own folder."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import counted

        yield counted
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in ("counted", "counted_parts", "counted_models", "layer_kinds", "_table"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_sends_what_its_paper_says(counted, plan):
    """Counts are equal, and bytes, but for a number a parameter behind gradients of data-parallel ranks."""
    said, sent = counted.formula(plan), counted.eager(plan)
    assert {kind: n for kind, (n, _) in sent.items()} == {kind: n for kind, (n, _) in said.items()}
    used = counted.ITEM * len(list(counted.model().parameters()))
    flags = {kind: n * used for kind, n in FLAGS.get(plan, {}).items()}
    assert {kind: n - flags.get(kind, 0) for kind, (_, n) in sent.items()} == {kind: n for kind, (_, n) in said.items()}
    assert f"| {plan} | {counted.said(said)} | {counted.said(sent)} |" in PAGE


@pytest.mark.parametrize("plan", PLANS)
def test_a_compiled_plan_sends_what_the_page_says(counted, plan):
    """The same as the eager one, or what differs is written down there, by the name of the plan."""
    eager, compiled = counted.eager(plan), counted.compiled(plan)
    assert f"| {counted.said(eager)} | {counted.said(compiled)} |" in PAGE
    assert eager == compiled or f"- **{DIFFERS.get(plan, plan)}**" in PAGE


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_a_ready_plan_sends_what_the_page_says(counted, name):
    """Eagerly and compiled, with the same all-reduces of activations."""
    import counted_models

    eager, compiled = counted_models.eager(name), counted_models.compiled(name)
    said = [counted.said(counted.total(sent)) for sent in (eager, compiled)]
    assert f"| {name} | {' | '.join(said)} |" in PAGE
    activations = [sum(kind == "all_reduce" and n >= 768 for kind, n in sent) for sent in (eager, compiled)]
    assert activations == [10, 10]


def test_sequence_parallelism_compiled_gathers_and_scatters_as_eagerly(counted):
    """What its norms give is gathered where the layers behind them say so. Replicated gradients are one reduction."""
    want, sent = counted.formula("sequence parallel"), counted.compiled("sequence parallel")
    biases = 4 * counted.WIDTH * counted.BLOCKS
    assert sent.pop("all_reduce") == (1, want.pop("all_reduce")[1] + biases + 4), "and biases of `down`, and the loss"
    assert sent == want
