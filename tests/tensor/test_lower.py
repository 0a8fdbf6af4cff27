"""Lowerings: which rows are chosen for the calls of a transformer, and which moves they need. Pure, on any rank."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest
import torch

from spmd import _torch
from spmd.mesh import as_rank, init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor.call import Call
from spmd.tensor.lower import Lowering, is_cheaper_by_rule, lower
from spmd.tensor.recipes import recipe_for
from spmd.tensor.redistribute.plan import forget
from spmd.tensor.rules.meta import out_metas
from spmd.tensor.spec import Spec, parse_spec

aten = torch.ops.aten
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
FOUR = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def lowered(op, *args, mesh=MESH, **kwargs) -> Lowering:
    """The lowering of a call whose tensors are written as specs."""

    def read(x):
        if isinstance(x, list):
            return [read(y) for y in x]
        return parse_spec(x, mesh) if isinstance(x, str) and "[" in x else x

    args, kwargs = tuple(map(read, args)), {k: read(v) for k, v in kwargs.items()}
    outs = out_metas(op, args, kwargs, torch.device("cpu"))
    return lower(Call(op, args, kwargs, outs), in_place=_torch.writes_first(op))


def shown(call: tuple, mesh=MESH) -> str:
    """`op(operands) -> results`, and a line for each operand that must be moved."""
    op, *args = call
    *args, options = [*args, {}] if not args or not isinstance(args[-1], dict) else args
    found = lowered(op, *args, mesh=mesh, **options)
    name = re.sub("^aten::|native_|_scaled_dot_product_", "", _torch.qualified_name(op))
    lines = [f"{name}({listed(p.src for p in found.plans)}) -> {listed(found.outs)}"]
    for p in found.plans:
        if p.steps:
            lines.append(f"    {p.src}: {', '.join(str(s) for s in p.steps)}")
    return "\n".join(lines)


def listed(specs) -> str:
    """The specs, with a count in place of equal neighbours."""
    runs = [(str(spec), len(list(run))) for spec, run in itertools.groupby(specs)]
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in runs)


X = "f32[8@dp, 8, 32]"  # the residual stream: batch over dp
ROWS = "f32[64@dp, 32]"
HEADS = "f32[8@dp, 4@tp, 8, 8]"
LSE = "f32[8@dp, 4@tp, 8]"

TYPICAL = [
    # column-parallel and row-parallel linear, forward and backward
    (aten.mm.default, ROWS, "f32[32, 128@tp]"),
    (aten.add.Tensor, "f32[64@dp, 128@tp]", "f32[128@tp]"),
    (aten.gelu.default, "f32[64@dp, 128@tp]"),
    (aten.mm.default, "f32[64@dp, 128@tp]", "f32[128@tp, 32]"),
    (aten.add.Tensor, "f32[64@dp, 32] +sum@tp", "f32[32]"),
    (aten.mm.default, ROWS, "f32[32, 128@tp]"),
    (aten.mm.default, "f32[128@tp, 64@dp]", ROWS),
    (aten.sum.dim_IntList, "f32[64@dp, 128@tp]", [0], True),
    # residual stream
    (aten.view.default, "f32[64@dp, 32] +sum@tp", [8, 8, 32]),
    (aten.add.Tensor, X, "f32[8@dp, 8, 32] +sum@tp"),
    (aten.native_layer_norm.default, X, [32], "f32[32]", "f32[32]", 1e-5),
    (
        aten.native_layer_norm_backward.default, X, X, [32], "f32[8@dp, 8, 1]", "f32[8@dp, 8, 1]", "f32[32]",
        "f32[32]", [True, True, True],
    ),
    # attention
    (aten.view.default, "f32[64@dp, 32@tp]", [8, 8, 4, 8]),
    (aten.transpose.int, "f32[8@dp, 8, 4@tp, 8]", 1, 2),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, HEADS, HEADS, HEADS, 0.0, True),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, HEADS, HEADS, HEADS, HEADS, HEADS, LSE, 0.0,
        True,
    ),
    # embedding and loss
    (aten.embedding.default, "f32[256, 32]", "i64[8@dp, 8]"),
    (aten.embedding_dense_backward.default, X, "i64[8@dp, 8]", 256, -1, False),
    (aten._log_softmax.default, "f32[64@dp, 256]", 1, False),
    (aten._log_softmax.default, "f32[64@dp, 256@tp]", 1, False),
    (aten.nll_loss_forward.default, "f32[64@dp, 256]", "i64[64@dp]", None, 2, -100),
    (aten.div.Tensor, "f32[] +sum@dp", "f32[] +sum@dp"),
    (aten.nll_loss_backward.default, "f32[]", "f32[64@dp, 256]", "i64[64@dp]", None, 2, -100, "f32[] +sum@dp"),
    # the optimiser, in place: the gradient still owes a sum over dp
    (aten.lerp_.Scalar, "f32[128@tp, 32]", "f32[128@tp, 32] +sum@dp", 0.1),
    (aten.addcdiv_.default, "f32[128@tp, 32]", "f32[128@tp, 32]", "f32[128@tp, 32]", {"value": -0.1}),
    (aten.zero_.default, "f32[128@tp, 32] +sum@dp"),
    # owed sums that pass through, and owed sums that must be reduced first
    (aten.mul.Tensor, "f32[8, 8] +sum@tp", "f32[]"),
    (aten.mul.Tensor, "f32[8, 8] +sum@tp", "f32[8, 8] +sum@tp"),
    (aten.add.Scalar, "f32[8, 8] +sum@tp", 1),
    (aten.exp.default, "f32[8, 8] +max@tp"),
    (aten.cat.default, ["f32[8@dp, 8]", "f32[8@dp, 4]"], 1),
    (aten.linalg_inv_ex.default, "f32[8@dp, 8]"),
]


class TestTypicalCalls(expecttest.TestCase):
    def test_rows_and_moves_of_a_transformer(self):
        """The lowerings have Megatron's communication: one reduction in each half of a block, and nothing else."""
        self.assertExpectedInline("\n".join(map(shown, TYPICAL)), """\
mm(f32[64@dp, 32], f32[32, 128@tp]) -> f32[64@dp, 128@tp]
add(f32[64@dp, 128@tp], f32[128@tp]) -> f32[64@dp, 128@tp]
gelu(f32[64@dp, 128@tp]) -> f32[64@dp, 128@tp]
mm(f32[64@dp, 128@tp], f32[128@tp, 32]) -> f32[64@dp, 32] +sum@tp
add(f32[64@dp, 32] +sum@tp, f32[32]) -> f32[64@dp, 32] +sum@tp
    f32[32]: to_partial(tp, 'sum')
mm(f32[64@dp, 32], f32[32, 128@tp]) -> f32[64@dp, 128@tp]
mm(f32[128@tp, 64@dp], f32[64@dp, 32]) -> f32[128@tp, 32] +sum@dp
sum(f32[64@dp, 128@tp]) -> f32[1, 128@tp] +sum@dp
view(f32[64@dp, 32] +sum@tp) -> f32[8@dp, 8, 32] +sum@tp
add(f32[8@dp, 8, 32], f32[8@dp, 8, 32] +sum@tp) -> f32[8@dp, 8, 32]
    f32[8@dp, 8, 32] +sum@tp: all_reduce(tp)
layer_norm(f32[8@dp, 8, 32], 2 x f32[32]) -> f32[8@dp, 8, 32], 2 x f32[8@dp, 8, 1]
layer_norm_backward(2 x f32[8@dp, 8, 32], 2 x f32[8@dp, 8, 1], 2 x f32[32]) -> f32[8@dp, 8, 32], 2 x f32[32] +sum@dp
view(f32[64@dp, 32@tp]) -> f32[8@dp, 8, 4@tp, 8]
transpose(f32[8@dp, 8, 4@tp, 8]) -> f32[8@dp, 4@tp, 8, 8]
flash_attention_for_cpu(3 x f32[8@dp, 4@tp, 8, 8]) -> f32[8@dp, 4@tp, 8, 8], f32[8@dp, 4@tp, 8]
flash_attention_for_cpu_backward(5 x f32[8@dp, 4@tp, 8, 8], f32[8@dp, 4@tp, 8]) -> 3 x f32[8@dp, 4@tp, 8, 8]
embedding(f32[256, 32], i64[8@dp, 8]) -> f32[8@dp, 8, 32]
embedding_dense_backward(f32[8@dp, 8, 32], i64[8@dp, 8]) -> f32[256, 32] +sum@dp
_log_softmax(f32[64@dp, 256]) -> f32[64@dp, 256]
_log_softmax(f32[64@dp, 256@tp]) -> f32[64@dp,tp, 256]
    f32[64@dp, 256@tp]: all_to_all(tp, 1, 0)
nll_loss_forward(f32[64@dp, 256], i64[64@dp]) -> 2 x f32[] +sum@dp
div(2 x f32[] +sum@dp) -> f32[] +sum@dp
    f32[] +sum@dp: all_reduce(dp)
nll_loss_backward(f32[], f32[64@dp, 256], i64[64@dp], f32[] +sum@dp) -> f32[64@dp, 256]
    f32[] +sum@dp: all_reduce(dp)
lerp_(f32[128@tp, 32], f32[128@tp, 32] +sum@dp) -> f32[128@tp, 32]
    f32[128@tp, 32] +sum@dp: all_reduce(dp)
addcdiv_(3 x f32[128@tp, 32]) -> f32[128@tp, 32]
zero_(f32[128@tp, 32] +sum@dp) -> f32[128@tp, 32] +sum@dp
mul(f32[8, 8] +sum@tp, f32[]) -> f32[8, 8] +sum@tp
mul(2 x f32[8, 8] +sum@tp) -> f32[8, 8] +sum@tp
    f32[8, 8] +sum@tp: all_reduce(tp)
add(f32[8, 8] +sum@tp) -> f32[8, 8]
    f32[8, 8] +sum@tp: all_reduce(tp)
exp(f32[8, 8] +max@tp) -> f32[8, 8] +max@tp
cat(f32[8@dp, 8], f32[8@dp, 4]) -> f32[8@dp, 12]
linalg_inv_ex(f32[8@dp, 8]) -> f32[8, 8], i32[]
    f32[8@dp, 8]: all_gather(dp, 0)""")


VIEWS = [
    ("f32[6@dp, 5]", [30], "f32[30@dp/5]"),
    ("f32[30@dp/5]", [6, 5], "f32[6@dp, 5]"),
    ("f32[30@dp/5]", [6, 5, 1], "f32[6@dp, 5, 1]"),
    ("f32[6@dp, 5, 4]", [30, 4], "f32[30@dp/5, 4]"),
    ("f32[6@dp, 5, 4]", [6, 20], "f32[6@dp, 20]"),
    ("f32[6@dp, 20]", [6, 5, 4], "f32[6@dp, 5, 4]"),
    ("f32[30@dp/5]", [15, 2], "f32[15@dp/5, 2]"),  # 10 is five rows of 2
    ("f32[30@dp/3]", [15, 2], "f32[15@dp, 2]"),  # 9 is not a multiple of 2: neighbours exchange what is over
    ("f32[6@dp, 10]", [12, 5], "f32[12@dp/2, 5]"),
    ("f32[12@dp/2, 5]", [60], "f32[60@dp/10]"),
    ("f32[36@dp/6]", [3, 12], "f32[3@dp, 12]"),  # 12, 12, 12, 0: the same cuts as in units of 4, and of 12
    ("f32[8@dp, 5]", [40], "f32[40@dp]"),
    ("f32[1, 6@dp, 5]", [6, 5], "f32[6@dp, 5]"),
]


@pytest.mark.parametrize("src, shape, dst", VIEWS, ids=[f"{s} to {shape}" for s, shape, _ in VIEWS])
def test_views_keep_uneven_shards_where_they_are(src, shape, dst):
    """Rows that stay together become the unit of the result; blocks do not move, unless they begin inside a row."""
    found = lowered(aten.view.default, src, shape, mesh=FOUR)
    assert str(found.outs[0]) == dst
    assert bool(found.plans[0].steps) == (src == "f32[30@dp/3]")


def test_an_operand_is_reduced_where_it_is_smallest():
    """A partial gradient and a sharded weight: the gradient is sliced, then reduced. The weight stays as it is."""
    assert shown((aten.add.Tensor, "f32[8, 16@tp]", "f32[8, 16] +sum@dp")).splitlines() == [
        "add(f32[8, 16@tp], f32[8, 16] +sum@dp) -> f32[8, 16@tp]",
        "    f32[8, 16] +sum@dp: slice(tp, 1), all_reduce(dp)",
    ]


def test_an_op_without_a_rule_gathers_and_says_so():
    """A report of fallbacks reads `gathered`."""
    assert lowered(aten.linalg_inv_ex.default, "f32[8@dp, 8]").gathered
    assert not lowered(aten.linalg_inv_ex.default, "f32[8, 8]").gathered
    assert not lowered(aten.exp.default, "f32[8@dp, 8]").gathered


# ---- pure -------------------------------------------------------------------------------------


def everything() -> list[str]:
    return [shown(call) for call in TYPICAL]


def test_lowering_is_the_same_on_every_rank():
    """A lowering needs no rank, no group and no data, and is the same for every caller."""
    want = everything()
    assert run_ranks(lambda rank: everything(), 4) == [want] * 4
    with as_rank(7, world_size=8):  # not even in the mesh
        assert everything() == want


def test_lowering_does_not_depend_on_what_was_lowered_before():
    """Lowerings do not depend on the order of calls, nor on cached plans."""
    want = everything()
    order = random.Random(0).sample(range(len(TYPICAL)), len(TYPICAL))
    forget()
    got = {i: shown(TYPICAL[i]) for i in order}
    assert [got[i] for i in range(len(want))] == want


def test_lowering_is_the_same_in_another_process():
    """Hashes of strings differ between processes, so no plan may depend on the order of a set."""
    root = Path(__file__).parents[2]
    code = "from tests.tensor.test_lower import everything; print('\\n'.join(everything()))"
    env = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert out.stdout.splitlines() == "\n".join(everything()).splitlines(), out.stderr


def test_specs_of_results_are_interned():
    """Cached specs are used, so that the next look-up compares identities."""
    first, again = (lowered(aten.add.Tensor, X, X) for _ in range(2))
    assert first.outs[0] is again.outs[0] and isinstance(first.outs[0], Spec) and first.plans[0] is again.plans[0]


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
IMAGE, HEADED = "f32[1, 8, 16, 64@dp]", "f32[1, 4, 64@dp, 32]"
SENT = [
    # a dim that is needed whole gives its shards to the dim where they spread best
    (ATTENTION, HEADED, HEADED, HEADED),
    (aten.sort.default, "f32[1, 64@dp, 32]", 1),
    (aten.sort.default, "f32[2, 64@dp, 32]", 1),
    (aten.max_pool2d_with_indices.default, IMAGE, [3, 3], [1, 1], [1, 1]),
    (aten._fft_c2c.default, "c64[1, 64@dp, 32]", [1], 0, True),
    (aten.upsample_bilinear2d.default, IMAGE, [32, 128], False),
    (aten.unfold.default, "f32[1, 64@dp, 32]", 1, 4, 2),
    # windows that do not overlap need no neighbours
    (aten.convolution.default, IMAGE, "f32[8, 8, 4, 4]", None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1),
    (aten.avg_pool2d.default, IMAGE, [2, 2]),
    (aten.pixel_shuffle.default, IMAGE, 2),
    # a product: what is moved, and what its result owes
    (aten.linear.default, "f32[16, 128, 256@dp]", "f32[1024@dp, 256]"),
    (aten.linear.default, "f32[16, 128, 1024@dp]", "f32[256, 1024@dp]"),
    (aten.mm.default, "f32[64@dp, 32]", "f32[32@dp, 128]"),
    (aten.mm.default, "f32[32, 64@dp]", "f32[64@dp, 128]"),
    # a bias becomes a term of the sum; a tensor of the size of the result does not
    (aten.add.Tensor, "f32[64, 16] +sum@dp", "f32[16]"),
    (aten.add.Tensor, "f32[64, 16] +sum@dp", "f32[64, 16]"),
    # the only rank that has something keeps it
    (aten.cat.default, ["f32[0]", "f32[4@dp, 8]"], 0),
    (aten.view.default, "f32[1@dp, 64]", [64]),
    (aten.select.int, "f32[1@dp, 64]", 0, 0),
    (aten.amax.default, "f32[1@dp, 64]", [0]),
]


class TestWhatIsSent(expecttest.TestCase):
    def test_the_row_that_costs_least_is_chosen(self):
        """On four ranks: bytes of the fullest rank, what results owe, and work that one rank would do alone."""
        self.assertExpectedInline("\n".join(shown(call, FOUR) for call in SENT), """\
flash_attention_for_cpu(3 x f32[1, 4, 64@dp, 32]) -> f32[1, 4@dp, 64, 32], f32[1, 4@dp, 64]
    f32[1, 4, 64@dp, 32]: all_to_all(dp, 2, 1)
    f32[1, 4, 64@dp, 32]: all_to_all(dp, 2, 1)
    f32[1, 4, 64@dp, 32]: all_to_all(dp, 2, 1)
sort(f32[1, 64@dp, 32]) -> f32[1, 64, 32@dp], i64[1, 64, 32@dp]
    f32[1, 64@dp, 32]: all_to_all(dp, 1, 2)
sort(f32[2, 64@dp, 32]) -> f32[2, 64, 32@dp], i64[2, 64, 32@dp]
    f32[2, 64@dp, 32]: all_to_all(dp, 1, 2)
max_pool2d_with_indices(f32[1, 8, 16, 64@dp]) -> f32[1, 8@dp, 16, 64], i64[1, 8@dp, 16, 64]
    f32[1, 8, 16, 64@dp]: all_to_all(dp, 3, 1)
_fft_c2c(c64[1, 64@dp, 32]) -> c64[1, 64, 32@dp]
    c64[1, 64@dp, 32]: all_to_all(dp, 1, 2)
upsample_bilinear2d(f32[1, 8, 16, 64@dp]) -> f32[1, 8@dp, 32, 128]
    f32[1, 8, 16, 64@dp]: all_to_all(dp, 3, 1)
unfold(f32[1, 64@dp, 32]) -> f32[1, 31, 32@dp, 4]
    f32[1, 64@dp, 32]: all_to_all(dp, 1, 2)
convolution(f32[1, 8, 16, 64@dp], f32[8, 8, 4, 4]) -> f32[1, 8, 4, 16@dp]
avg_pool2d(f32[1, 8, 16, 64@dp]) -> f32[1, 8, 8, 32@dp]
pixel_shuffle(f32[1, 8, 16, 64@dp]) -> f32[1, 2, 32, 128@dp]
linear(f32[16, 128, 256@dp], f32[1024@dp, 256]) -> f32[16, 128, 1024@dp]
    f32[16, 128, 256@dp]: all_gather(dp, 2)
linear(f32[16, 128, 1024@dp], f32[256, 1024@dp]) -> f32[16, 128, 256] +sum@dp
mm(f32[64@dp, 32], f32[32@dp, 128]) -> f32[64@dp, 128]
    f32[32@dp, 128]: all_gather(dp, 0)
mm(f32[32, 64@dp], f32[64@dp, 128]) -> f32[32, 128] +sum@dp
add(f32[64, 16] +sum@dp, f32[16]) -> f32[64, 16] +sum@dp
    f32[16]: to_partial(dp, 'sum')
add(f32[64, 16] +sum@dp, f32[64, 16]) -> f32[64, 16]
    f32[64, 16] +sum@dp: all_reduce(dp)
cat(f32[0], f32[4@dp, 8]) -> f32[4@dp, 8]
view(f32[1@dp, 64]) -> f32[64] +sum@dp
    f32[1@dp, 64]: to_partial(dp, 'sum')
select(f32[1@dp, 64]) -> f32[64] +sum@dp
    f32[1@dp, 64]: to_partial(dp, 'sum')
amax(f32[1@dp, 64]) -> f32[64] +max@dp
    f32[1@dp, 64]: to_partial(dp, 'max')""")


def test_work_that_one_rank_does_is_a_fallback():
    """Also where a rule has other rows: a dim of size 1 cannot take the shards of the dim that is sorted."""
    assert lowered(aten.sort.default, "f32[1, 1000000@dp]", 1, mesh=FOUR).gathered
    assert not lowered(aten.sort.default, "f32[2, 1000000@dp]", 1, mesh=FOUR).gathered
    assert not lowered(aten.sort.default, "f32[1@dp, 1000000]", 1, mesh=FOUR).gathered  # as the user put it
    assert not lowered(aten.sort.default, "f32[1, 64@dp]", 1, mesh=FOUR).gathered  # a few numbers


def test_a_table_that_is_smaller_than_what_is_looked_up_is_gathered():
    """The table and the indices are sharded by one axis. The recipe would gather the indices, and reduce the result."""
    def decide(tokens: str) -> bool:
        table, ids = parse_spec("f32[1024@dp, 64]", FOUR), parse_spec(tokens, FOUR)
        args = table, ids
        call = Call(aten.embedding.default, args, {}, out_metas(aten.embedding.default, args, {}, torch.device("cpu")))
        recipe = recipe_for(call)
        return is_cheaper_by_rule(call, recipe.plans_from(call.tensors), recipe.outs)

    assert decide("i64[64@dp, 512]")
    assert not decide("i64[8@dp]")
    assert not decide("i64[64, 512]")  # the recipe sends nothing
