"""Gradients of data-parallel ranks are those of one device, and so is their norm."""

from __future__ import annotations

import contextlib
import copy
import functools
from math import inf

import pytest
import torch
import ways
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import LocalTensorMode, Replicate, Shard, distribute_tensor
from spmd.debug import CommDebugMode
from spmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    clip_grad_norm_,
    data_parallel,
    parallelize_module,
)  # fmt: skip
from spmd.parallel.clip import neighbours
from spmd.sim import localize
from tests.parallel.test_fully_shard import (
    BATCHES,
    BRANCHES,
    Branches,
    Fails,
    alone,
    branches_of,
    equal,
    loss_of,
    mesh_of,
    model,
    part_on,
    seen,
    sgd,
    train,
    whole,
)  # fmt: skip


@pytest.mark.parametrize("axes", [{"dp": 4}, {"rep": 2, "dp": 2}, {"dp": 1}], ids=str)
@pytest.mark.parametrize("cap", [25.0, 1e-4])
def test_it_learns_as_one_device(axes, cap):
    want = alone("uneven")
    with LocalTensorMode(torch.Size(axes.values()).numel()):
        mesh = mesh_of(axes)
        net = data_parallel(localize(model("uneven")), mesh, bucket_cap_mb=cap)
        equal(train(net, sgd(net), part=part_on(mesh)), want)


def test_beside_tensor_parallelism():
    want = alone("uneven")
    with LocalTensorMode(4):
        both = mesh_of({"dp": 2, "tp": 2})
        net = parallelize_module(
            localize(model("uneven")),
            both["tp"],
            {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
        )
        net = data_parallel(net, both["dp"])
        equal(train(net, sgd(net), part=part_on(both["dp"])), want)


class Normed(nn.Module):
    """Gradients of these lie otherwise than they do: the table's is whole, those of the norm are sums that are owed."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return self.down(self.up(self.norm(self.words(ids))))


OTHERWISE = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(),
}  # fmt: skip


@pytest.mark.parametrize("cap", [25.0, 1e-5])
def test_gradients_that_lie_otherwise_than_their_parameters(cap):
    torch.manual_seed(0)
    net, batches = Normed().double(), torch.randint(6, (2, 4, 4))
    one = copy.deepcopy(net)
    want = train(one, sgd(one), batches)
    with LocalTensorMode(4):
        both = mesh_of({"dp": 2, "tp": 2})
        net = data_parallel(parallelize_module(localize(net), both["tp"], OTHERWISE), both["dp"], bucket_cap_mb=cap)
        equal(train(net, sgd(net), batches, part_on(both["dp"])), want)


def in_the_backward(net: nn.Module) -> list:
    """Steps of an optimiser for each parameter as soon as its gradient is there. Returns what removes them."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    return [p.register_post_accumulate_grad_hook(step) for p in net.parameters() if p.requires_grad]


def hooked_training(when: str, net: nn.Module, wrap=lambda net: net, part=lambda ids: ids) -> dict:
    """Two steps in backward passes, and a pass when the hooks are removed."""
    hooks = in_the_backward(net) if when == "before" else []
    net = wrap(net)
    hooks = hooks or in_the_backward(net)
    for ids in BATCHES:
        loss_of(net, part(ids)).backward()
    for hook in hooks:
        hook.remove()
    loss_of(net, part(BATCHES[0])).backward()
    return seen(net)


@pytest.mark.parametrize("way", ("gloo", "threads"))
@pytest.mark.parametrize("when", ["before", "behind"])
def test_hooks_that_wait_for_a_gradient_have_the_average(way, when, gloo4):
    """Such as an optimiser in the backward pass: they are called when it is there."""
    want = hooked_training(when, model("uneven"))
    for got in ways.run(way, gloo4, hooked_on_ranks, when):
        assert set(got) == set(want)
        assert all(torch.allclose(got[name], x, rtol=1e-10, atol=1e-12) for name, x in want.items())


def hooked_on_ranks(when):
    mesh = mesh_of({"dp": 4})
    wrap = functools.partial(data_parallel, mesh=mesh, bucket_cap_mb=1e-3)
    return hooked_training(when, model("uneven"), wrap, part_on(mesh))


def test_hooks_wait_for_the_pass_that_sends():
    net, calls = data_parallel(nn.Linear(3, 2), mesh_of({"dp": 1})), []
    net.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    with net.no_sync():
        net(torch.ones(1, 3)).sum().backward()
    assert not calls
    net(torch.ones(1, 3)).sum().backward()
    assert len(calls) == 1 and calls[0].eq(2).all()


class Grown(nn.Module):
    """Buffers or parameters that come later."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def drawn(*shape: int) -> torch.Tensor:
    """Numbers, other ones on each rank but the first."""
    rank = spmd.mesh.current_rank() if isinstance(spmd.mesh.current_rank(), int) else 0
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).sin() + rank


def other_layer(net):
    net.last = nn.Linear(4, 3).double()
    net.last.weight.data, net.last.bias.data = drawn(3, 4), drawn(3)


def with_statistics(net):
    net.last = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().requires_grad_(False)
    net.last[0].weight.data, net.last[0].bias.data, net.last[1].running_mean = drawn(4, 4), drawn(4), drawn(4)
    net.eval()


CHANGES = {
    "unfrozen": lambda net: net.last.requires_grad_(True), "other layer": other_layer, "buffers": with_statistics,
    "frozen": lambda net: net.first.weight.requires_grad_(False),
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net.first),
    "assigned": lambda net: net.load_state_dict({k: x * 2 for k, x in net.state_dict().items()}, assign=True),
    "beside": lambda net: net.first.register_parameter("scale", nn.Parameter(drawn(1))),
}  # fmt: skip


def changed_in_training(change, wrap=lambda net: net, part=lambda x: x) -> dict:
    net = Grown().double()
    for i, p in enumerate(net.parameters()):
        p.data.copy_(torch.arange(p.numel()).reshape(p.shape).cos() + i)
    net = wrap(net)
    x = torch.arange(32, dtype=torch.float64).reshape(8, 4).sin()
    for step in range(2):
        if step:
            CHANGES[change](net)
            net.first.weight.grad = None
        net(part(x)).square().mean().backward()
    return seen(net) | {name: b for name, b in net.named_buffers() if b.ndim}


def changed_on_ranks(changes):
    mesh = mesh_of({"dp": 4})
    wrap = functools.partial(data_parallel, mesh=mesh, bucket_cap_mb=1e-4)
    return [changed_in_training(change, wrap, part_on(mesh)) for change in changes]


@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_modules_that_change_are_averaged_as_they_are(way, gloo4):
    """Unfrozen, replaced, reparametrized, assigned: new ones begin with the first rank's numbers."""
    want = [changed_in_training(change) for change in CHANGES]
    for rank in ways.run(way, gloo4, changed_on_ranks, tuple(CHANGES)):
        for got, found, change in zip(rank, want, CHANGES, strict=True):
            assert set(got) == set(found), change
            assert all(torch.allclose(got[name], x, rtol=1e-10, atol=1e-12) for name, x in found.items()), change


def gradient_alone(net: nn.Linear, within=contextlib.nullcontext) -> torch.Tensor:
    with within():
        return torch.autograd.grad(net(torch.ones(1, 3)).sum(), [net.bias])[0]


def on_two(net: nn.Module) -> nn.Module:
    return data_parallel(localize(net), mesh_of({"dp": 2}))


REFUSED = {
    "autograd.grad": (lambda: gradient_alone(on_two(nn.Linear(3, 2))), RuntimeError, "autograd.grad.*no_sync"),
    "max_norm": (lambda: on_two(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))), ValueError, "0: max_norm=1.0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_each_ranks_own_is_refused(what):
    make, error, said = REFUSED[what]
    with LocalTensorMode(2), pytest.raises(error, match=said):
        make()


def test_gradients_of_inputs_and_of_some_parameters():
    """The first are each rank's own, as the inputs are, and of some parameters the average."""
    want, ids = model("uneven"), BATCHES[0]
    loss_of(want, ids).backward(inputs=[want.head.weight])
    with LocalTensorMode(4):
        mesh = mesh_of({"dp": 4})
        net = data_parallel(localize(model("uneven")), mesh)
        loss_of(net, part_on(mesh)(ids)).backward(inputs=[net.head.weight])
        equal(seen(net), seen(want))
        layer, x = data_parallel(localize(nn.Linear(3, 2)), mesh), torch.ones(1, 3, requires_grad=True)
        assert gradient_alone(layer, layer.no_sync).reconcile().eq(1).all()
        (got,) = torch.autograd.grad(layer(x).sum(), [x])
        assert torch.equal(got.reconcile(), layer.weight.detach().sum(0, keepdim=True).reconcile())


def test_a_copy_and_the_original_are_both_averaged():
    want = alone("uneven")
    with LocalTensorMode(4):
        mesh = mesh_of({"dp": 4})
        net = data_parallel(localize(model("uneven")), mesh)
        for each in (copy.deepcopy(net), net):
            equal(train(each, sgd(each), part=part_on(mesh)), want)


@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_real_ranks_do_the_same(way, gloo4):
    want = alone("uneven")
    for got in ways.run(way, gloo4, on_real_ranks):
        equal(got, want)


def on_real_ranks():
    mesh = mesh_of({"dp": 4})
    net = data_parallel(model("uneven"), mesh, bucket_cap_mb=1e-3)
    return train(net, sgd(net), part=part_on(mesh))


def by_context(net, is_last):
    return contextlib.nullcontext() if is_last else net.no_sync()


def by_attribute(net, is_last):
    net.require_backward_grad_sync = is_last
    return contextlib.nullcontext()


@pytest.mark.parametrize("within", [by_context, by_attribute])
def test_passes_add_up_and_send_once(within):
    want = model()
    for ids in BATCHES:
        loss_of(want, ids).backward()
    with LocalTensorMode(4):
        mesh = mesh_of({"dp": 4})
        net, part = data_parallel(localize(model()), mesh), part_on(mesh)
        for i, count in enumerate([0, 1]):
            with CommDebugMode() as comm, within(net, i == 1):
                loss_of(net, part(BATCHES[i])).backward()
            assert comm.get_total_counts() == count
        equal(seen(net), seen(want))


@pytest.mark.parametrize("name", ["require_forward_param_sync", "static_graph", "find_unused_parameters"])
def test_what_only_torchs_wrapper_reads_is_refused(name):
    net = data_parallel(nn.Linear(3, 2), mesh_of({"dp": 1}))
    setattr(net, name, False)
    with pytest.raises(AttributeError, match=f"{name}.*DistributedDataParallel"):
        net(torch.ones(1, 3))


def test_parameters_that_torchs_wrapper_would_ignore_are_each_ranks_own():
    def on_rank(rank):
        net = nn.Linear(2, 2)
        net.weight.data.fill_(rank + 1.0)
        net.bias.data.fill_(rank + 1.0)
        net._ddp_params_and_buffers_to_ignore = ["bias"]
        data_parallel(net, mesh_of({"dp": 2}))
        (net(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        return net.weight[0, 0].item(), net.bias[0].item(), net.weight.grad[0, 0].item(), net.bias.grad[0].item()

    assert spmd.sim.run_ranks(on_rank, 2) == [(1, 1, 1.5, 1), (1, 2, 1.5, 2)]


def test_gradients_that_somebody_holds_are_not_overwritten():
    """The memory of a bucket serves again when nobody has its gradients."""
    net = data_parallel(nn.Linear(3, 2), mesh_of({"dp": 1}))
    places, held = [], None
    for i in range(3):
        net.zero_grad()
        net(torch.full((1, 3), i + 1.0)).sum().backward()
        places.append(net.weight.grad.data_ptr())
        held = net.weight.grad.detach() if i == 1 else held
    assert held.eq(2).all() and net.weight.grad.eq(3).all()
    assert places[0] == places[1] != places[2]


def test_ranks_that_use_different_parameters_agree():
    def on_rank(rank):
        layers = nn.ParameterList(nn.Parameter(torch.full((3,), i + 1.0)) for i in range(3))
        data_parallel(layers, mesh_of({"dp": 2}))
        (layers[rank] * 2).sum().backward()
        return [p.grad for p in layers]

    for first, second, third in spmd.sim.run_ranks(on_rank, 2):
        assert first.eq(1).all() and second.eq(1).all() and third is None


def on_branches(rank: int, net: Branches, x: torch.Tensor, uses: tuple[str, ...], cap: float) -> dict:
    data_parallel(net, mesh_of({"dp": len(uses)}), bucket_cap_mb=cap)
    for _ in range(2):
        net(x.chunk(len(uses))[rank], uses[rank]).square().mean().backward()
    return seen(net)


@pytest.mark.parametrize("cap", [25.0, 1e-5])
@pytest.mark.parametrize("uses", BRANCHES[:-1])
def test_ranks_that_take_other_branches_send_the_same(uses, cap):
    """Also where the gradient of one of them comes after its bucket was sent, and that of the others does not."""
    net, x, want = branches_of(uses, Branches)
    for got in spmd.sim.run_ranks(lambda rank: on_branches(rank, copy.deepcopy(net), x, uses, cap), 2):
        equal(got, want)


def test_real_ranks_that_take_other_branches_send_the_same(gloo4):
    uses = "", "outside", "within", "within outside"
    net, x, want = branches_of(uses, Branches)
    for got in gloo4.run(on_branches, net, x, uses, 1e-5, timeout=60.0):
        equal(got, want)


def test_passes_within_the_backward_pass_send_nothing_by_themselves():
    """A bucket is sent once, though the backward pass begins with one of a checkpoint."""
    net = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)])
    with LocalTensorMode(2):
        net = data_parallel(Segments(localize(net)), mesh_of({"dp": 2}), bucket_cap_mb=1e-5)
        with CommDebugMode() as comm:
            net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert comm.get_total_counts() == 4


@pytest.mark.parametrize("cap", [25.0, 1e-5])
def test_a_pass_after_one_that_failed_is_as_any(cap):
    torch.manual_seed(0)
    net, x = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double(), torch.randn(4, 3, dtype=torch.float64)
    want = copy.deepcopy(net)
    want(x).square().mean().backward()
    with LocalTensorMode(2):
        mesh = mesh_of({"dp": 2})
        net = data_parallel(localize(net), mesh, bucket_cap_mb=cap)
        hook = net[1].register_forward_hook(lambda module, args, out: Fails.apply(out))
        with pytest.raises(ValueError, match="on its way back"):
            net(part_on(mesh)(x)).square().mean().backward()
        hook.remove()
        net.zero_grad()
        net(part_on(mesh)(x)).square().mean().backward()
        equal(seen(net), seen(want))


def test_a_compiled_model_averages_its_gradients():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(4, 3, dtype=torch.float64)
    want = copy.deepcopy(net)
    want(x).square().mean().backward()
    with LocalTensorMode(2):
        mesh = mesh_of({"dp": 2})
        net = data_parallel(localize(net), mesh, bucket_cap_mb=1e-5)
        net.compile(backend="eager")
        net(part_on(mesh)(x)).square().mean().backward()
        equal(seen(net), seen(want))


class Segments(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_all_ranks_begin_with_the_first_ranks_numbers():
    def on_rank(rank):
        net = nn.BatchNorm1d(2)
        net.weight.data.fill_(rank + 1.0)
        data_parallel(net, mesh_of({"dp": 2}))
        start = net.weight.detach().clone()
        for _ in range(2):
            net(torch.full((4, 2), rank + 1.0))
        net.eval()
        net(torch.ones(4, 2))
        return start, net.running_mean

    (one, mean), (other, same) = spmd.sim.run_ranks(on_rank, 2)
    assert one.eq(1).all() and other.eq(1).all() and torch.equal(mean, same)


# ---- the norm of all gradients ----------------------------------------------------------------

PLACINGS = {
    "rows": [Shard(0), Replicate()], "both": [Shard(0), Shard(1)], "copies": [Replicate(), Replicate()],
    "twice": [Shard(0), Shard(0)],
}  # fmt: skip


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_clipped_as_on_one_device(p, dtype):
    """Of any layouts together, uneven and empty; a collective for each set of axes."""
    draw = torch.Generator().manual_seed(0)
    whole_ones = [torch.zeros(3, 5, dtype=dtype, requires_grad=True) for _ in range(len(PLACINGS) + 1)]
    for x in whole_ones:
        x.grad = torch.randn(3, 5, generator=draw, dtype=torch.float32).to(dtype)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-2
    with LocalTensorMode(4):
        mesh = mesh_of({"dp": 2, "tp": 2})
        placed = [distribute_tensor(x.detach(), mesh, at) for x, at in zip(whole_ones, PLACINGS.values(), strict=False)]
        placed = [localize(nn.Parameter(whole_ones[-1].detach().clone())), *map(nn.Parameter, placed)]
        placed[0].grad = localize(whole_ones[-1].grad.clone())
        for x, y, at in zip(placed[1:], whole_ones, PLACINGS.values(), strict=False):
            x.grad = distribute_tensor(y.grad, mesh, at)
        with CommDebugMode() as comm:
            got = clip_grad_norm_(placed, 0.5, p)
        want = torch.nn.utils.clip_grad_norm_(copies := copy.deepcopy(whole_ones), 0.5, p)
        assert comm.get_total_counts() == 2
        assert torch.allclose(got.reconcile().double(), want.double(), rtol=tolerance)
        for x, y in zip(placed[1:], copies, strict=False):
            assert torch.allclose(whole(x.grad).reconcile(), y.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("most", [1e-3, 1e9])
def test_long_gradients_lose_no_digits_in_their_norm(most):
    x = torch.zeros(2**20, requires_grad=True)
    x.grad = torch.linspace(0.5, 1.5, 2**20)
    before = x.grad.clone()
    norm = clip_grad_norm_([x], most)
    assert norm.item() == pytest.approx(before.double().norm().item(), rel=3e-7)
    assert torch.allclose(x.grad, before * (most / norm) if most < 1 else before, rtol=1e-6)


def test_blocks_are_joined_in_one_memory_only():
    """As here, memories of their own may touch."""
    memory = bytearray(32)
    one, other = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=16 * i) for i in range(2))
    assert one.data_ptr() + 16 == other.data_ptr()
    assert [len(x) for x in neighbours([one[:2], one[2:], other])] == [2, 2, 4]
    assert [len(x) for x in neighbours([other[:1], other[1:1], other[1:], one[::2]])] == [4, 2]


class Tied(nn.Module):
    """A weight that is used in a checkpoint that is a backward pass of its own, and outside of it, before and after."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.last = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.tied(self.first(x))
        x = checkpoint(lambda y: self.tied(y).sin(), x, use_reentrant=True)
        return self.last(checkpoint(self.first, x, use_reentrant=True))


@pytest.mark.parametrize("cap", [25.0, 1e-5])
def test_gradients_that_come_after_their_bucket_was_sent_are_sent_again(cap):
    torch.manual_seed(0)
    net, x = Tied().double(), torch.randn(4, 3, dtype=torch.float64)
    want = copy.deepcopy(net)
    want(x).square().mean().backward()
    with LocalTensorMode(2):
        mesh = mesh_of({"dp": 2})
        net = data_parallel(localize(net), mesh, bucket_cap_mb=cap)
        net(part_on(mesh)(x)).square().mean().backward()
        equal(seen(net), seen(want))
