"""Attention over a sequence that ranks share out is that of one device, with its gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.mesh import HostGrid, MeshTopoInfo
from spmd.mesh.presets import PRESETS
from spmd.parallel import context_parallel, context_parallel_shard, context_parallel_unshard
from spmd.parallel.context import kernel
from spmd.parallel.context.balance import most_work, pays
from spmd.parallel.context.layout import balanced, in_order, tiles
from tests.tensor.single import every_rank

KINDS = "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"
METHODS = ("ring", "ring_q", "allgather", "heads")
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def given(size: int, heads: int = 4, mask: str = "", dtype=torch.float64, values: int = 6):
    """q, k, v, what the result is multiplied by, and a mask."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, size, 6), (2, heads, size, 6), (2, heads, size, values), (2, 4, size, values)
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    seen = torch.rand(2, 1, size if mask == "rows" else 1, size, generator=draw) > 0.4
    if mask == "rows":
        seen[0, 0, 0] = False  # a row that sees nothing
    return tensors, seen if mask else None


def attention(q, k, v, mask, causal):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])


def alone(tensors, mask, causal) -> list[torch.Tensor]:
    *leaves, weight = [x.clone() for x in tensors]
    out = attention(*[x.requires_grad_() for x in leaves], mask, causal)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def equal(got, want, tolerance: float = 1e-10) -> None:
    for x, y in zip(got, want, strict=True):
        for block in every_rank(x):
            torch.testing.assert_close(block, y, rtol=tolerance, atol=tolerance / 100)


# ---- plain tensors ------------------------------------------------------------------------------


def of_parts(n: int, method: str, tensors, mask, kind: str, causal: bool, balanced: bool):
    """The same of this rank's parts, put together again."""
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    *leaves, weight = context_parallel_shard(mesh, tensors, [2] * 4, balanced=balanced)
    if mask is not None:
        [mask] = context_parallel_shard(mesh, [mask], [3 if kind == "keys" else 2], balanced=balanced)
    for x in leaves:
        x.requires_grad_()
    with context_parallel(mesh, method=method, balanced=balanced):
        out = attention(*leaves, mask, causal)
        (out * weight).sum().backward()
    whole = [out.detach(), *(x.grad for x in leaves)]
    return context_parallel_unshard(mesh, whole, [2] * 4, balanced=balanced)


SAID = {  # ranks, heads of keys, mask, causal, balanced, size of values
    "causal": (4, 4, "", True, True, 6), "in order": (4, 4, "", True, False, 6), "grouped": (2, 2, "", True, True, 6),
    "single head of keys": (4, 1, "", True, True, 6), "whole": (4, 2, "", False, True, 6),
    "padded": (4, 2, "keys", False, True, 6), "masked": (4, 4, "rows", False, True, 6),
    "one rank": (1, 2, "", True, True, 6),
    "other values": (2, 2, "", True, True, 4), "other values, masked": (2, 2, "rows", False, True, 4),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("said", SAID)
def test_parts_see_the_whole_sequence(said, method):
    n, heads, kind, causal, is_balanced, values = SAID[said]
    tensors, mask = given(8, heads, kind, values=values)
    with LocalTensorMode(n):
        got = of_parts(n, method, tensors, mask, kind, causal, is_balanced)
    equal(got, alone(tensors, mask, causal))


def test_flash_attention_is_called_as_torch_declares_it():
    """GPUs run it (benchmarks/gpu.py); here it has no kernel, only shapes."""
    q, k = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    assert not kernel.is_for_flash(q, k, k, None)
    out, sums = kernel.FLASH(q, k, k, 0.0, True, scale=0.25)[:2]
    assert out.shape == q.shape and sums.shape == q.shape[:3] and sums.dtype == torch.float32
    found = kernel.flash_gradients(q, q, k, k, out, sums, True, 0.25)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_is_summed_in_high(method):
    """As near to float32 as the kernel of one device is."""
    tensors, _ = given(16, dtype=torch.bfloat16)
    exact = alone([x.double() for x in tensors], None, True)
    error = [(x - y).abs().max() for x, y in zip(alone(tensors, None, True), exact, strict=True)]
    with LocalTensorMode(4):
        got = of_parts(4, method, tensors, None, "", True, True)
    for x, y, most in zip(got, exact, error, strict=True):
        assert all((block - y).abs().max() <= 2 * most for block in every_rank(x))


# ---- DTensors -----------------------------------------------------------------------------------

PLACED = {
    "line": ((4,), [S2]), "with heads": ((2, 2), [S1, S2]), "cube": ((2, 2, 2), [S0, S1, S2]),
    "beside replicas": ((2, 2), [R, S2]),
}  # fmt: skip
SIZES = {"even": 8, "uneven": 7, "empty": 3}
CASES = [(placed, sizes, "ring") for placed, sizes in itertools.product(PLACED, SIZES)] + [
    (placed, "uneven", method) for placed in ("line", "with heads") for method in ("ring_q", "allgather", "heads", "")
]


@pytest.mark.parametrize("placed, sizes, method", CASES, ids=str)
def test_dtensors_have_global_positions(placed, sizes, method):
    """Without a context, too: then as the op is lowered."""
    shape, placements = PLACED[placed]
    heads = 1 if placed in ("line", "beside replicas") and method != "heads" else 4
    for kind, causal in (("", True), ("rows", False)):
        tensors, mask = given(SIZES[sizes], heads, kind)
        with LocalTensorMode(torch.Size(shape).numel()):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp")[-len(shape) :])
            *leaves, weight = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in tensors]
            for x in leaves:
                x.requires_grad_()
            if not method:
                out = attention(*leaves, distributed(mask, mesh), causal)
            else:
                with context_parallel(mesh["cp"], method=method):
                    out = attention(*leaves, mask, causal)
            (out * weight).sum().backward()
            got = [x.full_tensor() for x in (out, *(x.grad for x in leaves))]
        equal(got, alone(tensors, mask, causal))


def distributed(mask, mesh):
    return None if mask is None else distribute_tensor(mask, mesh, [R] * mesh.ndim, src_data_rank=None)


# ---- what is sent -------------------------------------------------------------------------------

N, SIZE = 4, 16
Q, KV, SUMS = 2 * 4 * SIZE * 6 * 8, 2 * 2 * 1 * SIZE * 6 * 8, 2 * 4 * SIZE * 8
"""Bytes of all queries (and results), of all keys and values, of all sums, in float64."""
FORMULAS = {  # bytes that a rank hands to collectives, forward and backward; of a gather the own part, of others all
    "ring": (KV * 3 // 4, 2 * KV * 3 // 4),  # keys and values; again, and their gradients
    "ring_q": ((2 * Q + SUMS) * 3 // 4, (4 * Q + SUMS) * 3 // 4),  # q, out; q, out and its gradient, that of q
    "allgather": (KV // 4, KV // 4 + KV), "heads": ((2 * Q + 4 * KV) // 4,) * 2,  # for each head of queries one of keys
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_this_is_sent(method):
    tensors, _ = given(SIZE, 1)
    with LocalTensorMode(N):
        mesh = init_device_mesh("cpu", (N,), mesh_dim_names=("cp",))
        q, k, v, _ = context_parallel_shard(mesh, tensors, [2] * 4)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with context_parallel(mesh, method=method):
            with CommDebugMode() as forward:
                out = attention(*leaves, None, True)
            with CommDebugMode() as backward:
                out.sum().backward()
    sent = [sum(each.nbytes for each in comm.counted) for comm in (forward, backward)]
    assert tuple(sent) == FORMULAS[method]


def test_all_ranks_have_as_much_to_do():
    def work(layout, place):
        whole = [t for owner in range(N) for t in tiles(layout, layout, place, owner, True)]
        area = [(t.rows[1] - t.rows[0]) * (t.keys[1] - t.keys[0]) / (2 if t.causal else 1) for t in whole]
        return sum(area)

    assert len({work(balanced(SIZE, N), place) for place in range(N)}) == 1
    assert work(in_order((4,) * N), N - 1) == 7 * work(in_order((4,) * N), 0)


# ---- balanced, of sequences that lie in order ---------------------------------------------------


def layer_of(mesh, method: str, balanced: bool | None):
    def layer(q, k, v, weight):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with context_parallel(mesh["cp"], method=method, balanced=balanced):
            out = attention(*leaves, None, True)
        return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)

    return layer


WAYS_OF = "eager", "compiled"


def run_in_order(way: str, shape, size: int, heads: int, method: str, balanced: bool | None):
    """The result and gradients, of DTensors or compiled, and what a rank hands to collectives that exchange."""
    tensors, _ = given(size, heads)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp")[-len(shape) :])
    placements = [S0, S1, S2][-len(shape) :]
    layer = layer_of(mesh, method, balanced)
    if way == "compiled":
        at = dict(zip(mesh.axis_names, placements, strict=True))
        layer = spmd.compile(layer, mesh, inputs=dict.fromkeys(("q", "k", "v", "weight"), at))
    else:
        tensors = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in tensors]
    with CommDebugMode() as comm:
        got = layer(*tensors)
    sent = [(x.kind, x.nbytes) for x in comm.counted if x.kind in KINDS]
    if way == "compiled":
        check_listed(layer.program, [nbytes for _, nbytes in sent])
    return [x.full_tensor() for x in got], Counter(sent)


def check_listed(program, sent: list[int]) -> None:
    """A program lists what its functions of blocks send, and prices it."""
    assert [c.nbytes for c in program.collectives] == sent and not program.moved
    assert all(c.us > 0 for c in program.collectives)
    assert program.comm_time() == pytest.approx(program.comm_time(program.mesh.topology))
    assert {c.axis for c in program.collectives} == {"cp"} and "in local_map" in str(program.collectives[0])


@pytest.mark.parametrize("shape, size, heads, method", [
    ((2, 2), 8, 2, "ring"), ((4,), 3, 1, "ring_q"), ((2, 2), 7, 4, "allgather"),
], ids=str)  # fmt: skip
def test_a_ring_of_tensors_in_order_may_be_balanced(shape, size, heads, method):
    """As one device, evenly, unevenly and with empty parts; a compiled step sends what an eager one sends."""
    want = alone(given(size, heads)[0], None, True)
    with LocalTensorMode(4):
        found = [run_in_order(way, shape, size, heads, method, True) for way in WAYS_OF]
        for got, _ in found:
            equal(got, want)
    assert found[0][1] == found[1][1]


def balanced_on_gloo(way: str) -> list[torch.Tensor]:
    return run_in_order(way, (2, 2), 7, 2, "ring", True)[0]


@pytest.mark.parametrize("way", WAYS_OF)
def test_real_ranks_balance_alike(way, gloo4):
    want = alone(given(7, 2)[0], None, True)
    for got in ways.run("gloo", gloo4, balanced_on_gloo, way):
        equal(got, want)


def test_balance_costs_four_exchanges():
    """Queries, keys and values there and results back, and gradients the other way: 2 q + k + v of a rank's blocks."""
    with LocalTensorMode(N):
        plain, sent = (run_in_order("eager", (N,), SIZE, 1, "ring", balanced)[1] for balanced in (False, True))
    assert sent - plain == Counter([("all_to_all_single", (Q + KV) // N), ("all_to_all_single", Q // N)] * 2)


@pytest.mark.parametrize("machine, size, heads, is_better", [
    ("ampere", 2048, 16, False), ("ampere", 4096, 16, False), ("ampere", 4096, 2, True), ("ampere", 8192, 16, True),
    ("blackwell", 8192, 16, False), ("blackwell", 16384, 16, True),
])  # fmt: skip
def test_balance_is_chosen_where_it_pays(machine, size, heads, is_better):
    """Work grows with the square of the length, and what is sent with the length and the heads of keys."""
    topology = MeshTopoInfo(HostGrid((4,)), PRESETS[machine])
    q, k = (1, 16, size, 128), (1, heads, size, 128)
    assert pays(topology, 0, in_order((size // 4,) * 4), q, k, k, torch.bfloat16, True) is is_better


def test_a_balanced_rank_works_as_long_as_the_mean():
    mean = 16 * 16 / 2 / 4
    assert most_work(balanced(16, 4)) == mean and most_work(in_order((4,) * 4)) == 1.75 * mean


# ---- models -------------------------------------------------------------------------------------


class Model(nn.Module):
    """One layer of attention, with a table of positions that the model looks up itself."""

    def __init__(self, positions: int = 8):
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(positions, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 12)

    def forward(self, ids, at=None):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]) if at is None else at)
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def model() -> Model:
    net = Model().double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return net


IDS = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(1))


def step(net, ids, labels, at=None):
    loss = F.cross_entropy(net(ids, at).flatten(0, 1), labels.flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]


def with_buffers(method: str) -> list[torch.Tensor]:
    """Averages over ranks, as data parallelism makes them, and the buffers after the step."""
    mesh, net, ids, labels, at = init_device_mesh("cpu", (4,)), model(), IDS.clone(), IDS.clone(), torch.arange(8)
    with context_parallel(mesh, buffers=[ids, labels, at], buffer_seq_dims=[1, 1, 0], method=method):
        assert ids.shape == (2, 2) and at.shape == (2,)
        found = step(net, ids, labels, at)
    found = [spmd.comm.wait(spmd.comm.all_reduce(x, "avg", mesh)) for x in found]
    return [*found, ids, at]


@pytest.mark.parametrize("way, method", [("gloo", "ring"), ("threads", "ring_q"), ("threads", "heads")])
def test_an_unmodified_model_in_a_context(way, method, gloo4):
    want = [*step(model(), IDS, IDS), IDS, torch.arange(8)]
    for got in ways.run(way, gloo4, with_buffers, method):
        equal(got, want)


def train(net, ids):
    loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return loss


def test_a_compiled_step_shares_out_the_sequence():
    """Each rank has rows; keys and values are gathered, or heads exchanged, whichever is less to send."""
    net = model()
    want = train(net, IDS)
    with LocalTensorMode(2):
        own, mesh = model(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        loss = spmd.compile(train, mesh=mesh, inputs={"ids": {"cp": S1}})(own, IDS)
        got = [loss.full_tensor(), *(p.grad.full_tensor() for p in own.parameters())]
    equal(got, [want.detach(), *(p.grad for p in net.parameters())])


class Projected(nn.Module):
    def __init__(self, heads: int):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 2 * heads), nn.Linear(6, 2 * heads)

    def forward(self, x, mask, mesh, method):
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        with context_parallel(mesh, method=method) if mesh else contextlib.nullcontext():
            return attention(q, k, v, mask, mask is None)


def projected(heads: int) -> Projected:
    draw, net = torch.Generator().manual_seed(3), Projected(heads).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return net


@pytest.mark.parametrize("method, heads, masked", [("ring", 2, True), ("ring_q", 4, False), ("allgather", 1, False),
                                                   ("heads", 4, True), ("heads", 1, False)])  # fmt: skip
def test_a_compiled_step_sends_what_is_asked_for(method, heads, masked):
    """Of the batch over one axis and time over the other, unevenly: what an eager step sends there, kind by kind."""
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = torch.rand(3, 1, 7, 7, generator=torch.Generator().manual_seed(5)) > 0.4 if masked else None

    def loss_of(net, x, mask, mesh=None, method=""):
        loss = net(x, mask, mesh, method).square().sum()
        loss.backward()
        return loss

    want = projected(heads)
    loss_of(want, x, mask)
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        net, sent = projected(heads), {}
        step = spmd.compile(lambda net, x, mask: loss_of(net, x, mask, mesh["cp"], method), mesh=mesh,
                            inputs={"x": {"dp": S0, "cp": S1}})  # fmt: skip
        with CommDebugMode() as compiled:
            step(net, x, mask)
        q, k, v = (distribute_tensor(torch.randn(3, n, 7, 2).double(), mesh, [S0, S2], src_data_rank=None)
                   .requires_grad_() for n in (4, heads, heads))  # fmt: skip
        with CommDebugMode() as eager, context_parallel(mesh["cp"], method=method):
            attention(q, k, v, mask, mask is None).sum().backward()
        sent = [Counter(each.kind for each in comm.counted if each.kind in KINDS) for comm in (compiled, eager)]
        equal([p.grad.full_tensor() for p in net.parameters()], [p.grad for p in want.parameters()])
    sent[1]["all_gather_into_tensor"] -= method == "heads" and masked  # the mask, which is whole in the step
    assert +sent[0] == +sent[1]


ERRORS = {
    "odd": (lambda mesh, x: context_parallel_shard(mesh, [x], [1]), "pad it to 4"),
    "method": (lambda mesh, x: enter(mesh, method="star"), "'star'"),
    "dims": (lambda mesh, x: enter(mesh, buffers=[x]), "1 buffers and 0"),
    "lost": (lambda mesh, x: enter(mesh, no_restore_buffers={x}), "not in buffers"),
    "gradient": (lambda mesh, x: enter(mesh, buffers=[x.requires_grad_()], buffer_seq_dims=[0]), "requires a gradient"),
    "mask": (lambda mesh, x: attend(mesh, torch.zeros(4, 5)), "a mask of .4, 5."),
    "heads": (lambda mesh, x: attend(mesh, None, method="heads"), "3"),
}  # fmt: skip


def enter(mesh, **said):
    with context_parallel(mesh, **said):
        pass


def attend(mesh, mask, **said):
    q = torch.ones(1, 3, 4, 2)
    with context_parallel(mesh, **said):
        F.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize("what", ERRORS)
def test_mistakes_are_said(what):
    make, said = ERRORS[what]
    with LocalTensorMode(2), pytest.raises(ValueError, match=said):
        make(init_device_mesh("cpu", (2,)), torch.ones(4, 3))


def test_no_rank_is_refused_alone():
    """Of 5 heads one rank of two has 2, which two ranks divide, and the other 3: all ranks are told."""
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
        q = distribute_tensor(torch.ones(1, 5, 4, 2), mesh, [Shard(1), Shard(2)])
        with context_parallel(mesh["cp"], method="heads"), pytest.raises(ValueError, match="and there are 3"):
            F.scaled_dot_product_attention(q, q, q)
