"""Memory is reused where it changes no result, and tensors that outlive a call have memory of their own."""

import copy
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spmd
import spmd.expand.code as code_module
from spmd import Replicate, Shard
from spmd.comm import C10dTransport
from spmd.expand.passes.aliasing import written_into
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.passes.reduce_in_place import reduce_in_place
from spmd.expand.passes.unshare_outputs import unshare_outputs
from spmd.mesh import as_rank
from spmd.sim import run_ranks
from spmd.tensor.spec import spec_of
from tests.expand.side_by_side import INPUTS, Net, rows, same, values

aten = torch.ops.aten


# ---- steps that write -------------------------------------------------------------------------


class Kept(nn.Module):
    """A module to write into: sharded matrices, a replicated matrix, a vector and a count."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(16.0).view(4, 4) / 8, requires_grad=False)
        self.b = nn.Parameter(1 - torch.arange(16.0).view(4, 4) / 4, requires_grad=False)
        self.register_buffer("c", torch.arange(4.0) - 1)
        self.register_buffer("whole", torch.arange(16.0).view(4, 4))
        self.register_buffer("n", torch.tensor(3))
        self.p = nn.Parameter(torch.ones(4, 4))
        self.q = nn.Parameter(torch.full((4, 4), 2.0))


PLAN = {"a": {"tp": Shard(0), "dp": Shard(1)}, "b": {"tp": Shard(0)}, "p": {"dp": Shard(1)}, "q": {"dp": Shard(1)}}


def with_its_transpose(m, x):
    m.a.copy_(m.a + m.a.t())
    m.whole = m.whole + m.whole.t()


def scaled_by_its_rows(m, x):
    m.whole = m.whole * m.whole[1]
    m.c = m.c - m.c[2]


def twice_itself(m, x):
    m.a.add_(m.a)
    m.b.addcmul_(m.b, m.b)
    m.c.mul_(m.c)


def read_after_the_write(m, x):
    y = m.a * 2
    m.a.add_(1)
    return y + m.a


def view_read_after_the_write(m, x):
    row = m.a[1]
    flat = m.b.view(-1)
    m.a.mul_(0.5)
    m.b.sub_(1)
    return row, flat, m.a[1:3]


def view_of_the_old_value(m, x):
    old = (m.a + 0).t().clone()
    m.a.add_(old)
    return old


def written_through_views(m, x):
    m.a[1:3].mul_(2)
    m.b[:, ::2] = 0.5
    m.b.diagonal().add_(1)
    m.c[0] += x.sum()


def summed_then_written(m, x):
    total, rows = m.a.sum(), m.b.sum(0)
    m.a.div_(2)
    m.b.add_(1)
    return total, rows


def chained(m, x):
    m.a.mul_(2).add_(x).clamp_(max=3.0)
    m.n.add_(1).mul_(2)
    return m.n


def swapped(m, x):
    m.a, m.b = m.b, m.a


def swapped_by_copies(m, x):
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)


def shifted(m, x):
    """Writes c and returns its old value."""
    old = m.c
    m.c = m.c * 2 + x[0]
    return old


def shifted_pair(m, x):
    m.b = m.a
    m.a = nn.Parameter(m.a + 1, requires_grad=False)


def turned(m, x):
    m.b = nn.Parameter(m.b.t(), requires_grad=False)
    m.whole = (m.whole + 1).t()


def new_value_returned(m, x):
    m.c = m.c + 1
    return m.c


def state_returned(m, x):
    return m.a, m.c


def replaced_by_constants(m, x):
    m.c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    m.n = torch.ones((), dtype=torch.int64)
    return m.c


def constants_written(m, x):
    m.c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    m.c.add_(x[0])
    return torch.tensor([7.0]), torch.zeros(2)


def input_kept(m, x):
    """The caller's tensor becomes state, and the next call writes into it."""
    m.a.add_(1)
    m.c.mul_(2)
    before = m.c
    m.c = x[1]
    return x, before


def stretched(m, x):
    m.b = nn.Parameter(m.c.expand(4, 4), requires_grad=False)
    m.c.add_(1)


def one_gradient_for_two(m, x):
    ((m.p + m.q) * x).square().sum().backward()
    return m.p.grad, m.q.grad


def one_value_twice(m, x):
    y = m.a @ x
    return [y, y], {"t": y.t()}


def read_by_a_product(m, x):
    y = m.a @ m.b
    m.a.add_(1)
    m.b.mul_(y)
    return m.a @ m.b


STEPS = [
    with_its_transpose, scaled_by_its_rows, twice_itself, read_after_the_write, view_read_after_the_write,
    view_of_the_old_value, written_through_views, summed_then_written, chained, swapped, swapped_by_copies, shifted,
    shifted_pair, turned, new_value_returned, state_returned, replaced_by_constants, constants_written, input_kept,
    stretched, one_gradient_for_two, one_value_twice, read_by_a_product,
]  # fmt: skip


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "not reused"])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_writes_are_those_of_one_device(step, reuse):
    """Three calls. Each result is still the same after the last call, and the caller's tensors are unchanged."""
    inputs = [torch.arange(16.0).view(4, 4) + i for i in range(3)]
    alone = Kept()
    want = [values(step(alone, x.clone())) for x in inputs]
    state = values({**dict(alone.named_parameters()), **dict(alone.named_buffers())})
    grads = [values(p.grad) for p in alone.parameters()]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, mine = Kept(), copy.deepcopy(inputs)
        compiled = spmd.compile(step, mesh, params=PLAN)
        returned, then = [], []
        for x in mine:
            returned.append(compiled(model, x))
            then.append(values(returned[-1]))
        same(then, want, "returned")
        if step is not state_returned:
            same(values(returned), want, "returned, later")
        same(values({**dict(model.named_parameters()), **dict(model.named_buffers())}), state, "state")
        same([values(p.grad) for p in model.parameters()], grads, "gradients")
        same(mine, inputs, "inputs")
        if step is one_gradient_for_two:
            model.p.grad.to_local().zero_()
            same(values(model.q.grad), grads[-1], "the other gradient")

    keep = mock.patch.object(code_module, "reuse_memory", lambda graph, owned: 0)
    with keep if not reuse else mock.patch.object(code_module, "reuse_memory", reuse_memory):
        run_ranks(rank, 4)


# ---- graphs -----------------------------------------------------------------------------------

MESH = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
all_reduce, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default


class WithSpecs(fx.Interpreter):
    """Gives each node of a graph the spec of a replicated tensor of its shape."""

    def run_node(self, node):
        out = node.args[0] if node.target in (all_reduce, wait) else super().run_node(node)
        out = self.env[out] if isinstance(out, fx.Node) else out
        if isinstance(out, torch.Tensor):
            node.meta["spec"] = spec_of(MESH, [Replicate()], out.shape, out.dtype)
        return out


def graph_of(fn) -> fx.Graph:
    """The graph of a function of one 4 x 4 matrix."""
    module = fx.symbolic_trace(fn)
    WithSpecs(module).run(torch.ones(4, 4))
    return module.graph


def targets(graph: fx.Graph) -> str:
    return " ".join(str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function")


def in_flight(x):
    h = all_reduce(x, "sum", "0")
    y = aten.add.Tensor(x, 1)
    return wait(h), y


def arrived(x):
    y = aten.clone.default(wait(all_reduce(x, "sum", "0")))
    return y, aten.add.Tensor(x, 1)


def chain(x):
    return aten.sqrt.default(aten.mul.Tensor(aten.add.Tensor(x, x), 2.0))


def view_later(x):
    row = aten.select.int(x, 0, 1)
    y = aten.add.Tensor(x, 1)
    return aten.neg.default(row), y


def with_a_view(x):
    return aten.add.Tensor(x, aten.t.default(x))


def fresh(x):
    return aten.add.Tensor(aten.neg.default(aten.mm.default(x, x)), x)


def fresh_and_its_view(x):
    y = aten.neg.default(aten.t.default(x))
    row = aten.select.int(y, 0, 1)
    return aten.mul.Tensor(y, 2.0), aten.neg.default(row)


def fresh_and_returned(x):
    y = aten.neg.default(aten.t.default(x))
    return y, aten.mul.Tensor(y, 2.0)


def fresh_and_turned(x):
    """The result lies as its operand does."""
    return aten.mul.Tensor(aten.neg.default(aten.t.default(x)), aten.sum.default(x))


def read_later(x):
    y = aten.add.Tensor(x, 1)
    return aten.mul.Tensor(x, y)


def other_dtype(x):
    return aten.gt.Scalar(x, 0)


def other_shape(x):
    return aten.add.Tensor(aten.sum.dim_IntList(x, [0]), x)


def not_first(x):
    return aten.sub.Tensor(aten.ones_like.default(x), x)


def no_pointwise_op(x):
    return aten.cumsum.default(x, 0)


def of_a_reshaped(x):
    return aten.add.Tensor(aten._unsafe_view.default(x, [4, 4]), x)


def test_what_has_no_spec_is_not_written_into():
    """Inside of a recipe nobody knows whether the result of the product is larger than its operand: here it is."""
    graph = fx.symbolic_trace(lambda x: aten.mul.Tensor(aten.neg.default(aten.sum.dim_IntList(x, [1], True)), x)).graph
    assert not reuse_memory(graph, [False])
    assert targets(graph) == "sum.dim_IntList neg.default mul.Tensor"


@pytest.mark.parametrize(
    "fn, want",
    [
        (chain, "add_.Tensor mul_.Tensor sqrt_.default"),
        (in_flight, "_c10d_functional.all_reduce.default add.Tensor _c10d_functional.wait_tensor.default"),
        (arrived, "_c10d_functional.all_reduce.default _c10d_functional.wait_tensor.default clone.default add_.Tensor"),
        (view_later, "select.int add.Tensor neg.default"),
        (with_a_view, "t.default add.Tensor"),
        (read_later, "add.Tensor mul_.Tensor"),
        (fresh, "mm.default neg.default add_.Tensor"),
        (fresh_and_its_view, "t.default neg.default select.int mul.Tensor neg.default"),
        (fresh_and_returned, "t.default neg.default mul.Tensor"),
        (fresh_and_turned, "t.default neg.default sum.default mul_.Tensor"),
        (other_dtype, "gt.Scalar"),
        (other_shape, "sum.dim_IntList add.Tensor"),
        (not_first, "ones_like.default sub.Tensor"),
        (no_pointwise_op, "cumsum.default"),
        (of_a_reshaped, "_unsafe_view.default add.Tensor"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_an_op_writes_into_its_first_operand_that_is_not_read_again(fn, want):
    """Not while a collective reads it, not if a view of it is another operand, and only if the result fits."""
    graph = graph_of(fn)
    changed = reuse_memory(graph, [True])
    assert targets(graph) == want
    assert changed == sum("_." in name for name in want.split() if "wait" not in name and "_c10d" not in name)
    if all_reduce not in {n.target for n in graph.nodes}:
        x = torch.linspace(0.1, 2, 16).view(4, 4)
        same(list(values([fx.GraphModule({}, graph)(x.clone())])), values([fn(x.clone())]), "results")


def bucket(x):
    return wait(all_reduce(torch.cat([x.reshape(-1), x.reshape(-1)]), "sum", "0"))


def product(x):
    return wait(all_reduce(aten.mm.default(x, x).contiguous(), "sum", "0"))


def one_of_two_results(x):
    values, indices = aten.sort.default(x)
    return wait(all_reduce(values, "sum", "0")), indices


def of_an_input(x):
    return wait(all_reduce(x.view(-1), "sum", "0"))


def read_elsewhere(x):
    y = aten.add.Tensor(x, 1)
    return aten.neg.default(y), wait(all_reduce(y.view(-1), "sum", "0"))


def sent_twice(x):
    y = aten.add.Tensor(x, 1)
    return wait(all_reduce(y, "sum", "0")), wait(all_reduce(y, "max", "0"))


def a_piece(x):
    first, second = aten.add.Tensor(x, 1).split([1, 3])
    return wait(all_reduce(first, "sum", "0")), second


@pytest.mark.parametrize(
    "fn, changed",
    [
        (bucket, 1), (product, 1), (one_of_two_results, 1), (of_an_input, 0), (read_elsewhere, 0), (sent_twice, 0),
        (a_piece, 0),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)  # fmt: skip
def test_an_all_reduce_writes_into_what_was_made_for_it_alone(fn, changed):
    graph = fx.symbolic_trace(fn).graph
    assert reduce_in_place(graph, all_reduce, torch.ops._c10d_functional.all_reduce_.default) == changed


def test_inputs_that_are_not_owned_are_not_written_into():
    graph = graph_of(chain)
    assert reuse_memory(graph, [False]) == 2
    assert targets(graph) == "add.Tensor mul_.Tensor sqrt_.default"


@pytest.mark.parametrize(
    "fn, homes, copies",
    [
        (lambda x: (x,), [0], 0),  # unchanged
        (lambda x: (x,), [None], 1),  # an input, as a result
        (lambda x: (aten.add_.Tensor(x, 1),), [0], 0),  # written in place
        (lambda x: (aten.add_.Tensor(x, 1),), [None], 1),
        (lambda x: (aten.t.default(x),), [0], 1),  # a view of its own home, in another order
        (lambda x: (y := aten.add.Tensor(x, 1), y), [None, None], 1),  # one value twice
        (lambda x: (y := aten.add.Tensor(x, 1), aten.t.default(y)), [0, None], 1),
        (lambda x: (aten.add.Tensor(x, 1), aten.add.Tensor(x, 2)), [0, None], 0),
        (lambda x: (wait(all_reduce(x, "sum", "0")),), [None], 0),
        (lambda x: (h := aten.clone.default(x).split([1, 3]), [h[0], h[1]])[1], [None, None], 0),  # pieces of a split
        (lambda x: (h := aten.clone.default(x).split([1, 3]), [h[0], h[0].t()])[1], [None, None], 1),
        (lambda x: (h := aten.clone.default(x), h.split([1, 3])[1]), [None, None], 1),
    ],
    ids=range(12),
)
def test_outputs_that_share_memory_are_copied(fn, homes, copies):
    graph = graph_of(fn)
    assert unshare_outputs(graph, homes) == copies


def test_a_result_is_no_piece_of_a_buffer():
    """A gradient may be one; what the caller keeps has memory of its own."""
    graph = graph_of(lambda x: (h := wait(all_reduce(x, "sum", "0")).split([1, 3]), (h[0], h[1]))[1])
    split = next(n for n in graph.nodes if n.target == "split")
    split.meta["spec"] = ()  # an op of the user's has one
    assert unshare_outputs(graph, [None, None], [True, False]) == 0
    del split.meta["spec"]
    assert unshare_outputs(graph, [None, None], [True, False]) == 1
    loss, gradient = graph.output_node().args[0]
    assert loss.target is aten.clone.default and gradient.args == (split, 1)


def test_a_parameter_keeps_its_memory():
    """The update is written into the rank's block; nothing is copied back. The loss holds nothing but itself."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    base = nn.Linear(4, 4)

    def rank(r):
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters())
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh, inputs={"x": [Shard(0)]})
        for _ in range(2):
            loss = compiled(model, optimizer, torch.ones(4, 4))
        assert loss.to_local().untyped_storage().nbytes() == loss.nbytes
        kept = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
        before = [t.to_local().data_ptr() for t in kept]
        compiled(model, optimizer, torch.ones(4, 4))
        assert [t.to_local().data_ptr() for t in kept] == before
        outputs = next(n for n in compiled._last.module.graph.nodes if n.op == "output").args[0]
        return len(kept), sum(written_into(v).op == "placeholder" for v in outputs)

    assert run_ranks(rank, 2) == [(8, 8)] * 2


class Alive(TorchDispatchMode):
    """How many results of products live at once."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op is aten.mm.default:
            self.made.append(weakref.ref(out))
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return out


def test_what_is_read_no_more_is_freed_while_the_program_runs():
    """Of a chain of products two live at once: the one that is read and the one that is made."""

    def step(x, w):
        for _ in range(8):
            x = x @ w
        return x.sum()

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2,))
        compiled = spmd.compile(step, mesh, inputs={"x": [Shard(0)]})
        compiled(torch.ones(4, 4), torch.ones(4, 4))
        with Alive() as alive:
            compiled(torch.ones(4, 4), torch.ones(4, 4))
        return len(alive.made), alive.most

    assert run_ranks(rank, 2) == [(8, 2)] * 2


class Tail(nn.Module):
    """A buffer that shows all rows but the first of a tensor: where they are sharded, a copy."""

    def __init__(self, of):
        super().__init__()
        self.register_buffer("tail", of[1:])


def test_a_buffer_that_is_a_view_is_read_and_written_as_one():
    """Its base was written before the step, and gets what the step writes."""

    def step(model):
        model.tail.mul_(2)
        return model.tail + 1

    def written(base):
        compiled, model, results = step, Tail(base), []
        if isinstance(base, spmd.DTensor):
            compiled = spmd.compile(step, base.device_mesh)
        for _ in range(2):
            base.add_(1)
            results += [compiled(model), base.clone()]
        return results

    want = written(torch.arange(8.0))
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,))
        found = written(spmd.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
        assert [x.full_tensor().reconcile().tolist() for x in found] == [x.tolist() for x in want]


def test_sums_of_exchanged_terms_are_memory_of_their_own():
    """Gradients in shards, on gloo sums of terms that ranks exchange, leave the program without a copy of each."""

    def accumulate(model, x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    step = spmd.compile(accumulate, mesh, inputs=INPUTS, fully_shard="dp")
    program = step.program_for(Net(hidden=64), *rows(8, 1)[0])
    with as_rank(0):
        graph = code_module.code_for(program, (0,), C10dTransport()).module.graph
    assert any(n.target is torch.add for n in graph.nodes)
    assert not any(n.target is aten.clone.default for n in graph.nodes)
