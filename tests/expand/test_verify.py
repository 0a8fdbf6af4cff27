"""A program with a fault is an error that names the fault, before anything is sent.

A program of many kinds of nodes is changed in one place, as a wrong pass would change it. Each fault is seen.
"""

import operator
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import spmd
from spmd import Replicate, Shard, local_map
from spmd.comm import C10dTransport
from spmd.expand.bind import bind
from spmd.expand.local_ops import LocalShape, UnlessEmpty
from spmd.expand.passes.bucket import bucketed
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.program import Program
from spmd.expand.verify import ProgramFault
from spmd.expand.verify_bound import verify_bound
from spmd.mesh import as_rank
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce
from spmd.tensor.redistribute.moves import Slice
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec
from tests.expand.side_by_side import GPT_PLAN, gpt, tokens
from tests.expand.test_program import INPUTS, mesh_of, train_step

aten = torch.ops.aten
MESH = mesh_of(2, 2)


class Layers(nn.Module):
    """Sums that are owed, a look-up in a sharded table, random numbers, sizes, a factory, a constant, a local_map."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
        self.table = nn.Embedding(16, 8)

    def forward(self, x, ids):
        h = torch.relu(x @ self.w + x @ self.v)
        h = F.dropout(h + self.table(ids), 0.5)
        h = (h.view(8, 2, 4) * 2).flatten(1) + torch.ones(8) + torch.tensor([1.0, 2.0] * 4)
        return _halved(h) if not torch.is_grad_enabled() else h


_halved = local_map(lambda x: x / 2, [Shard(0), Replicate()], ([Shard(0), Replicate()],))


def step(model, optimizer, x, ids):
    optimizer.zero_grad()
    loss = model(x, ids).sum()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return loss, model(x, ids)


@pytest.fixture(scope="module")
def whole() -> Program:
    model = Layers()
    compiled = spmd.compile(
        step, MESH, bucket_mb=None, params={"w": {"tp": Shard(0)}, "v": {"tp": Shard(0)}, "table.*": {"tp": Shard(0)}},
        inputs={"x": {"dp": Shard(0), "tp": Shard(1)}, "ids": {"dp": Shard(0)}},
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return compiled.program_for(model, optimizer, torch.ones(8, 8), torch.zeros(8, dtype=torch.long))


def copy_of(program: Program) -> Program:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return replace(program, graph=graph)


def only(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> fx.Node:
    """The first node that is wanted."""
    return next(n for n in graph.nodes if wanted(n))


def step_of(move) -> Callable[[fx.Node], bool]:
    return lambda n: isinstance(n.target, Step) and isinstance(n.target.move, move)


def target_is(target) -> Callable[[fx.Node], bool]:
    return lambda n: n.target is target or (isinstance(target, type) and isinstance(n.target, target))


# ---- faults of programs -----------------------------------------------------------------------
# Each changes a copy of the program in one place. Those that are about outputs or inputs return another program.


def dropped_reduction(p):
    node = only(p.graph, step_of(AllReduce))
    node.replace_all_uses_with(node.args[0])
    p.graph.erase_node(node)


def doubled_reduction(p):
    node = only(p.graph, step_of(AllReduce))
    again = inserted_after(node, node.target, (node,), node.target.after)
    node.replace_all_uses_with(again, lambda user: user is not again)


def doubled_reduction_that_nobody_reads(p):
    node = only(p.graph, step_of(AllReduce))
    inserted_after(node, node.target, node.args, node.target.after)


def dropped_last_reduction(p):
    node = [n for n in p.graph.nodes if step_of(AllReduce)(n)][-1]
    node.replace_all_uses_with(node.args[0])
    p.graph.erase_node(node)


def reduction_over_another_axis(p):
    node = only(p.graph, step_of(AllReduce))
    node.target = Step(AllReduce((1 - node.target.axes[0],)), node.target.before, node.target.after)


def reduction_that_gathers(p):
    node = only(p.graph, step_of(AllReduce))
    node.target = Step(AllGather(node.target.axes), node.target.before, node.target.after)


def reduction_into_shards(p):
    node = only(p.graph, step_of(AllReduce))
    after = node.target.after.with_layout(((0,), (1,)))
    node.target, node.meta["spec"] = Step(node.target.move, node.target.before, after), after


def move_to_another_spec_than_it_says(p):
    node = only(p.graph, step_of(AllReduce))
    node.meta["spec"] = node.target.before


def slice_of_what_a_rank_does_not_have(p):
    node = only(p.graph, lambda n: n.op == "placeholder" and n.meta["spec"].shape == (8, 8))
    want = node.meta["spec"].with_layout(((), (1,))) if node.meta["spec"].dims[0] else None
    inserted_after(node, Step(Slice((1,)), node.meta["spec"], want), (node,), want)


def another_op(p):
    node = only(p.graph, lambda n: n.target is aten.add.Tensor and n.meta["spec"].partial)
    node.target = aten.mul.Tensor


def another_operand(p):
    relu = only(p.graph, target_is(aten.relu.default))
    node = next(n for n in relu.users if n.target is aten.add.Tensor)
    node.replace_input_with(relu, only(p.graph, lambda n: n.op == "placeholder" and n.meta["spec"].shape == (8, 8)))


def another_dtype(p):
    node = only(p.graph, target_is(aten.relu.default))
    node.meta["spec"] = node.meta["spec"].with_tensor((8, 8), torch.float64)


def another_shape(p):
    node = only(p.graph, target_is(aten.relu.default))
    node.meta["spec"] = node.meta["spec"].with_tensor((8, 4))


def another_layout(p):
    node = only(p.graph, target_is(aten.relu.default))
    node.meta["spec"] = node.meta["spec"].with_layout(((), ()))


def stale_size(p):
    node = only(p.graph, lambda n: any(isinstance(a, LocalShape) for a in n.args))
    spec = node.meta["spec"]
    node.args = (node.args[0], LocalShape(spec.with_layout(((),) * spec.ndim)))


def global_size(p):
    node = only(p.graph, lambda n: any(isinstance(a, LocalShape) for a in n.args))
    node.args = (node.args[0], list(node.meta["spec"].shape))


def read_before_it_is_made(p):
    node = only(p.graph, target_is(aten.relu.default))
    p.graph.output_node().prepend(node)


def sharded_factory(p):
    node = only(p.graph, target_is(aten.ones.default))
    node.meta["spec"] = node.meta["spec"].with_layout(((1,),))


def sharded_constant(p):
    node = only(p.graph, lambda n: n.op == "get_attr")
    node.meta["spec"] = node.meta["spec"].with_layout(((1,),))


def missing_constant(p):
    return replace(p, constants={})


def look_up_in_a_gathered_table(p):
    node = only(p.graph, target_is(Recipe))
    node.args = (gathered(node.args[0], 1), *node.args[1:])


def other_random_numbers(p):
    node = only(p.graph, lambda n: type(n.target).__name__ == "Draw")
    node.meta["spec"] = node.meta["spec"].with_layout(((), (0,)))


def blocks_of_another_function(p):
    node = only(p.graph, lambda n: type(n.target).__name__ == "LocalMapOp")
    (operand,) = node.all_input_nodes
    node.replace_input_with(operand, gathered(operand, 0))


def another_result(p):
    node = only(p.graph, lambda n: n.target is operator.getitem)
    node.meta["spec"] = node.meta["spec"].with_layout(((), (0,)))


def number_of_a_sum_that_is_owed(p):
    node = only(p.graph, lambda n: n.meta.get("spec") is not None and getattr(n.meta["spec"], "partial", ()))
    inserted_after(node, aten.equal.default, (node, node), None)


def empty_results_of_other_sizes(p):
    node = only(p.graph, target_is(aten.relu.default))
    node.target = UnlessEmpty(node.target, (node.meta["spec"].with_layout(((), ())),))


def swapped_outputs(p):
    output = p.graph.output_node()
    values = list(output.args[0])
    i, j = [k for k, v in enumerate(values) if v.meta["spec"].shape == (8, 8)][-1], _index(p, "table.weight")
    values[i], values[j] = values[j], values[i]
    output.args = (tuple(values),)


def output_that_is_owed(p):
    reduction = next(v for v in p.graph.output_node().args[0] if step_of(AllReduce)(v))
    i = p.graph.output_node().args[0].index(reduction)
    reduction.replace_all_uses_with(reduction.args[0])
    p.graph.erase_node(reduction)
    return replace(p, outputs=(*p.outputs[:i], (p.outputs[i][0], reduction.target.before), *p.outputs[i + 1 :]))


def parameter_that_leaves_otherwise_than_it_came(p):
    i = next(i for i, (name, spec) in enumerate(p.outputs) if name in dict(p.inputs) and any(spec.dims))
    value = p.graph.output_node().args[0][i]
    whole = gathered(value, 1)
    value.replace_all_uses_with(whole, lambda user: user.op == "output")
    return replace(p, outputs=(*p.outputs[:i], (p.outputs[i][0], whole.meta["spec"]), *p.outputs[i + 1 :]))


def one_output_less(p):
    output = p.graph.output_node()
    output.args = (output.args[0][:-1],)


def input_that_came_otherwise(p):
    (name, spec), *rest = p.inputs
    return replace(p, inputs=((name, spec.with_layout(((), ()))), *rest))


def bucket_of_two_groups(p):
    moves = [n for n in p.graph.nodes if step_of(AllReduce)(n)]
    pair = moves[0], next(n for n in moves if n.target.axes != moves[0].target.axes)
    bucket = Bucket(tuple(n.target for n in pair))
    with p.graph.inserting_after(pair[1].args[0] if pair[1].args[0] > pair[0].args[0] else pair[0].args[0]):
        node = p.graph.create_node("call_function", bucket, ([n.args[0] for n in pair],), name="bucket")
    node.meta["spec"] = bucket.after
    inserted_after(node, operator.getitem, (node, 0), bucket.after[0])


def bucket_of_other_tensors(p):
    packed = bucketed(p)
    node = only(packed.graph, lambda n: isinstance(n.target, Bucket))
    node.target = Bucket(node.target.steps[::-1])
    return packed


def gathered(node: fx.Node, axis: int) -> fx.Node:
    """The node gathered over an axis that shards its first dim, in a new node."""
    before = node.meta["spec"]
    after = before.with_layout(((),) * before.ndim)
    return inserted_after(node, Step(AllGather((axis,)), before, after), (node,), after)


def inserted_after(node: fx.Node, target, args, spec: Spec | None) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.create_node("call_function", target, tuple(args), {}, name="inserted")
    new.meta["spec"] = spec
    return new


def _index(p: Program, name: str) -> int:
    return next(i for i, (n, _) in enumerate(p.outputs) if n.endswith(name))


FAULTS = {
    dropped_reduction: "op", doubled_reduction: "move", doubled_reduction_that_nobody_reads: "unread",
    dropped_last_reduction: "op", reduction_over_another_axis: "move", reduction_that_gathers: "move",
    reduction_into_shards: "move", move_to_another_spec_than_it_says: "move",
    slice_of_what_a_rank_does_not_have: "move", another_op: "op", another_operand: "op", another_dtype: "metadata",
    another_shape: "metadata", another_layout: "op", stale_size: "size", global_size: "size",
    read_before_it_is_made: "order", sharded_factory: "factory", sharded_constant: "constant",
    missing_constant: "constant", look_up_in_a_gathered_table: "recipe", other_random_numbers: "draw",
    blocks_of_another_function: "blocks", another_result: "item", number_of_a_sum_that_is_owed: "value",
    empty_results_of_other_sizes: "op", swapped_outputs: "output", output_that_is_owed: "partial output",
    parameter_that_leaves_otherwise_than_it_came: "home", one_output_less: "output",
    input_that_came_otherwise: "input", bucket_of_two_groups: "move", bucket_of_other_tensors: "move",
}  # fmt: skip


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_fault_of_a_program_is_named(change, whole):
    changed = copy_of(whole.verify())
    changed = change(changed) or changed
    with pytest.raises(ProgramFault) as error:
        changed.verify()
    assert error.value.fault == FAULTS[change], error.value
    assert error.value.node in changed.graph.nodes


# ---- faults of bound graphs -------------------------------------------------------------------


def _bound(program: Program, passes=()):
    with as_rank(0):
        by = C10dTransport()
        module = bind(program, (0, 0), by, passes)
    names = {name: i for i, (name, _) in enumerate(program.inputs)}
    homes = [names.get(name) for name, _ in program.outputs]
    return module.graph, (program, (0, 0), by, [i in homes for i in range(len(names))], homes)


def name_is(name: str) -> Callable[[fx.Node], bool]:
    return lambda n: getattr(n.target, "_schema", None) is not None and n.target._schema.name.endswith(f"::{name}")


def read_without_a_wait(g):
    wait = only(g, name_is("wait_tensor"))
    wait.replace_all_uses_with(wait.args[0])
    g.erase_node(wait)


def read_beside_the_wait(g):
    wait = only(g, name_is("wait_tensor"))
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, wait.args[0])


def waited_twice(g):
    wait = only(g, name_is("wait_tensor"))
    with g.inserting_after(wait):
        g.call_function(wait.target, wait.args)


def launched_in_another_order(g):
    first, second = [n for n in g.nodes if name_is("all_reduce")(n)][-2:]
    first.meta["move"], second.meta["move"] = second.meta["move"], first.meta["move"]


def launched_twice(g):
    first = only(g, name_is("all_reduce"))
    with g.inserting_after(first):
        again = g.call_function(first.target, first.args)
        again.meta["move"] = first.meta["move"]
    with g.inserting_after(again):
        g.call_function(torch.ops._c10d_functional.wait_tensor.default, (again,))


def not_launched(g):
    wait = only(g, name_is("wait_tensor"))
    launch = wait.args[0]
    wait.replace_all_uses_with(launch.args[0])
    g.erase_node(wait)
    g.erase_node(launch)


def over_another_group(g):
    launch = only(g, name_is("all_reduce"))
    launch.args = (*launch.args[:-1], "ranks:0-3")


def with_another_reduction(g):
    """A maximum where a sum is owed."""
    launch = only(g, name_is("all_reduce"))
    launch.args = (launch.args[0], "max", launch.args[-1])


def as_another_collective(g):
    """Each rank gets a piece of the sum."""
    launch = only(g, name_is("all_reduce"))
    launch.target = torch.ops._c10d_functional.reduce_scatter_tensor.default
    launch.args = (*launch.args[:-1], 2, launch.args[-1])


def freed_before_its_last_reader(g):
    """The memory of a value is given to the next op, as if nobody read the value any more."""
    value = only(g, lambda n: len(n.users) > 1 and name_is("relu")(n))
    first = min(value.users, key={n: i for i, n in enumerate(g.nodes)}.get)
    with g.inserting_before(first):
        g.call_function(aten.zero_.default, (value,))


def freed_parameter_before_its_last_reader(g):
    """A parameter's memory has the new value before the old one was read for the last time."""
    old = only(g, lambda n: n.op == "placeholder" and len(n.users) > 1 and n.meta["spec"].shape == (8, 8))
    first = min(old.users, key={n: i for i, n in enumerate(g.nodes)}.get)
    with g.inserting_before(first):
        g.call_function(aten.mul_.Scalar, (old, 0.5))


def made_later(g):
    g.output_node().prepend(only(g, name_is("relu")))


def size_of_another_rank(g):
    node = only(g, name_is("reshape"))
    node.args = (node.args[0], [n + 1 for n in node.args[1]])


def written_before_a_reader(g):
    order = {n: i for i, n in enumerate(g.nodes)}
    wait = only(g, lambda n: name_is("wait_tensor")(n) and len(n.users) > 1)
    first = min(wait.users, key=order.get)
    with g.inserting_before(first):
        g.call_function(aten.mul_.Scalar, (wait, 2.0))


def written_while_it_is_sent(g):
    launch = only(g, name_is("all_reduce"))
    with g.inserting_after(launch):
        g.call_function(aten.mul_.Scalar, (launch.args[0], 2.0))


def written_into_an_argument(g):
    x = [n for n in g.nodes if n.op == "placeholder"][-2]
    with g.inserting_before(g.output_node()):
        g.call_function(aten.mul_.Scalar, (x, 2.0))


def written_into_a_constant(g):
    x = only(g, lambda n: n.op == "get_attr")
    with g.inserting_before(g.output_node()):
        g.call_function(aten.mul_.Scalar, (x, 2.0))


def outputs_that_share_memory(g):
    output = g.output_node()
    values = list(output.args[0])
    same = [i for i, v in enumerate(values) if v.meta["spec"].shape == (8, 8)]
    values[same[-1]] = values[same[-2]]
    output.args = (tuple(values),)


def output_in_another_home(g):
    output = g.output_node()
    values = list(output.args[0])
    v, table = 3, 4
    values[v], values[table] = values[table], values[v]
    output.args = (tuple(values),)


BOUND_FAULTS = {
    read_without_a_wait: "wait", read_beside_the_wait: "wait", waited_twice: "wait",
    launched_in_another_order: "launch", launched_twice: "launch", not_launched: "launch", over_another_group: "group",
    with_another_reduction: "collective", as_another_collective: "collective",
    freed_before_its_last_reader: "write", freed_parameter_before_its_last_reader: "write",
    made_later: "order", size_of_another_rank: "size", written_before_a_reader: "write",
    written_while_it_is_sent: "write", written_into_an_argument: "write", written_into_a_constant: "write",
    outputs_that_share_memory: "shared memory", output_in_another_home: "home",
}  # fmt: skip


KINDS = {
    "missing": [dropped_reduction, missing_constant, one_output_less],
    "doubled": [doubled_reduction, doubled_reduction_that_nobody_reads, launched_twice],
    "reordered": [launched_in_another_order, read_before_it_is_made, made_later, swapped_outputs],
    "dropped collective": [dropped_last_reduction, not_launched],
    "wrong axis": [reduction_over_another_axis, over_another_group, bucket_of_two_groups],
    "wrong op": [another_op, reduction_that_gathers, with_another_reduction, as_another_collective, another_operand],
    "wrong dtype": [another_dtype],
    "Partial leaked": [output_that_is_owed, number_of_a_sum_that_is_owed],
    "stale size": [stale_size, global_size, size_of_another_rank],
    "early free": [freed_before_its_last_reader, freed_parameter_before_its_last_reader],
    "a write before a reader": [written_before_a_reader, written_while_it_is_sent],
    "a wait missing": [read_without_a_wait, read_beside_the_wait],
    "a wrong home": [output_in_another_home, parameter_that_leaves_otherwise_than_it_came, outputs_that_share_memory],
}
"""The kinds of faults that a pass may make, with some of each."""


def test_there_are_faults_of_each_kind():
    seeded = [fault for faults in KINDS.values() for fault in faults]
    assert len(seeded) == len(set(seeded)) >= 30 and set(seeded) <= FAULTS.keys() | BOUND_FAULTS.keys()


@pytest.mark.parametrize("change", BOUND_FAULTS, ids=lambda change: change.__name__)
def test_a_fault_of_a_ranks_graph_is_named(change, whole):
    graph, rest = _bound(copy_of(whole))
    change(graph)
    with as_rank(0), pytest.raises(ProgramFault) as error:
        verify_bound(graph, *rest)
    assert error.value.fault == BOUND_FAULTS[change], error.value


def test_memory_that_is_reused_is_no_fault(whole):
    graph, rest = _bound(copy_of(whole))
    assert reuse_memory(graph, rest[-2])
    with as_rank(0):
        verify_bound(graph, *rest)


def test_what_a_user_writes_is_no_fault():
    """A function of blocks may write into its operand and read it again: that is what its code says."""
    given = [Shard(0), Replicate()]

    def doubled(x):
        y = x.clone()
        return y + y.mul_(2)

    compiled = spmd.compile(lambda x: local_map(doubled, given, (given,))(x), MESH, inputs={"x": {"dp": Shard(0)}})
    with spmd.LocalTensorMode(4):
        out = compiled(torch.ones(4, 2)).full_tensor()
    assert torch.equal(out.reconcile(), torch.full((4, 2), 4.0))


# ---- its time ---------------------------------------------------------------------------------


def test_thousands_of_nodes_take_a_fraction_of_a_second():
    """5,000 nodes in at most 0.2 s; measured on a program of fewer, whose ops are all new."""
    model = gpt(n_layer=3)
    compiled = spmd.compile(train_step, mesh_of(2, 2), params=GPT_PLAN, inputs=INPUTS)
    program = compiled.program_for(model, torch.optim.AdamW(model.parameters()), *tokens(4)[0])
    times = []
    for _ in range(3):
        start = time.process_time()
        program.verify()
        times.append(time.process_time() - start)
    assert min(times) / len(program.graph.nodes) * 5000 < 0.2
