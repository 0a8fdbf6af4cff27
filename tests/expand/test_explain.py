"""What a program says of its parts: the costs add up, and what else a value could be costs what is said."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import Shard
from spmd.expand.choose.price import program_cost
from spmd.expand.explain.explanation import Explanation

BATCH = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
ROWS = {"params": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}, "inputs": BATCH}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = F.relu(self.up(x))
        return x + self.down(h)


class Blocks(nn.Module):
    """Two equal blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)


LINES, FIRST = inspect.getsourcelines(Block)
RELU = next(i for i, line in enumerate(LINES, FIRST) if "F.relu" in line)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def program_of(choose: str = "op", **said) -> spmd.Program:
    """The program of a step of two blocks. Nothing runs."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = spmd.compile(train_step, mesh, choose=choose, bucket_mb=None, **{**ROWS, **said})
    return step.program_for(model, optimizer, torch.randn(8, 16), torch.randn(8, 16))


@pytest.fixture(scope="module")
def program() -> spmd.Program:
    return program_of()


@pytest.fixture(scope="module")
def explained(program) -> Explanation:
    return program.explain("blocks.*.up")


def test_it_says_what_runs_what_it_costs_and_what_else_there_is(explained):
    """The text for two equal modules; views and copies are left out here."""
    lines = re.sub(r"work [\d.]+ us", "work", str(explained)).split("\n")
    ops = [i for i, line in enumerate(lines) if line[10:].split(" ")[0] in ("t", "view", "clone")]
    text = [re.sub(r"^ {10,}", "      ", line) for i, line in enumerate(lines) if i not in ops and i - 1 not in ops]
    assert_expected_inline("\n".join(text), """\
blocks.*.up: 39.1 of 140.6 us, chosen by op
forward   mm x2                f32[8@dp, 16], f32[16, 64@tp] -> f32[8@dp, 64@tp]
      work
forward   add x2               f32[8@dp, 64@tp], f32[64@tp] -> f32[8@dp, 64@tp]
      work
backward  mm                   f32[8@dp, 64@tp], f32[64@tp, 16] -> f32[8@dp, 16] +sum@tp
      work; owes 7.8 us, 256 bytes
backward  mm x2                f32[64@tp, 8@dp], f32[8@dp, 16] -> f32[64@tp, 16] +sum@dp
      work
backward  sum x2               f32[8@dp, 64@tp] -> f32[1, 64@tp] +sum@dp
      work
backward  add                  f32[8@dp, 16], f32[8@dp, 16] -> f32[8@dp, 16]
      work
update    add x2               f32[64@tp, 16], f32[64@tp, 16] -> f32[64@tp, 16]
      work
update    add x2               f32[64@tp], f32[64@tp] -> f32[64@tp]
      work
blocks.*.up, f32[8@dp, 64@tp], stays so with
    placements={'blocks.*.up': {'dp': Shard(0), 'tp': Shard(1)}}
next best: 13.2 us more in sum, the step 21.0 us longer, with
    placements={'blocks.*.up': {'tp': None}}
next best of blocks.*.up.weight, f32[64@tp, 16]: 1.1 us less in sum, the step 8.3 us shorter, with
    params={'blocks.*.up.weight': {}}
next best of blocks.*.up.bias, f32[64@tp]: 1.2 us less in sum, the step 15.6 us shorter, with
    params={'blocks.*.up.bias': {}}""")


def test_the_row_of_an_op_is_said_for_each_axis(explained):
    """What an axis does to the operands and to the result."""
    (product,) = [op for op in explained.ops if op.op == "mm" and op.phase == "forward"]
    assert product.times == 2
    assert product.where == ("model.blocks.0.up", "model.blocks.1.up")
    assert_expected_inline("\n".join(product.rows()), """\
dp: Shard(0), Replicate() -> Shard(0)
tp: Replicate(), Shard(1) -> Shard(1)""")


@pytest.mark.parametrize("choose", ["op", "program"])
def test_the_parts_add_up_to_the_program(choose, program):
    """All ops together cost what the program costs: nothing is counted twice, and nothing left out."""
    program = program if choose == "op" else program_of("program")
    whole = explained_without_alternatives(program, "*")
    assert sum(op.us for op in whole.ops) == pytest.approx(program_cost(program).us)
    assert sum(op.times * (op.moves.nbytes + op.owes.nbytes) for op in whole.ops) == sum_of_bytes(program)


def test_the_parts_of_a_gpt_add_up():
    """Decompositions, recipes, several results, gathered parameters."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab=12))

    def step(model, x, y):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    words = torch.zeros(4, 4, dtype=torch.long)
    compiled = spmd.compile(step, mesh, params={"*.attn.[qkv].*": {"tp": Shard(0)}, "*head*": {"tp": Shard(0)}},
                            inputs=BATCH, fully_shard="dp", bucket_mb=None)  # fmt: skip
    program = compiled.program_for(model, words, words)
    whole = explained_without_alternatives(program, "*")
    assert sum(op.us for op in whole.ops) == pytest.approx(program_cost(program).us)


def averaged_step(model, average, x):
    """Of an average only a term is a sum that is owed, and the rest becomes a term of it."""
    for part in x.chunk(2):
        average = 0.9 * average + 0.1 * model(part).square().mean()
    average.backward()
    return average.detach()


def test_moves_that_keep_sums_owed_belong_to_the_op_that_reads_them():
    mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled = spmd.compile(averaged_step, mesh, inputs={"x": {"dp": Shard(0)}}, bucket_mb=None)
    program = compiled.program_for(nn.Linear(4, 4), torch.zeros(()), torch.zeros(8, 4))
    lines = [node.meta["line"] for node, step in program.steps() if step.kind == "to_partial"]
    assert lines and all("test_explain.py" in line for line in lines), lines
    whole = explained_without_alternatives(program, "*")
    assert sum(op.us for op in whole.ops) == pytest.approx(program_cost(program).us)


def explained_without_alternatives(program, of) -> Explanation:
    """Nothing is tried: no module and no parameter has such a name alone."""
    way = dataclasses.replace(program.reasons.way, write=lambda given: program)
    reasons = dataclasses.replace(program.reasons, way=way)
    return reasons.explain(of)


def sum_of_bytes(program) -> int:
    return sum(c.nbytes for c in program.collectives)


def test_what_else_there_is_costs_what_is_said(program, explained):
    """The first options of each value, pinned as they say."""
    assert [a.value for a in explained.alternatives] == ["blocks.*.up", "blocks.*.up.weight", "blocks.*.up.bias"]
    for alternative in explained.alternatives:
        for option in alternative.options[:2]:
            assert program_cost(program_of(**said(option))).us - explained.us == pytest.approx(option.rise)
        assert alternative.next_best.rise == min(option.rise for option in alternative.options)


def said(option) -> dict:
    """What the option says, as arguments."""
    argument, _, _ = option.said.partition("=")
    given = {option.key: {axis: p for axis, p in option.placements.items() if p != spmd.Replicate()}}
    assert option.said == f"{argument}={given}"
    return {argument: {**given, **ROWS.get(argument, {})}}


def test_so_it_is_for_programs_that_are_chosen():
    """The next best of a line, tried with the choice for the program; pins that are there already stay."""
    pins, mesh = {"down": {"tp": Shard(1)}}, spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, x = Block(), torch.randn(8, 16)

    def chosen(placements) -> spmd.Program:
        step = spmd.compile(train_step, mesh, choose="program", bucket_mb=None, placements=placements)
        return step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), x, x)

    explained = chosen(pins).explain("F.relu(self")
    (alternative,) = explained.alternatives
    assert alternative.value == f"test_explain.py:{RELU}"
    option = alternative.next_best
    again = chosen({option.key: option.placements, **pins})
    assert explained.chosen == "for the program"
    assert program_cost(again).us - explained.us == pytest.approx(option.rise)


@pytest.mark.parametrize("of", ["blocks.0.down.weight", "model.blocks.0.down.weight"])
def test_a_parameter_has_its_readers_its_gradient_and_its_update(of, program):
    """The update is told from those of other parameters, though all are made at one line."""
    ops = explained_without_alternatives(program, of).ops
    phases = {phase: [op.op for op in ops if op.phase == phase] for phase in ("forward", "backward", "update")}
    assert "mm" in phases["forward"] and "mm" in phases["backward"]
    assert phases["update"] == ["clone", "add"], "the first step of momentum"
    assert all(op.times == 1 for op in ops if op.phase == "update")


def test_a_line_has_what_it_calls(program):
    """A line by its place, and by a piece of its code."""
    by_place = explained_without_alternatives(program, f"test_explain.py:{RELU}")
    by_code = explained_without_alternatives(program, "h = F.relu(")
    assert by_place.ops == by_code.ops
    assert {"mm", "relu", "threshold_backward"} <= {op.op for op in by_place.ops}


def test_errors_name_what_is_near(program):
    """A path, a line, and a program that was loaded."""
    errors = []
    for of in ("block.*.up", "test_explain.py:1"):
        with pytest.raises(ValueError) as caught:
            program.explain(of)
        errors.append(re.sub(r"(?<=Near: )(test_explain.py:\d+(, )?)+", "lines", str(caught.value)))
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(program, reasons=None).explain("blocks.*.up")
    assert_expected_inline("\n".join([*errors, str(caught.value)]), """\
explain: 'block.*.up' names no module, parameter or line of the step. Near: blocks.1.up, blocks.0.up, blocks.1.up.bias.
explain: 'test_explain.py:1' names no module, parameter or line of the step. Near: lines.
explain: this program was loaded, and what is kept of a program has no reasons; compile it anew, with no cache""")
