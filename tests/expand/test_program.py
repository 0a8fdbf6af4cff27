"""A program sends what an engineer would write by hand, and all of it can be listed."""

import gc
from collections import Counter
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn, optim

import spmd
import spmd.expand.compile as compile_module
from spmd import MeshTopoInfo, Partial, Shard
from spmd.comm import C10dTransport
from spmd.expand.bind import bind
from spmd.expand.passes.bucket import bucketed
from spmd.expand.program import Program
from spmd.sim import run_ranks
from tests.expand.side_by_side import (
    GPT_PLAN,
    INPUTS,
    NET,
    Case,
    copied,
    gpt,
    rows,
    shared_programs,
    tensors,
    tokens,
    train_step,
)

TINY = dict(n_head=4, n_embd=8, block_size=6, vocab=11), 4
DEMO = dict(n_head=4, n_embd=128, block_size=64, vocab=256), 16
LONG = dict(n_head=8, n_embd=16, block_size=64, vocab=7), 8


def mesh_of(*shape) -> spmd.DeviceMesh:
    """A mesh without a process group: plans need none."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return spmd.DeviceMesh("cpu", ranks.tolist(), mesh_dim_names=("dp", "tp")[: len(shape)])


def program_of(shape, size, blocks: int, tied=True, batch=None) -> Program:
    """The program of a GPT trained with SGD, without buckets."""
    config, usual = size
    model = gpt(n_layer=blocks, tied=tied, **config)
    step = spmd.compile(train_step, mesh_of(*shape), params=GPT_PLAN, inputs=INPUTS, bucket_mb=None)
    data = tokens(batch or usual, 1, config["block_size"], config["vocab"])[0]
    return step.program_for(model, optim.SGD(model.parameters(), lr=0.1), *data)


def sent(program: Program) -> Counter:
    """The number of tensors sent, by kind, by axis, and by forward or backward."""
    names = [node.name for node in program.graph.nodes]
    backward = names.index("nll_loss_backward")
    found = Counter()
    for c in program.collectives:
        found[c.kind, c.axis, "backward" if names.index(c.name) > backward else "forward"] += c.tensors
    return found


def megatron(blocks: int) -> dict:
    """Two all-reduces per block forward, of the row-parallel products; two backward, of the gradients of the inputs."""
    return {("all_reduce", "tp", "forward"): 2 * blocks, ("all_reduce", "tp", "backward"): 2 * blocks}


# ---- what is sent -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, blocks",
    [(TINY, 1), (TINY, 2), (TINY, 3), (DEMO, 1), (DEMO, 2), (DEMO, 3), (LONG, 2)],
    ids="tiny1 tiny2 tiny3 demo1 demo2 demo3 long2".split(),
)
def test_tensor_parallel_sends_what_megatron_sends(size, blocks):
    """On 1 x 4: no other collectives, and each moves one activation."""
    program = program_of((1, 4), size, blocks, tied=blocks != 2)
    assert sent(program) == megatron(blocks)
    config, batch = size
    assert {c.nbytes for c in program.collectives} == {4 * batch * config["block_size"] * config["n_embd"]}
    assert program.gathered == ()


@pytest.mark.parametrize("size, tied", [(TINY, True), (DEMO, False)], ids=["tiny", "demo"])
def test_data_parallel_sends_gradients_and_two_numbers(size, tied):
    """On 4 x 1: each gradient once, also a tied one, the number of tokens, and the loss. Most can share a bucket."""
    parameters = len(list(gpt(n_layer=2, tied=tied, **size[0]).parameters()))
    program = program_of((4, 1), size, 2, tied)
    assert sent(program) == {("all_reduce", "dp", "forward"): 2, ("all_reduce", "dp", "backward"): parameters}
    packed = bucketed(program, 25.0, 1.0)  # as `compile` does
    assert sum(sent(packed).values()) == parameters + 2
    assert {c.kind for c in packed.collectives} == {"all_reduce"}
    assert len(packed.collectives) <= 5 < len(program.collectives)
    assert sum(c.nbytes for c in packed.collectives) == sum(c.nbytes for c in program.collectives)
    assert packed.comm_time() < program.comm_time()


@pytest.mark.parametrize("size, blocks", [(TINY, 1), (DEMO, 2)], ids=["tiny", "demo"])
def test_both_together_send_both(size, blocks):
    """On 2 x 2; gradients of sharded parameters are sent as shards."""
    program = program_of((2, 2), size, blocks)
    named = dict(gpt(n_layer=blocks, **size[0]).named_parameters())
    want = {("all_reduce", "dp", "forward"): 2, ("all_reduce", "dp", "backward"): len(named)}
    assert sent(program) == want | megatron(blocks)
    specs = dict(program.inputs)
    gradients = sum(specs[f"model.{name}"].local_nbytes for name in named)
    assert sum(c.nbytes for c in program.collectives if c.axis == "dp") == gradients + 8


@pytest.mark.parametrize("batch", [7, 6, 2])
def test_uneven_batches_send_no_more(batch):
    """Uneven and empty shards on 4 x 1 send the same collectives."""
    even = program_of((4, 1), TINY, 1, batch=8)
    program = program_of((4, 1), TINY, 1, batch=batch)
    assert sent(program) == sent(even)
    assert [c.nbytes for c in program.collectives] == [c.nbytes for c in even.collectives]


def test_an_optimiser_sends_nothing():
    """AdamW's state has the spec of its parameter: it adds no collective, neither in the first step nor later."""
    case = Case()
    model, optimizer = case.begin()
    plain = case.compiled(mesh_of(2, 2)).program_for(model, optim.SGD(model.parameters()), *case.batches[0])
    step = case.compiled(mesh_of(2, 2))
    first = step.program_for(model, optimizer, *case.batches[0])
    train_step(model, optimizer, *case.batches[0])
    later = step.program_for(model, optimizer, *case.batches[0])
    assert sent(first) == sent(later) == sent(plain)
    assert "exp_avg" in str(later) and "exp_avg" not in str(plain)


def test_a_plan_is_not_a_run():
    """`program_for` changes neither the model nor the step, and works for a mesh without processes."""
    case = Case()
    model, optimizer = case.begin()
    before, objects = tensors(model, optimizer), [id(p) for p in model.parameters()]
    step = case.compiled(mesh_of(64, 128))
    program = step.program_for(model, optimizer, *case.batches[0])
    assert program.collectives and program.comm_time() > 0
    assert [id(p) for p in model.parameters()] == objects and step.programs == []
    torch.testing.assert_close(tensors(model, optimizer), before, rtol=0, atol=0)


# ---- reading it -------------------------------------------------------------------------------


def small_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).relu().square().mean()
    loss.backward()
    optimizer.step()
    return loss


def small_program(**options) -> Program:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    params = {"0.weight": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}}
    step = spmd.compile(small_step, mesh_of(2, 4), params=params, inputs={"x": {"dp": Shard(0)}}, **options)
    return step.program_for(model, optimizer, torch.ones(5, 4))


def test_a_program_reads_as_code():
    """Specs are in the margin, moves name their axes, and inputs and outputs have names."""
    assert_expected_inline(
        str(small_program()),
        """\
def small_step(
    arg0_1,                                                               # f32[6@tp, 4]   model.0.weight
    arg0_2,                                                               # f32[4, 6@tp]   model.1.weight
    arg0_3,                                                               # f32[5@dp, 4]   x
    arg0_4,                                                               # number   optimizer.param_groups.0.lr
):
    t = aten.t(arg0_1)                                                    # f32[4, 6@tp]
    mm = aten.mm(arg0_3, t)                                               # f32[5@dp, 6@tp]
    t_1 = aten.t(arg0_2)                                                  # f32[6@tp, 4]
    mm_1 = aten.mm(mm, t_1)                                               # f32[5@dp, 4] +sum@tp
    all_reduce = all_reduce(mm_1, tp)                                     # f32[5@dp, 4]   48 bytes, 10.2 us
    relu = aten.relu(all_reduce)                                          # f32[5@dp, 4]
    pow_1 = aten.pow.Tensor_Scalar(relu, 2)                               # f32[5@dp, 4]
    sum_1 = aten.sum.dim_IntList(pow_1, None, dtype=torch.float32)        # f32[] +sum@dp
    div = aten.div.Scalar(sum_1, 20)                                      # f32[] +sum@dp
    ones_like = aten.ones_like(div, pin_memory=False, memory_format=torch.preserve_format)  # f32[]
    expand = aten.expand(ones_like, local([5, 4]))                        # f32[5, 4]
    div_1 = aten.div.Scalar(expand, 20)                                   # f32[5, 4]
    pow_2 = aten.pow.Tensor_Scalar(relu, 1.0)                             # f32[5@dp, 4]
    mul = aten.mul.Scalar(pow_2, 2.0)                                     # f32[5@dp, 4]
    slice_1 = slice(div_1, dp, 0)                                         # f32[5@dp, 4]
    mul_1 = aten.mul.Tensor(slice_1, mul)                                 # f32[5@dp, 4]
    threshold_backward = aten.threshold_backward(mul_1, relu, 0)          # f32[5@dp, 4]
    t_2 = aten.t(threshold_backward)                                      # f32[4, 5@dp]
    mm_2 = aten.mm(t_2, mm)                                               # f32[4, 6@tp] +sum@dp
    t_3 = aten.t(mm_2)                                                    # f32[6@tp, 4] +sum@dp
    t_4 = aten.t(t_1)                                                     # f32[4, 6@tp]
    mm_3 = aten.mm(threshold_backward, t_4)                               # f32[5@dp, 6@tp]
    t_5 = aten.t(t_3)                                                     # f32[4, 6@tp] +sum@dp
    t_6 = aten.t(mm_3)                                                    # f32[6@tp, 5@dp]
    mm_4 = aten.mm(t_6, arg0_3)                                           # f32[6@tp, 4] +sum@dp
    t_7 = aten.t(mm_4)                                                    # f32[4, 6@tp] +sum@dp
    t_8 = aten.t(t_7)                                                     # f32[6@tp, 4] +sum@dp
    bucket = all_reduce([div, t_5, t_8], dp)                              # 3 tensors   68 bytes, 7.8 us
    all_reduce_3_of = bucket[0]                                           # f32[]
    all_reduce_1_of = bucket[1]                                           # f32[4, 6@tp]
    all_reduce_2_of = bucket[2]                                           # f32[6@tp, 4]
    neg = neg(arg0_4)
    add = aten.add.Tensor(arg0_1, all_reduce_2_of, alpha=neg)             # f32[6@tp, 4]
    add_1 = aten.add.Tensor(arg0_2, all_reduce_1_of, alpha=neg)           # f32[4, 6@tp]
    return (
        all_reduce_3_of,                                                  # f32[]   result 0
        add,                                                              # f32[6@tp, 4]   model.0.weight
        add_1,                                                            # f32[4, 6@tp]   model.1.weight
        all_reduce_2_of,                                                  # f32[6@tp, 4]   model.0.weight.grad
        all_reduce_1_of,                                                  # f32[4, 6@tp]   model.1.weight.grad
    )""",
    )


def test_collectives_are_listed_and_priced():
    """By kind, axis and bytes, on the mesh's topology or on another one."""
    program = small_program(bucket_mb=None)
    assert_expected_inline(
        "\n".join(map(str, program.collectives)),
        """\
all_reduce     tp               48 bytes       10.2 us  f32[5@dp, 4] +sum@tp
all_reduce     dp                4 bytes        7.8 us  f32[] +sum@dp
all_reduce     dp               32 bytes        7.8 us  f32[4, 6@tp] +sum@dp
all_reduce     dp               32 bytes        7.8 us  f32[6@tp, 4] +sum@dp""",
    )
    assert program.comm_time() == pytest.approx(sum(c.us for c in program.collectives))
    near, far = (MeshTopoInfo.textbook((2, 4), intra_host=(inside, inside)) for inside in (True, False))
    assert program.comm_time(near) == pytest.approx(program.comm_time())
    assert program.comm_time(far) > program.comm_time(near)
    assert repr(program).startswith("<Program small_step: ")


@torch.library.custom_op("test_program::without_rule", mutates_args=())
def without_rule(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


without_rule.register_fake(torch.empty_like)


@torch.library.custom_op("test_program::without_rule_of_two", mutates_args=())
def without_rule_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.flip(0) + y


without_rule_of_two.register_fake(lambda x, y: torch.empty_like(x))


def test_gathered_ops_are_named():
    """An op without a rule runs on replicated tensors. The program lists the op and the bytes gathered for it."""

    def step(model, x):
        return without_rule(model.weight.detach()) @ x

    compiled = spmd.compile(step, mesh_of(2), params={"weight": [Shard(0)]})
    program = compiled.program_for(nn.Linear(8, 8, bias=False), torch.ones(8))
    assert [op for op, _ in program.gathered] == ["test_program.without_rule.default"]
    assert [nbytes for _, nbytes in program.gathered] == [256]


def test_gathered_are_bytes_for_work_that_is_not_shared():
    """Only operands that become whole count, and not those of an op of which each rank does its rows."""

    def step(terms, rows):
        inverse = torch.linalg.inv_ex(rows)[0]
        return inverse, torch.ops.test_program.without_rule_of_two(rows, terms.sum(0))

    compiled = spmd.compile(step, mesh_of(2), inputs={"*": [Shard(0)]})
    program = compiled.program_for(torch.ones(2, 8), torch.eye(8))
    assert program.gathered == (("test_program.without_rule_of_two.default", 256),)
    assert [c.kind for c in program.collectives] == ["all_gather", "all_reduce"]


def test_results_lie_where_the_user_wants_them():
    """A sum that is owed is left on the ranks if asked, and then nothing is sent; other results are moved."""

    def step(x, w):
        return {"sum": x @ w, "rows": [x * 2, x.sum()]}

    x, w = torch.arange(20.0).reshape(4, 5), torch.arange(15.0).reshape(5, 3)
    with spmd.LocalTensorMode(4):
        left = spmd.compile(step, mesh_of(4), inputs={"x": [Shard(1)], "w": [Shard(0)]}, outputs={"*": [Partial()]})
        rows = {"sum": [Shard(0)], "rows.0": [Shard(0)], "rows.1": [Partial("avg")]}
        moved = spmd.compile(step, mesh_of(4), inputs={"x": [Shard(1)], "w": [Shard(0)]}, outputs=rows)
        for compiled, placements in ((left, [Partial()] * 3), (moved, [Shard(0), Shard(0), Partial("avg")])):
            found = compiled(x, w)
            found = [found["sum"], *found["rows"]]
            assert [y.placements for y in found] == [(p,) for p in placements]
            for y, want in zip(found, (x @ w, x * 2, x.sum()), strict=True):
                assert torch.equal(y.full_tensor().reconcile(), want)
        assert not left.program.collectives
        with pytest.raises(ValueError, match=r"outputs 'loss' matches nothing. Near: rows"):
            spmd.compile(step, mesh_of(4), outputs={"loss": [Shard(0)]})(x, w)


# ---- binding it -------------------------------------------------------------------------------


class Named(C10dTransport):
    """Torch's collectives with groups by axis name: enough to bind, not to run."""

    def group(self, mesh, axes):
        return f"group of {','.join(map(mesh.axis_name, axes))}"


PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def plain(value) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return isinstance(value, (torch.fx.Node, *PLAIN))


@pytest.mark.parametrize("batch", [4, 3])
def test_a_bound_program_is_plain_torch(batch):
    """Torch ops, tensor methods and functional collectives, with arguments that Inductor or a file could hold."""
    program = program_of((2, 4), (dict(n_head=3, n_embd=6, block_size=5, vocab=7), batch), 1)
    for coordinate in [(0, 0), (1, 3)]:
        module = bind(program, coordinate, Named())
        for node in module.graph.nodes:
            assert plain([*node.args, *node.kwargs.values()]), node.format_node()
            if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
                assert node.target.__module__ in ("_operator", "math", "torch", "torch.nn.functional"), (
                    node.format_node()
                )
            elif node.op == "call_function":
                assert node.target.namespace in ("aten", "_c10d_functional"), node.format_node()
            else:
                assert node.op in ("placeholder", "get_attr", "call_method", "output")
        collectives = [n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]
        waited = [n for n in collectives if "wait" in str(n.target)]
        assert len(collectives) == 2 * len(waited) > 0


def test_collectives_are_waited_for_before_their_first_reader():
    """A collective is launched where its value is made and waited for where it is read. Other ops run in between."""
    module = bind(small_program(bucket_mb=None), (0, 0), Named())
    nodes = list(module.graph.nodes)
    gaps = []
    for node in nodes:
        if "wait_tensor" in str(node.target):
            readers = [nodes.index(user) for user in node.users]
            gaps.append(nodes.index(node) - nodes.index(node.args[0]))
            assert min(readers) - nodes.index(node) <= 3
    assert max(gaps) > 3


# ---- running it -------------------------------------------------------------------------------


def test_all_ranks_have_one_program():
    """Each rank captures and expands for itself. The texts are equal, also for uneven shards."""
    case = Case(batches=rows(7, n=2))
    case.share = False

    def probe(step, model, optimizer):
        return [str(p) for p in step.programs], [p.fingerprint for p in step.programs]

    texts = [found for _, _, found in case.on_ranks((2, 2), probe)]
    assert len(texts[0][0]) == 1
    assert all(text == texts[0] for text in texts)


def test_a_program_is_made_once():
    """A training has one capture, for the first step too, which ranks that are threads share. Each new size adds a
    program. None is made twice."""
    calls = []
    pair = Case().begin()
    real = compile_module.capture

    def counted(fn, args, *more):
        calls.append(args["x"].shape[0])
        return real(fn, args, *more)

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        mine = copied(pair)
        step = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS)
        made = []
        for batch in (6, 6, 6, 6, 6, 4, 6, 4, 5, 6):
            step(*mine, *rows(batch, n=1)[0])
            made.append(len(step.programs))
        assert step.program is step.programs[-1]
        return made

    gc.collect()  # steps of other tests that still wait for it have captures of this function
    with mock.patch.object(compile_module, "capture", counted):
        assert run_ranks(rank, 2) == [[1, 1, 1, 1, 1, 2, 2, 2, 3, 3]] * 2
    assert Counter(calls) == {6: 1}


def test_a_function_of_plain_values_has_programs_too():
    """Without module and optimiser: flags and strings select the program, floats do not."""

    def fn(x, scale: float, how: str = "sum", *, twice: bool = False):
        y = (x * scale).sum(0) if how == "sum" else (x * scale).amax(0)
        return y * 2 if twice else y

    x = torch.arange(10.0).view(5, 2)
    wanted = [((x, 0.5), {}), ((x, 2.0), {}), ((x, 2.0, "max"), {}), ((x, 1.0), {"twice": True}), ((x, 3.0), {})]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(fn, mesh, inputs={"x": [Shard(0)]})
        for args, kwargs in wanted:
            torch.testing.assert_close(step(*args, **kwargs).full_tensor(), fn(*args, **kwargs))
        return len(step.programs)

    with shared_programs():
        assert run_ranks(rank, 2) == [3, 3]
