"""A capture is the step on global sizes, functional, with numbers as symbols. Capturing changes nothing."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn, optim

from spmd.expand.capture import capture
from spmd.expand.captured import Argument, Captured
from spmd.expand.places.roles import MARK
from spmd.expand.state import Slot, State
from tests.expand.side_by_side import Case, gpt, rows, same, tensors, tokens, train_step

aten = torch.ops.aten


def captured(fn, **args) -> Captured:
    """The capture of `fn(**args)`."""
    return capture(fn, args, lambda given: fn(**given), State.of(args))


def text(found: Captured) -> str:
    """The graph, with a line for each node."""

    def line(n):
        name = str(n.target).replace("aten.", "").removesuffix(".default")
        if n.op == "placeholder":
            return f"{n.name}: {next(names)}"
        if n.op == "output":
            return "return " + ", ".join(f"{to} = {v}" for to, v in zip(found.outputs, n.args[0], strict=True))
        call = getattr(n.target, "__name__", name) if "built-in" in name else name
        return f"{n.name} = {call}({', '.join(map(str, [*n.args, *n.kwargs.values()]))})"

    names = iter(found.inputs)
    return "\n".join(map(line, found.graph.nodes))


def ops(found: Captured) -> list[str]:
    return [str(n.target) for n in found.graph.nodes if n.op == "call_function"]


# ---- the graph --------------------------------------------------------------------------------


def descend(model, x, rate: float):
    """Plain gradient descent on one weight."""
    loss = (x @ model.weight).square().sum()
    (slope,) = torch.autograd.grad(loss, model.weight)
    with torch.no_grad():
        model.weight.sub_(rate * slope)
    return loss, "done"


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(0))


def test_the_graph_is_the_step_with_its_writes_as_results():
    """Forward, backward and update. A written tensor is an output under its name; plain results are kept separately."""
    found = captured(descend, model=Vector(), x=torch.ones(5, 3), rate=0.1)
    assert_expected_inline(
        text(found),
        """\
arg0_1: model.weight
arg0_2: model.count
arg0_3: x
arg0_4: rate
mv = mv(arg0_3, arg0_1)
pow_1 = pow.Tensor_Scalar(mv, 2)
sum_1 = sum(pow_1)
ones_like = ones_like(sum_1, False, torch.preserve_format)
expand = expand(ones_like, [x0])
pow_2 = pow.Tensor_Scalar(mv, 1.0)
mul = mul.Scalar(pow_2, 2.0)
mul_1 = mul.Tensor(expand, mul)
t = t(arg0_3)
mv_1 = mv(t, mul_1)
gradient = spmd.gradient(mv_1, model.weight)
mul_2 = mul.Tensor(gradient, arg0_4)
sub = sub.Tensor(arg0_1, mul_2)
return 0 = sum_1, model.weight = sub, model.count = arg0_2""",
    )
    assert found.leaves == (None, "done")


def test_nothing_in_the_graph_writes():
    """A whole training step: no op with a side effect, no profiler mark, no renaming."""
    model = gpt()
    found = captured(train_step, model=model, optimizer=optim.AdamW(model.parameters(), foreach=True), **batch())
    for node in found.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node.format_node()
            assert node.target.namespace == "aten" or node.target is MARK, node.format_node()
    assert not {"aten.detach.default", "aten.alias.default", "aten.addmm.default", "aten.mean.default"} & set(
        ops(found)
    )
    assert not any("_foreach" in op for op in ops(found))


def batch():
    x, y = tokens(2, n=1)[0]
    return {"x": x, "y": y}


def test_sizes_are_global():
    """Sizes that the step reads from shapes are text in the graph, and numbers in the graph for a shape."""

    def step(x):
        return x.sum() / x.numel() + torch.arange(x.shape[0]).sum() * x.shape[0]

    found = captured(step, x=torch.ones(6, 4))
    args = [str(a) for n in found.graph.nodes for a in n.args]
    assert {"x0*x1", "x1*x0"} & {*args} and "x0" in args
    for shape in ((6, 4), (5, 3)):
        args = [a for n in found.at({"x": shape}, {}).graph.nodes for a in n.args]
        assert shape[0] * shape[1] in args and shape[0] in args


def test_tied_tensors_are_one_input():
    """Under the first of their names."""
    model = gpt(tied=True)
    found = captured(train_step, model=model, optimizer=optim.SGD(model.parameters()), **batch())
    paths = [str(i) for i in found.inputs]
    assert "model.tok_emb.weight" in paths and "model.head.weight" not in paths
    assert len(set(paths)) == len(paths)


def test_arguments_may_be_nested():
    """Tensors, numbers and modules in dicts and lists, each under its path; plain values are part of the graph."""

    def step(parts, options):
        out = parts["model"](parts["data"][0]) * options["scale"]
        return {"out": out, "again": [out, options["name"], 3]}

    model = nn.Linear(3, 2)
    found = captured(step, parts={"model": model, "data": [torch.ones(4, 3)]}, options={"scale": 2.0, "name": "n"})
    assert list(map(str, found.inputs)) == [
        "parts.model.weight", "parts.model.bias", "parts.data.0", "options.scale"
    ]  # fmt: skip
    assert found.leaves == (None, None, "n", 3)


def test_constants_are_kept_by_value():
    """Tensors made from numbers in the step."""

    def step(x):
        return x + torch.tensor([1.0, 2.0]) * torch.tensor(3)

    found = captured(step, x=torch.ones(2))
    assert {str(t.tolist()) for t in found.constants.values()} == {"[1.0, 2.0]", "3"}


# ---- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.1, 0.0, 1.0, -1.0, 1e-30, 3.0, math.inf])
def test_floats_are_symbols_whatever_their_value(lr):
    """Rates of 0 and 1 are symbols too: an update with another rate has the same graph."""
    model = Vector()
    found = captured(descend, model=model, x=torch.ones(5, 3), rate=lr)
    assert Argument("rate") in found.inputs
    assert all(found.holds({"rate": rate}) for rate in (0.5, 0.0, 1.0, -2.0))
    assert all(n.users for n in found.graph.nodes if n.op == "placeholder")


def test_branches_on_numbers_are_conditions():
    """A branch is decided by the present value, and the decision is remembered."""

    def step(x, rate: float):
        return x * 2 if rate > 0.25 else x * rate

    found = captured(step, x=torch.ones(2), rate=0.1)
    assert [found.holds({"rate": v}) for v in (0.2, 0.25, 0.26, -1.0)] == [True, True, False, True]


def test_hyper_parameters_are_numbers_by_path():
    """Floats in parameter groups are inputs, nested ones too; flags are not."""
    model = Vector()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.9))

    def step(model, optimizer, x):
        optimizer.zero_grad()
        (x @ model.weight).sum().backward()
        optimizer.step()

    found = captured(step, model=model, optimizer=optimizer, x=torch.ones(2, 3))
    numbers = [str(i) for i in found.inputs if isinstance(i, Argument)]
    group = "optimizer.param_groups.0"
    assert numbers == [
        "x",
        f"{group}.lr",
        f"{group}.betas.0",
        f"{group}.betas.1",
        f"{group}.eps",
        f"{group}.weight_decay",
    ]


def test_the_step_count_is_read_from_its_tensor():
    """The first step makes the count as a constant; later steps read it from its tensor."""
    case = Case(gpt, batches=tokens(2, n=1))
    model, optimizer = case.begin()
    args = dict(model=model, optimizer=optimizer, **batch())
    assert "aten._local_scalar_dense.default" not in ops(captured(train_step, **args))
    train_step(**args)
    found = captured(train_step, **args)
    reads = [n for n in found.graph.nodes if "_local_scalar_dense" in str(n.target)]
    assert reads and all(str(n.args[0].target) == "aten.add.Tensor" for n in reads)


def test_constants_that_meet_numbers_are_not_computed_early():
    """NAdam keeps a product of numbers in a tensor: torch alone would make it NaN in the first step."""
    model = Vector()
    optimizer = optim.NAdam(model.parameters())

    def step(model, optimizer, x):
        optimizer.zero_grad()
        (x @ model.weight).sum().backward()
        optimizer.step()

    found = captured(step, model=model, optimizer=optimizer, x=torch.ones(2, 3))
    assert not any(isinstance(a, float) and math.isnan(a) for n in found.graph.nodes for a in n.args)


# ---- what a capture leaves behind -------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_changes_nothing(fails):
    """Parameters, buffers, gradients, optimiser, flags, torch's random numbers; also when it fails."""

    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        model.extra = torch.ones(())
        if fails:
            raise LookupError
        del model.extra
        return loss

    case = Case()
    model, optimizer = case.begin()
    x, y = case.batches[0]
    train_step(model, optimizer, x, y)
    before, objects, random = tensors(model, optimizer), [id(p) for p in model.parameters()], torch.get_rng_state()
    groups, given = copy.deepcopy(optimizer.state_dict()), (x.clone(), y.clone())
    keys = {k: list(vars(m)) for k, m in model.named_modules()}
    try:
        captured(step, model=model, optimizer=optimizer, x=x, y=y)
    except LookupError:
        assert fails
    same(tensors(model, optimizer), before, "state", rtol=0, atol=0)
    same(optimizer.state_dict(), groups, "optimizer", rtol=0, atol=0)
    assert [id(p) for p in model.parameters()] == objects == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert {k: list(vars(m)) for k, m in model.named_modules()} == keys
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(x, given[0]) and torch.equal(y, given[1])
    train_step(model, optimizer, x, y)


def test_a_capture_reads_no_data():
    """Shapes are enough: parameters and inputs may be on the meta device."""
    with torch.device("meta"):
        model = nn.Linear(1 << 16, 1 << 16)
        x = torch.ones(1 << 20, 1 << 16)

    def step(model, x):
        return F.gelu(model(x)).sum()

    found = captured(step, model=model, x=x)
    assert found.inputs[:2] == (Slot("parameter", "model.weight"), Slot("parameter", "model.bias"))


def test_the_result_of_a_capture_is_right():
    """Run on one device, the graph gives what the step gives."""
    case = Case(batches=rows(5, n=1))
    model, optimizer = case.begin()
    x, y = case.batches[0]
    found = captured(train_step, model=model, optimizer=optimizer, x=x, y=y)
    state = State.of({"model": model, "optimizer": optimizer})
    values = state.tensors() | {Argument("x"): x, Argument("y"): y}
    values |= {Argument(path): v for path, v in state.numbers().items()}
    given = [v.clone() if isinstance(v := values[i], torch.Tensor) else v for i in found.inputs]
    module = torch.fx.GraphModule(dict(found.constants), found.graph)
    with torch.no_grad():
        out = torch.fx.Interpreter(module).run(*given, enable_io_processing=False)
    alone = copy.deepcopy((model, optimizer))
    loss = train_step(*alone, x, y)
    want = tensors(*alone)
    got = {str(to): v for to, v in zip(found.outputs, out, strict=True)}
    same(got.pop("0"), loss.detach(), "loss")
    same(got, want, "state")
