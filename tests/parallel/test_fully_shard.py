"""A fully sharded model learns what it learns on one device: forward, backward and optimiser steps."""

from __future__ import annotations

import copy
import functools
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import DeviceMesh, DTensor, LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.comm.listen import listening
from spmd.debug import CommDebugMode
from spmd.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
    register_fsdp_forward_method,
)  # fmt: skip
from spmd.parallel.fully_sharded.group import Use
from spmd.sim import localize
from tests.tensor.single import every_rank


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Odd(nn.Module):
    """What a group meets: tied, frozen and unused parameters, a block that is called twice."""

    def __init__(self, width: int = 8, hidden: int = 16, words: int = 12):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 4))

    def forward(self, ids):
        x = self.words(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.frozen(x))


SIZES = {
    "even": {}, "uneven": {"width": 6, "hidden": 10, "words": 7}, "empty": {"width": 2, "hidden": 3, "words": 5},
}  # fmt: skip
BATCHES = torch.randint(5, (2, 8, 3), generator=torch.Generator().manual_seed(1))


@functools.cache
def _numbers(sizes: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Odd(**SIZES[sizes]).double().state_dict()


def model(sizes: str = "even") -> Odd:
    net = Odd(**SIZES[sizes]).double()
    net.load_state_dict(_numbers(sizes))
    return net


@pytest.fixture(autouse=True, scope="module")
def numbers():
    """Drawn on one device, before there are ranks."""
    for sizes in SIZES:
        _numbers(sizes)


def whole(x):
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)


def loss_of(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches=BATCHES, part=lambda ids: ids) -> dict:
    """Steps, and then all that a user can see, by name. part: the part of a batch that is this rank's."""
    for ids in batches:
        optimizer.zero_grad()
        loss_of(net, part(ids)).backward()
        optimizer.step()
    return seen(net)


def seen(net: nn.Module) -> dict:
    found = {name: whole(p) for name, p in net.named_parameters()}
    return found | {f"{name}.grad": whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def alone(sizes: str = "even", batches=BATCHES) -> dict:
    net = model(sizes)
    return train(net, sgd(net), batches)


def mesh_of(axes: dict[str, int]):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard_all(net: Odd, mesh, **said) -> Odd:
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **said)
    return fully_shard(net, mesh=mesh, **said)


def part_on(mesh):
    """This rank's part of a batch: both axes of a hybrid mesh share it out."""
    return lambda ids: distribute_tensor(ids, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None).to_local()


def equal(got: dict, want: dict, tolerance: float = 1e-10) -> None:
    assert set(got) == set(want)
    for name, x in want.items():
        for block in every_rank(got[name]):
            assert torch.allclose(block, x, rtol=tolerance, atol=tolerance / 100), name


def last_dim(p: nn.Parameter) -> Shard:
    return Shard(p.ndim - 1)


SAID = {
    "kept": {"reshard_after_forward": False}, "freed": {"reshard_after_forward": True},
    "fewer": {"reshard_after_forward": 2}, "as it comes": {}, "last dim": {"shard_placement_fn": last_dim},
    "offloaded": {"offload_policy": CPUOffloadPolicy()}, "state": {"state": ("rep", "dp")},
    "state, last dim": {"state": ("rep", "dp"), "shard_placement_fn": last_dim},
}  # fmt: skip
MESHES = {
    "line": {"dp": 4}, "hybrid": {"rep": 2, "dp": 2}, "alone": {"dp": 1}, "two copies": {"rep": 2, "dp": 1},
    "one copy": {"rep": 1, "dp": 2},
}  # fmt: skip
CASES = [
    *[("line", said, "uneven") for said in SAID if "state" not in said],
    *[("line", "as it comes", sizes) for sizes in ("even", "empty")],
    *[("hybrid", "as it comes", sizes) for sizes in SIZES], ("hybrid", "last dim", "empty"),
    ("line", "last dim", "empty"), ("alone", "as it comes", "uneven"),
    *[("hybrid", "state", sizes) for sizes in SIZES], ("hybrid", "state, last dim", "uneven"),
    ("two copies", "state", "uneven"), ("one copy", "state", "empty"),
]  # fmt: skip


@pytest.mark.parametrize("mesh, said, sizes", CASES, ids=str)
def test_it_learns_as_one_device(mesh, said, sizes):
    """Two steps; unused parameters have no gradient, and shards are what the optimiser has."""
    want, axes = alone(sizes), MESHES[mesh]
    with LocalTensorMode(torch.Size(axes.values()).numel()):
        over = mesh_of(axes)
        net = shard_all(model(sizes), over, **SAID[said])
        optimizer = sgd(net)
        equal(train(net, optimizer, part=part_on(over)), want)
        assert all(isinstance(s["momentum_buffer"], DTensor) for s in optimizer.state.values())
        assert net.head.weight is net.words.weight and "FSDPOdd" in repr(type(net))


BESIDE = [
    *[("flat", "as it comes", sizes) for sizes in SIZES], ("cube", "as it comes", "uneven"),
    ("cube", "as it comes", "empty"), ("cube", "state", "uneven"),
]  # fmt: skip


@pytest.mark.parametrize("mesh, said, sizes", BESIDE)
def test_beside_tensor_parallelism(mesh, said, sizes):
    """Parameters of the plan are on all axes, the others on those of data. In a cube there are copies of the shards."""
    want, over = alone(sizes), ("rep", "dp") if mesh == "cube" else ("dp",)
    with LocalTensorMode(2 ** (len(over) + 1)):
        every = mesh_of(dict.fromkeys((*over, "tp"), 2))
        net = parallelize_module(
            model(sizes), every["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        )
        shard_all(net, every[over], **SAID[said])
        assert net.blocks[0].up.weight.device_mesh.axis_names == (*over, "tp")
        assert net.blocks[0].norm.weight.device_mesh.ndim == len(over)
        equal(train(net, sgd(net), part=part_on(every[over])), want)


@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_real_ranks_do_the_same(way, gloo4):
    want = alone("uneven")
    for rank in ways.run(way, gloo4, on_real_ranks):
        for got in rank:
            equal(got, want)


def on_real_ranks():
    """Sharded over all, and over two of four with copies."""
    found = []
    for axes, said in (
        ({"dp": 4}, {"reshard_after_forward": 2}),
        ({"rep": 2, "dp": 2}, {}),
        (MESHES["hybrid"], SAID["state"]),
    ):
        over = mesh_of(axes)
        net = shard_all(model("uneven"), over, **said)
        found.append(train(net, sgd(net), part=part_on(over)))
    return found


# ---- gradients of several passes --------------------------------------------------------------


def accumulated(net: nn.Module, part=lambda ids: ids, between=lambda net, is_last: None) -> dict:
    for i, ids in enumerate(BATCHES):
        between(net, i == len(BATCHES) - 1)
        loss_of(net, part(ids)).backward()
    return seen(net)


def no_sync(net, is_last):
    net.set_requires_gradient_sync(is_last)


def no_all_reduce(net, is_last):
    net.set_requires_all_reduce(is_last)


def stays_whole(net, is_last):
    net.set_requires_gradient_sync(is_last)
    net.set_reshard_after_backward(is_last)


def in_flight(net, is_last):
    net.set_is_last_backward(is_last)


@pytest.mark.parametrize("between", [lambda *_: None, no_sync, no_all_reduce, stays_whole, in_flight])
@pytest.mark.parametrize("mesh, said", [("line", "as it comes"), ("hybrid", "as it comes"), ("hybrid", "state")])
def test_gradients_of_several_passes_add_up(mesh, said, between):
    want = accumulated(model("uneven"))
    with LocalTensorMode(4):
        over = mesh_of(MESHES[mesh])
        net = shard_all(model("uneven"), over, **SAID[said])
        equal(accumulated(net, part_on(over), between), want)


# ---- what is sent -----------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["freed", "kept"])
def test_a_block_is_gathered_in_one_collective_and_reduced_in_one(said):
    with LocalTensorMode(4):
        net = nn.Sequential(*[Block(4, 8) for _ in range(3)])
        for block in net:
            fully_shard(block, mesh=mesh_of({"dp": 4}), **SAID[said])
        fully_shard(net, mesh=mesh_of({"dp": 4}))
        with CommDebugMode() as comm:
            net(torch.ones(2, 4)).sum().backward()
    counts = {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}
    assert counts == {"all_gather_into_tensor": 6 if said == "freed" else 3, "reduce_scatter_tensor": 3}


def test_copies_gather_their_shards_once_after_each_update():
    """With state over all ranks: of 8 numbers each has 2, and copies gather 4, which other passes read, too."""
    sent: list[int] = []
    with LocalTensorMode(4):
        net = fully_shard(nn.Linear(1, 8, bias=False), mesh=mesh_of(MESHES["hybrid"]), **SAID["state"])
        assert net.weight._spec.local_shape((0, 0)) == (2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with listening(lambda c: sent.append(c.nbytes // 4) if c.rank == 0 and "gather" in c.kind else None):
            for _ in range(2):
                for _ in range(2):
                    net(torch.ones(2, 1)).sum().backward()
                optimizer.step()
    assert sent == [2, 4, 4, 2, 4, 4]


def test_state_is_kept_over_axes_of_the_mesh():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("rep", "dp"))
    for state in ("rep", ("dp", "pp"), "tp"):
        with pytest.raises(ValueError, match="give axes of the mesh, rep, dp, and with them dp"):
            fully_shard(nn.Linear(4, 2), mesh=mesh, state=state)


class Told(Block):
    """A block that tells when it computes, and when its backward has ended."""

    def __init__(self, name: str, events: list[str]):
        super().__init__(4, 8)
        self.name, self.events = name, events

    def forward(self, x):
        self.events.append(f"compute {self.name}")
        if x.requires_grad:
            x.register_hook(lambda _: self.events.append(f"end of {self.name}"))
        return super().forward(x)


@pytest.mark.parametrize("said", ["by itself", "told"])
def test_what_comes_next_is_on_its_way_while_a_block_computes(said):
    """The order of launches: in the backward the block before is fetched first; in the forward, where it is told to."""
    events: list[str] = []
    with LocalTensorMode(2):
        freed = {"mesh": mesh_of({"dp": 2}), "reshard_after_forward": True}
        blocks = [fully_shard(Told(str(i), events), **freed) for i in range(3)]
        net = fully_shard(nn.Sequential(*blocks), **freed)
        if said == "told":
            for now, following in itertools.pairwise(blocks):
                now.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([])
        with listening(lambda sent: events.append(SHORT[sent.kind]) if sent.rank == 0 else None):
            out = net(torch.ones(2, 4, requires_grad=True))
            events.append("backward")
            out.sum().backward()
    assert ", ".join(events) == ORDERS[said]


SHORT = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
ORDERS = {
    "by itself": "gather, compute 0, gather, compute 1, gather, compute 2, backward, gather, gather, reduce, gather, "
    "end of 2, reduce, end of 1, end of 0, reduce",
    "told": "gather, gather, compute 0, gather, compute 1, compute 2, backward, gather, reduce, gather, end of 2, "
    "reduce, gather, end of 1, end of 0, reduce",
}  # fmt: skip


# ---- policies and methods ---------------------------------------------------------------------


def test_mixed_precision_computes_in_one_dtype_and_sums_in_another():
    """As on one device with parameters and inputs cast; shards and gradients keep their dtype."""
    seen_dtypes = []
    with LocalTensorMode(2):
        mesh = mesh_of({"dp": 2})
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
        net = fully_shard(nn.Linear(4, 3), mesh=mesh, mp_policy=policy)
        want = copy.deepcopy(nn.Linear(4, 3))
        want.weight.data, want.bias.data = (whole(p).reconcile().clone() for p in net.parameters())
        net.register_forward_pre_hook(lambda m, args: seen_dtypes.append((args[0].dtype, m.weight.dtype)))
        x = torch.arange(8.0).reshape(2, 4) / 8
        out = net(x)
        out.sum().backward()
        assert out.dtype is torch.float64 and seen_dtypes == [(torch.bfloat16, torch.bfloat16)]
        assert net.weight.dtype is torch.float32 and net.weight.grad.dtype is torch.float32
        got = net.weight.grad.full_tensor().reconcile()
    want.bfloat16()(x.bfloat16()).double().sum().backward()
    torch.testing.assert_close(got, want.weight.grad.float(), rtol=1e-2, atol=0)


class Pieces(nn.Module):
    """A weight whose gradient is the sum of the input. In pieces, reentrant checkpoints bring it in parts."""

    def __init__(self, pieces: int):
        super().__init__()
        self.weight, self.pieces = nn.Parameter(torch.ones(1)), pieces

    def forward(self, x):
        if self.pieces == 1:
            return x * self.weight
        return torch.cat([checkpoint(self.scaled, piece, use_reentrant=True) for piece in x.chunk(self.pieces)])

    def scaled(self, x):
        return x * self.weight


BETWEEN = {"nothing": lambda *_: None, "no_sync": no_sync, "no_all_reduce": no_all_reduce}
SUMS = list(itertools.product(
    [{"dp": 4}, {"rep": 2, "dp": 2}, {"dp": 2, "tp": 2}, {"rep": 2, "dp": 1, "tp": 2}],
    [1, 2],
    BETWEEN,
))  # fmt: skip


def sums_in_float32(cases) -> list:
    """Gradients, whose terms bfloat16 cannot add; the float32 sums are exact."""
    return [_sum_in_float32(*case) for case in cases]


def _sum_in_float32(axes, pieces, between):
    """The gradient of a number in bfloat16 for each rank, piece and pass."""
    mesh = mesh_of(axes)
    net = Pieces(pieces)
    if "tp" in axes:
        parallelize_module(net, mesh["tp"], SequenceParallel())
    over = mesh[tuple(name for name in axes if name != "tp")]
    fully_shard(net, mesh=over, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    batches = torch.ones(2, over.size() * pieces, mesh.size() // over.size())
    batches[0, 0, 0] = 256.0
    for i, batch in enumerate(batches):
        BETWEEN[between](net, i == 1)
        x = distribute_tensor(batch, mesh, [Shard(int(name == "tp")) for name in axes], src_data_rank=None)
        net(x.to_local().requires_grad_()).sum().backward()
    return net.weight.grad.full_tensor()


@pytest.mark.parametrize("way", ways.WAYS)
def test_gradients_are_summed_in_the_dtype_that_is_said(way, gloo4):
    """Over ranks, copies, tensor parallelism, parts of a pass and several passes."""
    for got in ways.run(way, gloo4, sums_in_float32, SUMS):
        for (axes, pieces, between), total in zip(SUMS, got, strict=True):
            ranks = torch.Size(n for name, n in axes.items() if name != "tp").numel()
            assert total.item() == (255 + 2 * pieces * 4) / ranks, (axes, pieces, between)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.own = Block(4, 8), nn.Linear(4, 4)

    def forward(self, x):
        return self.own(checkpoint(self.inner, x, use_reentrant=False))

    def other(self, x):
        return self.own(x).sum()


def test_a_checkpointed_block_is_gathered_again():
    torch.manual_seed(0)
    net, x = Twice(), torch.ones(4, 4)
    want = copy.deepcopy(net)
    want(x).square().mean().backward()
    with LocalTensorMode(2):
        over = mesh_of({"dp": 2})
        fully_shard(net.inner, mesh=over)
        fully_shard(net, mesh=over)
        net(part_on(over)(x)).square().mean().backward()
        equal(seen(net), seen(want), 1e-5)
        assert not any(bucket.is_whole for bucket in net._fully_sharded_group.buckets)


class Checkpointed(nn.Module):
    """Blocks in reentrant checkpoints, one of them twice; a frozen layer or none before, and one behind."""

    def __init__(self, first: nn.Module):
        super().__init__()
        self.first, self.blocks, self.head = first, nn.ModuleList(Block(4, 6) for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("said", [None, True])
@pytest.mark.parametrize("sharded", ["", "blocks.0 blocks.1", "blocks.0.up blocks.1.up"])
@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Linear(4, 4).requires_grad_(False)])
def test_passes_within_the_backward_pass_bring_gradients_one_after_the_other(first, sharded, said):
    """Of a group of the whole model, of blocks, or of layers in them; two backward passes."""
    torch.manual_seed(0)
    net, x = Checkpointed(first()).double(), torch.randn(4, 4, dtype=torch.float64)
    want = copy.deepcopy(net)
    for _ in range(2):
        want(x.clone().requires_grad_()).square().mean().backward()
    with LocalTensorMode(2):
        over = mesh_of({"dp": 2})
        for name in (*sharded.split(), ""):
            fully_shard(net.get_submodule(name), mesh=over, reshard_after_forward=said)
        for _ in range(2):
            net(part_on(over)(x).requires_grad_()).square().mean().backward()
        equal(seen(net), seen(want))
        groups = [m._fully_sharded_group for m in net.modules()]
        assert not any(bucket.is_whole for group in groups for bucket in group.buckets)


def by_two(net):
    for each in net.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(2.0)


def hooked(net):
    for module in (net, *net.blocks):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))


def as_always(net):
    """What torch has to be told, and what is so here."""
    net.set_force_sum_reduction_for_comms(True)
    net.set_reduce_scatter_unused_params(True, recurse=True)
    net.set_post_optim_event(None)


SETTINGS = {  # what is set, and how many times as large gradients are
    "freed": (lambda net: net.set_reshard_after_forward(True), 1),
    "fewer": (lambda net: net.set_reshard_after_forward(2), 1),
    "kept": (lambda net: net.set_reshard_after_forward(False), 1), "divided by two": (by_two, 2),
    "hooked": (hooked, 2), "as always": (as_always, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_what_is_set_later_counts(what):
    setting, times = SETTINGS[what]
    want = model("uneven")
    (times * loss_of(want, BATCHES[0])).backward()
    with LocalTensorMode(4):
        over = mesh_of(MESHES["line"])
        net = shard_all(model("uneven"), over)
        setting(net)
        loss_of(net, part_on(over)(BATCHES[0])).backward()
        equal(seen(net), seen(want))


def hooked_passes(net, part=lambda ids: ids) -> tuple[dict, list]:
    """Two passes, whose gradients hooks change and count, and one without the hooks."""
    order = []

    def waits(p):
        order.append("behind")

    def halved(gradient):
        order.append("before")
        return gradient.clamp(max=0.01) / 2

    of_block, of_root = net.blocks[0].up.weight, net.head.weight
    hooks = [of_block.register_hook(halved), of_root.register_hook(halved)]
    hooks.append(of_block.register_post_accumulate_grad_hook(waits))
    for ids in BATCHES:
        loss_of(net, part(ids)).backward()
    for hook in hooks:
        hook.remove()
    loss_of(net, part(BATCHES[0])).backward()
    return seen(net), sorted(order)


def hooked_on_ranks():
    over = mesh_of(MESHES["line"])
    return hooked_passes(shard_all(model("uneven"), over), part_on(over))


@pytest.mark.parametrize("way", ways.WAYS)
def test_hooks_of_parameters_get_the_gradient_of_the_shard(way, gloo4):
    want, calls = hooked_passes(model("uneven"))
    for got, counted in ways.run(way, gloo4, hooked_on_ranks):
        assert counted == calls
        assert all(torch.allclose(got[name], x, rtol=1e-10, atol=1e-12) for name, x in want.items())


def of_some(net, names, part=lambda ids: ids) -> tuple[dict, list]:
    """A pass that is asked for the gradients of these parameters, of which one has a hook."""
    calls = []
    net.blocks[0].up.weight.register_hook(lambda gradient: calls.append(tuple(gradient.shape)))
    net.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    loss, parameters = loss_of(net, part(BATCHES[0])), dict(net.named_parameters())
    loss.backward(inputs=[parameters[name] for name in names])
    return seen(net), calls


SOME = [["words.weight"], ["blocks.0.up.weight", "blocks.0.down.bias"], ["blocks.1.norm.bias", "words.weight"]]


def of_some_on_ranks():
    over = mesh_of(MESHES["line"])
    return [of_some(shard_all(model("uneven"), over), names, part_on(over)) for names in SOME]


@pytest.mark.parametrize("way", ways.WAYS)
def test_a_pass_may_be_asked_for_some_gradients(way, gloo4):
    want = [of_some(model("uneven"), names) for names in SOME]
    for rank in ways.run(way, gloo4, of_some_on_ranks):
        for (got, called), (found, calls), names in zip(rank, want, SOME, strict=True):
            assert called == calls and set(got) == set(found), names
            assert all(torch.allclose(got[name], x, rtol=1e-10, atol=1e-12) for name, x in found.items()), names


def test_hooks_see_what_parameters_get_outside_of_forwards():
    """Of a penalty on the shards, which is that of one device."""
    calls = []
    with LocalTensorMode(2):
        net = on_two(nn.Linear(2, 2))
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
        net.weight.register_hook(lambda gradient: calls.append(gradient.full_tensor().reconcile()))
        net.weight.sum().backward()
    assert len(calls) == 1 and calls[0].eq(1).all()


def distributed(net, mesh):
    spmd.distribute_module(net, mesh["tp"], lambda name, module, mesh: None)
    net.register_forward_pre_hook(lambda module, args: distribute_tensor(args[0], mesh["tp"], [Shard(0)]))


WIDE = {
    "distribute_module": distributed,
    "colwise": lambda net, mesh: parallelize_module(net, mesh["tp"], ColwiseParallel()),
    "fully_shard": lambda net, mesh: fully_shard(net, mesh=mesh["dp"]),
    "beside": lambda net, mesh: fully_shard(parallelize_module(net, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"]),
    "data_parallel": lambda net, mesh: data_parallel(net, mesh["dp"]),
}  # fmt: skip


def wide_gradients(wrap) -> torch.Tensor:
    """Of two passes, in bfloat16, that bfloat16 cannot add."""
    net = nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)
    net.weight.grad_dtype = torch.float32
    wrap(net)
    for value in (256.0, 1.0):
        net(torch.full((1, 2), value, dtype=torch.bfloat16)).sum().backward()
    return net.weight.grad


def wide_on_ranks():
    mesh = mesh_of({"dp": 2, "tp": 2})
    found = [wide_gradients(functools.partial(wrap, mesh=mesh)) for wrap in WIDE.values()]
    return [whole(gradient) for gradient in found]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="since torch 2.11")
@pytest.mark.parametrize("way", ("gloo", "threads"))
def test_gradients_have_the_dtype_that_is_said_of_a_parameter(way, gloo4):
    assert wide_gradients(lambda net: net).eq(257).all()
    for rank in ways.run(way, gloo4, wide_on_ranks):
        for got, name in zip(rank, WIDE, strict=True):
            assert got.dtype is torch.float32 and got.shape == (4, 2) and got.eq(257).all(), name


def test_ignored_parameters_stay_as_they_are():
    """On each rank: nobody sends them, and their gradients are those of a rank's own part."""
    want = model("uneven")
    loss_of(want, BATCHES[0]).backward()
    with LocalTensorMode(4):
        over, net = mesh_of(MESHES["line"]), localize(model("uneven"))
        mine = net.blocks[0].norm.weight
        shard_all(net, over, ignored_params={mine})
        loss_of(net, part_on(over)(BATCHES[0])).backward()
        got = seen(net)
        assert net.blocks[0].norm.weight is mine and not isinstance(mine, DTensor)
    parts = every_rank(got.pop("blocks.0.norm.weight.grad"))
    wanted = seen(want)
    torch.testing.assert_close(sum(parts) / 4, wanted.pop("blocks.0.norm.weight.grad"))
    equal(got, wanted)


def test_a_number_of_ranks_beside_tensor_parallelism():
    want = alone("uneven")
    with LocalTensorMode(8):
        every = mesh_of({"dp": 4, "tp": 2})
        net = parallelize_module(
            model("uneven"), every["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        )
        shard_all(net, every["dp"], reshard_after_forward=2)
        equal(train(net, sgd(net), part=part_on(every["dp"])), want)


def test_inputs_are_cast_where_the_policy_says_so():
    with LocalTensorMode(2):
        policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
        net = fully_shard(nn.Linear(4, 3), mesh=mesh_of({"dp": 2}), mp_policy=policy)
        assert net(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            net(torch.ones(2, 4))


def test_users_see_parameters_while_the_whole_ones_stay_in_memory():
    with LocalTensorMode(2):
        net = fully_shard(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), mesh=mesh_of({"dp": 2}))
        held = dict(net.named_parameters())
        net.set_reshard_after_backward(False)
        with CommDebugMode() as comm:
            for _ in range(2):
                net(torch.ones(1, 2)).sum().backward()
                assert {name: id(p) for name, p in net.named_parameters()} == {k: id(p) for k, p in held.items()}
        counts = {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}
        assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 2}


def test_other_methods_and_prefetches():
    with LocalTensorMode(2):
        over = mesh_of({"dp": 2})
        net = Twice()
        fully_shard(net.inner, mesh=over)
        fully_shard(net, mesh=over)
        assert isinstance(net, FSDPModule) and not isinstance(net.own, FSDPModule)
        register_fsdp_forward_method(net, "other")
        net.other(torch.ones(4, 4)).backward()
        assert net.own.weight.grad.full_tensor().reconcile().eq(4).all() and net.inner.up.weight.grad is None
        net.set_modules_to_forward_prefetch([net.inner])
        net.inner.set_modules_to_backward_prefetch([net])
        net.unshard()
        assert not isinstance(net.own.weight, DTensor) and isinstance(net.inner.up.weight, DTensor)
        handle = net.inner.unshard(async_op=True)
        assert isinstance(net.inner.up.weight, DTensor)
        handle.wait()
        assert not isinstance(net.inner.up.weight, DTensor)
        net.inner.reshard()
        assert isinstance(net.inner.up.weight, DTensor)
        assert all(isinstance(x, DTensor) for x in net.state_dict().values())


def test_a_copy_has_methods_of_its_own():
    with LocalTensorMode(2):
        net = Twice()
        fully_shard(net, mesh=mesh_of({"dp": 2}))
        register_fsdp_forward_method(net, "other")
        twin = copy.deepcopy(net)
        twin.other(torch.ones(4, 4)).backward()
        assert twin.own.weight.grad is not None and all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("said", ["freed", "kept", "as it comes", "fewer", "offloaded"])
@pytest.mark.parametrize("way", ["simulated", "threads"])
def test_a_look_in_inference_mode_before_training(way, said):
    """What the first forward makes serves those that train: trainers look at the validation set before all."""
    want = alone("uneven")

    def body():
        mesh = mesh_of({"dp": 4})
        sharded = shard_all(model("uneven"), mesh, **SAID[said])
        optimizer = sgd(sharded)
        with torch.inference_mode():
            sharded(BATCHES[0])
        return train(sharded, optimizer, part=part_on(mesh))

    for found in ways.run(way, None, body):
        assert all(torch.allclose(found[name], x, rtol=1e-10, atol=1e-12) for name, x in want.items())


def test_what_was_written_in_between_is_gathered_again():
    """A root that stays whole after a forward does not compute with old numbers."""
    with LocalTensorMode(2):
        net = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh_of({"dp": 2}))
        x = torch.ones(1, 2)
        held = next(iter(net.parameters()))
        first = net(x).detach()
        with torch.no_grad():
            held.mul_(2)
        assert torch.equal(net(x).reconcile(), 2 * first.reconcile())
        net.load_state_dict({"weight": torch.ones(2, 2)})
        assert net(x).reconcile().eq(2).all()


def test_models_on_the_meta_device_are_made_shard_by_shard():
    """The numbers do not depend on the mesh."""

    def made(ranks: int):
        with LocalTensorMode(ranks):
            spmd.manual_seed(0)
            with torch.device("meta"):
                net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
            for layer in net:
                fully_shard(layer, mesh=mesh_of({"dp": ranks}))
            fully_shard(net, mesh=mesh_of({"dp": ranks}))
            with pytest.raises(RuntimeError, match="to_empty"):
                net(torch.ones(2, 4))
            net.to_empty(device="cpu")
            for layer in net:
                layer.reset_parameters()
            return [whole(p).reconcile() for p in net.parameters()], net(torch.ones(2, 4)).reconcile()

    (two, out), (four, other) = made(2), made(4)
    assert all(map(torch.equal, two, four)) and torch.allclose(out, other)


def test_ranks_may_use_different_parameters():
    """A parameter that some ranks use has the gradient of one device; one that no rank uses has none."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ParameterList(nn.Parameter(torch.full((3,), i + 1.0)) for i in range(3))

        def forward(self, x, expert):
            return (self.experts[expert] * x).sum()

    def on_rank(rank):
        net = fully_shard(Routed(), mesh=mesh_of({"dp": 2}))
        net(torch.ones(3), rank).backward()
        return [p.grad if p.grad is None else whole(p.grad) for p in net.experts]

    for first, second, third in spmd.sim.run_ranks(on_rank, 2):
        assert first.eq(0.5).all() and second.eq(0.5).all() and third is None


class Branches(nn.Module):
    """Its middle layer is not used, is used, is used in a checkpoint that is a pass of its own, or is used in both."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x, uses: str):
        if uses == "nothing":
            return x
        x = self.first(x)
        for use in uses.split():
            within = use == "within"
            x = checkpoint(lambda y: self.middle(y).sin(), x, use_reentrant=True) if within else self.middle(x)
        return self.last(x)


class Branching(nn.Module):
    """Blocks of branches, the first of which is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks, self.words = nn.ModuleList(Branches() for _ in range(2)), nn.Linear(3, 3)

    def forward(self, x, uses: str):
        x = self.words(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, uses)
        return x


BRANCHES = [
    ("", "outside"), ("outside", "within outside"), ("within outside", ""), ("within", "outside within"),
    ("outside", "within"), ("within outside within", "within outside"), ("within outside",) * 2, ("nothing", "within"),
]  # fmt: skip


def branches_of(uses: tuple[str, ...], kind: type = Branching) -> tuple[nn.Module, torch.Tensor, dict]:
    """A model, a batch, and what it has after two backward passes on one device."""
    torch.manual_seed(0)
    net, x = kind().double(), torch.randn(2 * len(uses), 3, dtype=torch.float64)
    want = copy.deepcopy(net)
    for _ in range(2):
        for part, use in zip(x.chunk(len(uses)), uses, strict=True):
            (want(part, use).square().mean() / len(uses)).backward()
    return net, x, seen(want)


def on_branches(rank: int, net: Branching, x: torch.Tensor, uses: tuple[str, ...], before: bool) -> dict:
    mesh = mesh_of({"dp": len(uses)})
    for block in (*net.blocks, net):
        fully_shard(block, mesh=mesh)
    part = x.chunk(len(uses))[rank]
    if before:
        net(part, "outside").sum().backward()
        net.zero_grad()
    for _ in range(2):
        net(part, uses[rank]).square().mean().backward()
    return seen(net)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("uses", BRANCHES)
def test_ranks_that_take_other_branches_reduce_at_the_same_places(uses, before):
    """Whether a parameter is used within a pass of its own, again, or not at all; also where all were alike before."""
    net, x, want = branches_of(uses)
    for got in spmd.sim.run_ranks(lambda rank: on_branches(rank, copy.deepcopy(net), x, uses, before), 2):
        equal(got, want)


def test_real_ranks_that_take_other_branches_reduce_at_the_same_places(gloo4):
    uses = "nothing", "outside", "within", "within outside"
    net, x, want = branches_of(uses)
    for got in gloo4.run(on_branches, net, x, uses, False, timeout=60.0):
        equal(got, want)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on its way back")


@pytest.mark.parametrize("is_told", [False, True])
def test_a_pass_after_one_that_failed_is_as_any(is_told):
    torch.manual_seed(0)
    net, x = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double(), torch.randn(4, 3, dtype=torch.float64)
    want = copy.deepcopy(net)
    want(x).square().mean().backward()
    with LocalTensorMode(2):
        mesh = mesh_of({"dp": 2})
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
        hook = net[1].register_forward_hook(lambda module, args, out: Fails.apply(out))
        with pytest.raises(ValueError, match="on its way back"):
            net(part_on(mesh)(x)).square().mean().backward()
        hook.remove()
        if is_told:
            net.reset_iter_state()
        net.zero_grad()
        net(part_on(mesh)(x)).square().mean().backward()
        equal(seen(net), seen(want))


def test_a_forward_without_a_backward_leaves_nothing_behind():
    with LocalTensorMode(2):
        net = fully_shard(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), mesh=mesh_of({"dp": 2}))
        for _ in range(3):
            net(torch.ones(1, 2, requires_grad=True).sin())
        gc.collect()
        group = net._fully_sharded_group
        assert not [x for x in gc.get_objects() if isinstance(x, Use) and x.group is group]


def tied():
    net = model()
    fully_shard(net.words, mesh=mesh_of({"dp": 2}))
    fully_shard(net, mesh=mesh_of({"dp": 2}))


def on_two(net: nn.Module, **said) -> nn.Module:
    return fully_shard(net, mesh=mesh_of({"dp": 2}), **said)


ERRORS = {
    "tied": (tied, "same parameter as words.weight.*one group"),
    "twice": (lambda: on_two(on_two(nn.Linear(2, 2))), "sharded already"),
    "list": (lambda: on_two(nn.ModuleList([nn.Linear(2, 2)])), "no forward"),
    "number": (lambda: on_two(nn.Linear(2, 2), reshard_after_forward=2), "smaller than"),
    "dim": (lambda: on_two(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(2)), "dims"),
    "scalar": (lambda: on_two(Scalar()), "shape .1."),
}  # fmt: skip


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("what", ERRORS)
def test_mistakes_are_said(what):
    make, said = ERRORS[what]
    with LocalTensorMode(2), pytest.raises(ValueError, match=said):
        make()
