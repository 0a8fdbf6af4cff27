"""The claims of `docs/design/redistribute.md`: bytes at the bound, cost of brute force, one plan for all ranks."""

import functools
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path
from unittest import mock

import expecttest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from workers import Pool

from spmd import DTensor, distribute_tensor, plan_redistribute
from spmd.comm import AsyncTensor, use_transport
from spmd.mesh import PRESETS, DeviceMesh, MeshTopoInfo, init_device_mesh
from spmd.mesh import cost as mesh_cost
from spmd.mesh.machine import ALGORITHMS, COLLECTIVES, Link, Machine, Measured, Way
from spmd.sim import ThreadWorld
from spmd.tensor.redistribute import legal
from spmd.tensor.redistribute.all_ranks import of_rank, overlaps, sides, volumes
from spmd.tensor.redistribute.boxes import overlap, volume
from spmd.tensor.redistribute.collective_moves import AllGather
from spmd.tensor.redistribute.moves import members
from spmd.tensor.redistribute.plan import Plan, forget, plan, redistribute_cost
from spmd.tensor.spec import Spec, parse_spec, spec_of
from tests.tensor.brute import least_of_boxes, least_ps
from tests.tensor.oracle import close
from tests.tensor.planned import Counting, carried_out, cut_up, specs, wrong_blocks
from tests.tensor.single import AVG, MAX, S0, S1, SUM, R, cut, leaf, mesh_of, on_ranks

MB64 = (4096, 4096)  # of 4 bytes


def every_pair(mesh, shape, dtype=torch.float32, ordered=False):
    """Every layout, with and without sums, as source, and every layout without sums as target."""
    return list(itertools.product(specs(mesh, shape, True, dtype, ordered), specs(mesh, shape, False, dtype)))


def two_hosts(shape, machine: str = "textbook") -> DeviceMesh:
    mesh = init_device_mesh("cpu", shape)
    return mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=mesh.size() // 2, machine=machine))


# ---- bytes ------------------------------------------------------------------------------------

RATIOS = {(8,): 1.0, (2, 4): 1.02, (2, 2, 2): 1.06, (2, 3): 1.06}


@pytest.mark.parametrize("shape", RATIOS, ids=str)
def test_bytes_are_at_the_bound_or_near_it(shape):
    """Bytes are never below the bound; at it without a reduction; over all pairs together they have this ratio."""
    mesh = init_device_mesh("cpu", shape)
    tensor = (6144, 4096) if 3 in shape else MB64
    pairs = every_pair(mesh, tensor, ordered=True)
    plans = list(itertools.starmap(plan, pairs))
    assert [str(p) for p in plans if p.bytes_per_rank < p.lower_bound_bytes] == []
    assert [str(p) for p in plans if not p.src.partial and p.bytes_per_rank > p.lower_bound_bytes] == []
    assert sum(p.bytes_per_rank for p in plans) / sum(p.lower_bound_bytes for p in plans) <= RATIOS[shape]


PAIRS = """
f32[4096@x,y, 4096] -> f32[4096, 4096@x,y]
f32[4096@y, 4096] -> f32[4096@x,y, 4096]
f32[4096@x,y, 4096] -> f32[4096@y, 4096]
f32[4096@y, 4096] +sum@x -> f32[4096@x,y, 4096]
f32[4096@x,y, 4096] -> f32[4096@y,x, 4096]
f32[4096, 4096] +sum@x -> f32[4096@x,y, 4096]
f32[4096, 4096] +sum@x +sum@y -> f32[4096, 4096]
f32[4096, 4096] +sum@y -> f32[4096@y, 4096]
f32[4096@x, 4096] -> f32[4096, 4096] +avg@x
f32[4096, 4096] +sum@x -> f32[4096, 4096] +avg@x
"""


class TestPairs(expecttest.TestCase):
    def test_pairs_that_other_planners_lose(self):
        """Bytes per rank as a share of the tensor: those of the plan, and the bound."""
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
        lines = []
        for line in PAIRS.strip().splitlines():
            p = plan(*(parse_spec(text, mesh) for text in line.split(" -> ")))
            moves = " ".join(str(step) for step in p.steps)
            bound = p.lower_bound_bytes / p.src.nbytes
            lines.append(f"{line.replace('4096', 'n')}: {p.bytes_per_rank / p.src.nbytes:.3f} of {bound:.3f} {moves}")
        self.assertExpectedInline("\n".join(lines), """\
f32[n@x,y, n] -> f32[n, n@x,y]: 0.109 of 0.109 all_to_all(x,y, 0, 1)
f32[n@y, n] -> f32[n@x,y, n]: 0.125 of 0.125 slice(x, 0) permute(x,y)
f32[n@x,y, n] -> f32[n@y, n]: 0.250 of 0.250 exchange(x,y)
f32[n@y, n] +sum@x -> f32[n@x,y, n]: 0.250 of 0.219 reduce_scatter(x, 0) permute(x,y)
f32[n@x,y, n] -> f32[n@y,x, n]: 0.125 of 0.125 permute(x,y)
f32[n, n] +sum@x -> f32[n@x,y, n]: 0.125 of 0.125 reduce_scatter(x, 0)
f32[n, n] +sum@x +sum@y -> f32[n, n]: 1.750 of 1.750 all_reduce(x,y)
f32[n, n] +sum@y -> f32[n@y, n]: 0.500 of 0.500 reduce_scatter(y, 0) all_gather(x, 0)
f32[n@x, n] -> f32[n, n] +avg@x: 0.000 of 0.000 to_partial(x, 'avg')
f32[n, n] +sum@x -> f32[n, n] +avg@x: 0.000 of 0.000 scale(x, 'avg')""")


def test_counted_bytes_are_those_of_the_plan():
    """Bytes at the transport, and the values: for every rank, every pair on (2, 2) and some pairs on (2, 3)."""
    x = torch.arange(1.0, 1 + 5 * 6, dtype=torch.float64).reshape(5, 6)
    for shape, step in (((2, 2), 1), ((2, 3), 7)):
        mesh = init_device_mesh("cpu", shape)
        for src, dst in every_pair(mesh, x.shape, x.dtype)[::step]:
            p, received = plan(src, dst), Counter()
            assert not wrong_blocks(carried_out(p, cut_up(x, src), received), x, dst), p
            assert {at: received[at] for at in mesh.coordinates()} == {at: p.received(at) for at in mesh.coordinates()}
            assert max(received.values(), default=0) == p.bytes_per_rank


def is_strided(p: Plan) -> bool:
    return any(step.kind == "view" for step in p.steps)


def test_sums_are_scattered_into_strided_blocks():
    """Such plans have the right values and bytes, and no plan without strided blocks is as cheap."""
    x = torch.arange(1.0, 1 + 16 * 8, dtype=torch.float64).reshape(16, 8)
    for shape, least in (((2, 2, 2), 100), ((2, 4), 1)):
        mesh = init_device_mesh("cpu", shape)
        plans = itertools.starmap(plan, every_pair(mesh, x.shape, x.dtype, ordered=True))
        strided = [p for p in plans if is_strided(p)]
        assert len(strided) >= least
        for i, p in enumerate(strided[::3]):
            received = Counter()
            assert not wrong_blocks(carried_out(p, cut_up(x, p.src), received), x, p.dst), p
            assert {at: received[at] for at in mesh.coordinates()} == {at: p.received(at) for at in mesh.coordinates()}
            assert p.lower_bound_bytes <= p.bytes_per_rank == max(received.values())
            if i % 20 == 0:
                spent = sum(int(step.cost * 1e6) for step in p.steps)
                assert spent < least_of_boxes(p.src, p.dst), p


@pytest.mark.parametrize("p, dtype", [(AVG, torch.float32), (MAX, torch.int64), (SUM, torch.complex64)], ids=str)
def test_strided_blocks_of_every_kind(p, dtype):
    """On simulated ranks: the result waits when it is read, and its gradient is right."""
    x = (torch.arange(8 * 4).reshape(8, 4) % 7).to(dtype)
    x.requires_grad_(dtype.is_floating_point)
    blocks = cut(x, [p, S1], (2, 2))

    def rank(mesh):
        given = leaf(blocks, [p, S1], x, mesh)
        moved = given.redistribute(placements=[S0, S0], order={0: ("tp", "dp")}, async_op=True)
        assert is_strided(plan(given._spec, moved._spec)) and isinstance(moved._local_tensor, AsyncTensor)
        if x.requires_grad:
            moved.sum().backward()
            assert torch.equal(given.grad.full_tensor(), torch.ones_like(x))
        return moved.detach().full_tensor()

    for found in on_ranks(rank):
        assert close(found, x.detach(), 1e-5)


def counted_on_gloo(rank: int, shape: tuple[int, ...], step: int) -> list[str]:
    mesh, x = init_device_mesh("cpu", shape), torch.arange(30.0).reshape(5, 6)
    at, wrong = mesh.get_coordinate(), []
    for src, dst in every_pair(mesh, x.shape, x.dtype)[::step]:
        p, by = plan(src, dst), Counting(rank)
        with use_transport(by):
            got = p.run(cut_up(x, src)[at])
        if not torch.equal(got, cut_up(x, dst)[at]) or by.received != p.received(at):
            wrong.append(f"{by.received} bytes of {p.received(at)}: {p}")
    return wrong


def test_gloo_sends_the_bytes_of_the_plan(gloo4: Pool):
    """Real ranks and real groups of several axes: every pair on (2, 2) and some pairs on (2, 3)."""
    assert gloo4.run(counted_on_gloo, (2, 2), 1) == [[]] * 4
    six = Pool(6)
    try:
        assert six.run(counted_on_gloo, (2, 3), 11) == [[]] * 6
    finally:
        six.close()


# ---- values -----------------------------------------------------------------------------------

MESHES = {(2, 2): 1, (2, 3): 3, (3, 2): 5, (4,): 1, (2, 2, 2): 41}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 24, 40])
def test_uneven_blocks_of_several_axes_keep_their_values(size):
    """From and to any order of axes, merged or not. `benchmarks/planner.py --check` does all sizes and all pairs."""
    x = torch.arange(1.0, 1 + size * 3, dtype=torch.float64).reshape(size, 3)
    for shape, step in MESHES.items():
        mesh = init_device_mesh("cpu", shape)
        sums = specs(mesh, x.shape, True)
        pairs = every_pair(mesh, x.shape, x.dtype) + list(itertools.product(specs(mesh, x.shape, False), sums))
        for src, dst in pairs[size % step :: step * 4]:
            assert not wrong_blocks(carried_out(plan(src, dst), cut_up(x, src)), x, dst), plan(src, dst)


MADE = [("sum", torch.float64), ("avg", torch.float32), ("max", torch.int64), ("min", torch.bfloat16),
        ("product", torch.int32), ("max", torch.bool), ("sum", torch.complex64), ("min", torch.uint8)]  # fmt: skip


@pytest.mark.parametrize("kind, dtype", MADE, ids=str)
def test_to_partial_moves_nothing_and_back_is_exact(kind, dtype):
    """From shards and from replicated tensors, on one axis or two. But an outer axis is not removed for free."""
    mesh, x = init_device_mesh("cpu", (2, 2)), (torch.arange(15).reshape(5, 3) % 4).to(dtype)
    for dims in (None, [(0,), ()], [(0, 1), ()], [(1,), (0,)]):
        src = Spec.of(mesh, x.shape, dtype, dims=dims)
        for axes in ((0,), (1,), (0, 1)):
            left = None if dims is None else [tuple(a for a in each if a not in axes) for each in dims]
            dst = Spec.of(mesh, x.shape, dtype, dims=left, partial=[(a, kind) for a in axes])
            there = plan(src, dst)
            outer = dims == [(0, 1), ()] and axes == (0,)
            assert outer or there.bytes_per_rank == there.lower_bound_bytes == 0, there
            back = carried_out(plan(dst, src), carried_out(there, cut_up(x, src)))
            assert not wrong_blocks(back, x, src), there


# ---- time -------------------------------------------------------------------------------------

TOPOLOGIES = {"one host": init_device_mesh, "two hosts": lambda _, shape: two_hosts(shape),
              "copies": lambda _, shape: two_hosts(shape, "hopper")}  # fmt: skip


@pytest.mark.parametrize("where", TOPOLOGIES)
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_plans_are_as_cheap_as_brute_force(shape, where):
    """Large and small tensors, even, uneven and empty blocks."""
    mesh = TOPOLOGIES[where]("cpu", shape)
    for tensor in [(4096, 4096), (16, 8), (37, 5), (3, 1)]:
        pairs = every_pair(mesh, tensor)
        most = (8 if mesh.ndim == 3 else 40) // (4 if where == "copies" else 1)
        for src, dst in pairs[:: max(1, len(pairs) // most)]:
            spent = sum(int(step.cost * 1e6) for step in plan(src, dst).steps)
            assert abs(spent - least_ps(src, dst)) <= len(plan(src, dst).steps), plan(src, dst)


def any_machine(draw: random.Random) -> Machine:
    """A machine whose prices grow with the bytes. A large group may be cheaper than a small one; a curve may bend."""
    def lines(most):
        return tuple((draw.choice([0, 1, 10, 100]) * draw.random(), 10 ** draw.uniform(-7, 1)) for _ in range(most))

    groups = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 3), (6, 1), (6, 2), (12, 1), (1, 3), (1, 6)]
    measured = [
        Measured(kind, *group, lines(draw.randint(1, 3))) for kind in COLLECTIVES for group in groups
        if draw.random() < 0.7
    ]  # fmt: skip
    ways = [Way(draw.choice(ALGORITHMS), draw.random(), [Link(us, 1e-3 / slope) for us, slope in lines(2)])
            for _ in range(4)]  # fmt: skip
    return Machine("any", (*ways, Way("ring", 5, [Link(1, 10), Link(3, 1)])), measured=tuple(measured))


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_the_cheapest_at_any_prices(seed):
    """With three axes and tensors of three dims."""
    draw = random.Random(seed)
    for shape in ((2, 3), (2, 3, 2)):
        mesh = init_device_mesh("cpu", shape)
        for _ in range(4):
            hosts = draw.choice([1, 2, 3])
            where = MeshTopoInfo.from_mesh(mesh, ranks_per_host=mesh.size() // hosts, machine=any_machine(draw))
            there = mesh.with_topology(where)
            tensor = draw.choice([(768, 192, 96), (12, 24, 12), (37, 5, 2), (3, 1, 4)])
            src, dst = (draw.choice(specs(there, tensor, partial, torch.float32)) for partial in (True, False))
            spent = sum(int(step.cost * 1e6) for step in plan(src, dst).steps)
            assert abs(spent - least_ps(src, dst)) <= len(plan(src, dst).steps), plan(src, dst)


@pytest.mark.parametrize("machine", sorted(PRESETS))
def test_a_number_is_planned_like_any_tensor(machine):
    """A tensor without dims is reduced in one move, also where the machine prices copies."""
    mesh = two_hosts((2, 2), machine)
    for src, dst in every_pair(mesh, ()):
        assert len(plan(src, dst).steps) == (src is not dst), f"{src} -> {dst}"


def test_a_plan_of_more_bytes_is_never_faster():
    """Nor does the time jump: twice the bytes take at most twice the time."""
    mesh = two_hosts((2, 2, 2))
    for src, dst in every_pair(mesh, (8, 8))[::150]:
        times = []
        for k in range(10):
            a, b = (Spec.of(mesh, (8 << k, 8 << k), s.dtype, dims=s.dims, partial=s.partial) for s in (src, dst))
            times.append(plan(a, b).modelled_us)
        assert all(a <= b * (1 + 1e-9) and b <= 4 * a * (1 + 1e-9) for a, b in itertools.pairwise(times)), (src, dst)


@st.composite
def detours(draw) -> tuple[Spec, Spec, Spec]:
    """Three specs: any layout, and two without sums, on any kind of links."""
    shape = draw(st.sampled_from([(4,), (2, 4), (3, 2), (2, 2, 2)]))
    per_host = draw(st.sampled_from([prod(shape), prod(shape) // 2]))
    mesh, machine = init_device_mesh("cpu", shape), draw(st.sampled_from(sorted(PRESETS)))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=per_host, machine=machine))
    tensor = tuple(48 * draw(st.sampled_from([1, 7, 100])) for _ in range(2))
    first, others = (specs(mesh, tensor, sums, torch.float32) for sums in (True, False))
    return draw(st.sampled_from(first)), draw(st.sampled_from(others)), draw(st.sampled_from(others))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(detours())
def test_a_detour_is_never_cheaper(specs_on_the_way):
    """The triangle inequality: from a over b to c takes at least as long as from a to c, to 1 ps a move."""
    a, b, c = specs_on_the_way
    assert plan(a, c).modelled_us <= plan(a, b).modelled_us + plan(b, c).modelled_us + 1e-5, plan(a, c)


def test_ranks_that_replicate_share_what_comes_from_another_host():
    """Each rank of a host receives a part over its own link, then they exchange the parts: a third of the time."""
    mesh = two_hosts((2, 4))
    p = plan(*(Spec.of(mesh, MB64, torch.float32, dims=dims) for dims in ([(0,), ()], [(), ()])))
    assert str(p.steps[0]) == "slice(dim1, 0)" and p.steps[-1].axes == (0, 1)
    assert p.modelled_us < 0.6 * AllGather((0,)).collective_us(p.lower_bound_bytes, mesh.topology)


def test_views_of_one_mesh_plan_alike():
    """Views with axes in another order, with axes of one rank, and of a larger mesh; on one host and on several."""
    for per_host in (24, 8, 4):
        ranks = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]
        larger = DeviceMesh("cpu", ranks, mesh_dim_names=("z", "x", "y"))
        padded = DeviceMesh("cpu", [[ranks[0][:1], ranks[0][1:]]], mesh_dim_names=("two", "x", "one", "y"))
        larger, padded = (m.with_topology(MeshTopoInfo.from_mesh(m, ranks_per_host=per_host)) for m in (larger, padded))
        alone = DeviceMesh("cpu", ranks[0], mesh_dim_names=("x", "y"))
        alone = alone.with_topology(MeshTopoInfo.from_mesh(alone, ranks_per_host=per_host))
        views = [alone, alone["y", "x"], larger["x", "y"], larger["y", "x"], padded]
        for a, b in itertools.product(["f32[640@x,y, 8]", "f32[640@y, 8@x]", "f32[640, 8@y] +sum@x"], repeat=2):
            if "sum" not in b:
                plans = [plan(parse_spec(a, m), parse_spec(b, m)) for m in views]
                assert len({p.modelled_us for p in plans}) == len({p.bytes_per_rank for p in plans}) == 1


def test_another_order_of_axes_is_one_permute():
    """A rank receives at most a block, and nothing is gathered."""
    for shape in ((2, 4), (2, 2, 2)):
        mesh = init_device_mesh("cpu", shape)
        orders = list(itertools.permutations(range(mesh.ndim)))
        for a, b in itertools.permutations(orders, 2):
            src, dst = (Spec.of(mesh, MB64, torch.float32, dims=[order, ()]) for order in (a, b))
            assert [s.kind for s in plan(src, dst).steps] == ["permute"]
            assert plan(src, dst).bytes_per_rank <= src.local_nbytes


def calibrated(shape: tuple[int, ...], residual: float) -> DeviceMesh:
    """One host with the prices of the textbook, but as measured curves with this residual."""
    mesh, costs = init_device_mesh("cpu", shape), {kind: getattr(mesh_cost, f"{kind}_cost") for kind in KINDS}
    curves = {}
    for axes in itertools.chain(*(itertools.combinations(range(mesh.ndim), k) for k in range(1, mesh.ndim + 1))):
        for kind, us in costs.items():
            none, much = us(0, axes, mesh.topology), us(2**30, axes, mesh.topology)
            n = prod(shape[a] for a in axes)
            curves[kind, n] = Measured(kind, n, 1, ((none, (much - none) / 2**30),), residual=residual)
    machine = Machine("calibrated", PRESETS["textbook"].ways, measured=tuple(curves.values()))
    return mesh.with_topology(MeshTopoInfo(mesh.topology.layout, machine))


KINDS = "all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter"


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)], ids=str)
def test_of_plans_that_cannot_be_told_apart_the_one_of_fewest_moves_is_made(shape):
    """It is within the residual of the cheapest plan and has no more moves; without a residual it is the cheapest."""
    sure, unsure = calibrated(shape, 0.0), calibrated(shape, 0.1)
    fewer, textbook = 0, init_device_mesh("cpu", shape)
    step = 29 if len(shape) == 3 else 1
    pairs = zip(*(every_pair(mesh, MB64)[::step] for mesh in (sure, unsure, textbook)), strict=True)
    for (src, dst), (a, b), (c, d) in pairs:
        best, made = plan(src, dst), plan(a, b)
        assert [str(s) for s in best.steps] == [str(s) for s in plan(c, d).steps]
        assert best.modelled_us <= made.modelled_us <= 1.1 * best.modelled_us and len(made.steps) <= len(best.steps)
        fewer += len(made.steps) < len(best.steps)
    assert fewer


class Nobody:
    """A transport to no other rank: results of collectives have the right size and no values."""

    def group(self, mesh, axes):
        return ""

    def exchanges_terms(self, device_type):
        return False

    def all_reduce(self, x, op, group):
        return x

    def all_gather_into_tensor(self, x, n, group):
        return x.new_empty(n * len(x))

    def reduce_scatter_tensor(self, x, op, n, group):
        return x.new_empty(len(x) // n)

    def all_to_all_single(self, x, out_splits, in_splits, group):
        return x.new_empty(sum(out_splits))

    def wait_tensor(self, x):
        return x


class Copying(TorchDispatchMode):
    """Records the bytes of each copy."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op in (torch.ops.aten.cat.default, torch.ops.aten.clone.default, torch.ops.aten.constant_pad_nd.default):
            self.nbytes.append(out.nbytes)
        return out


COPIED = [((4,), (8, 12), True), ((2, 2), (8, 12), True), ((2, 3), (12, 18), False), ((2, 2), (5, 6), False)]


@pytest.mark.parametrize("shape, tensor, exactly", COPIED, ids=str)
def test_copies_that_are_priced_are_those_that_are_made(shape, tensor, exactly):
    """For each move, on the first rank. Rows of several lengths, and padded rows, may be copied more often."""
    mesh = init_device_mesh("cpu", shape)
    x, first = torch.arange(float(prod(tensor))).reshape(tensor), (0,) * mesh.ndim
    for src, dst in every_pair(mesh, tensor)[::3]:
        for step in plan(src, dst).steps:
            block = cut_up(x.reshape(step.before.shape), step.before)[first]
            with Copying() as made:
                step.finish(step.start(block, first, Nobody()), first, Nobody())
            boxes = [members(spec, step.axes, first) for spec in (step.before, step.after)]
            priced = step.move.copies(*boxes).in_bytes(4)
            wanted = [n for n in [priced.packed, *[priced.joined] * priced.times] if n]
            assert made.nbytes == wanted if exactly else sum(made.nbytes) >= sum(wanted), (step, made.nbytes, wanted)


# ---- memory -----------------------------------------------------------------------------------


def test_a_plan_keeps_within_the_memory_it_is_given():
    """If the fastest plan needs too much, a slower one is made. If every plan does, an error says what is needed."""
    mesh = init_device_mesh("cpu", (2, 4))
    src, dst = [S0, S0], [R, S1]
    free = plan_redistribute(mesh, MB64, torch.float32, src, dst)
    tight = plan_redistribute(mesh, MB64, torch.float32, src, dst, max_memory=free.peak_bytes - 1)
    assert tight.peak_bytes < free.peak_bytes and tight.modelled_us > free.modelled_us
    with pytest.raises(ValueError, match=rf"keeps within 1,000 bytes.*{free.peak_bytes:,}"):
        plan_redistribute(mesh, MB64, torch.float32, src, dst, max_memory=1000)


# ---- in the order of the ranks ----------------------------------------------------------------


@pytest.mark.parametrize("kind, dtype", [("sum", torch.float32), ("avg", torch.bfloat16), ("product", torch.float64),
                                         ("max", torch.float32), ("sum", torch.int16)], ids=str)  # fmt: skip
def test_sums_in_rank_order_are_equal_to_the_bit(kind, dtype):
    """Whatever the target spec is, and on every rank: terms are added one by one."""
    add = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum}[kind]
    draw = torch.Generator().manual_seed(0)
    for shape in ((2, 3), (2, 2, 2)):
        mesh = init_device_mesh("cpu", shape)
        terms = {at: (torch.randn(5, 7, generator=draw) * 9).to(dtype) for at in mesh.coordinates()}
        want = functools.reduce(add, terms.values())
        want = want / mesh.size() if kind == "avg" else want
        src = Spec.of(mesh, (5, 7), dtype, partial=[(a, kind) for a in range(mesh.ndim)])
        for dst in specs(mesh, (5, 7), False, dtype)[::3]:
            p = plan(src, dst, in_rank_order=True)
            received = Counter()
            assert not wrong_blocks(carried_out(p, terms, received), want, dst), p
            assert {at: received[at] for at in terms} == {at: p.received(at) for at in terms}


def test_redistribute_adds_in_rank_order_if_asked():
    """With terms whose sum depends on the order."""

    def rank(mesh):
        mine = torch.tensor([1e8, 1.0, -1e8, 1.0])[mesh.ranks.index(mesh.get_rank())].reshape(1)
        x = DTensor.from_local(mine, mesh, [SUM, SUM])
        return [x.redistribute(placements=to, in_rank_order=True).full_tensor().item() for to in ([R, R], [S0, R])]

    assert on_ranks(rank) == [[1.0, 1.0]] * 4


# ---- one plan for all -------------------------------------------------------------------------


def all_plans() -> str:
    mesh = two_hosts((2, 2, 2))
    return "\n".join(str(plan(a, b)) for a, b in every_pair(mesh, (24, 10))[::97])


def test_plans_are_the_same_in_another_process():
    """Whatever its hash seed is, and whatever was planned before."""
    text = all_plans()
    forget()
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    code = "from tests.tensor.redistribute.test_plan import all_plans; print(all_plans())"
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == text == all_plans(), out.stderr


# ---- redistribute -----------------------------------------------------------------------------


def test_redistribute_makes_the_plan():
    """With orders of axes, another dtype and a later wait. The gradient moves so, too, and nothing else is sent."""
    whole, world = torch.arange(24.0, dtype=torch.float64).reshape(8, 3), ThreadWorld(4)

    def rank(rank):
        mesh = mesh_of((2, 2))
        x = distribute_tensor(whole, mesh, [S0, S0], src_data_rank=None).requires_grad_()
        turned = x.redistribute(placements=[S0, S0], order={0: ("tp", "dp")}, backward_dtype=torch.float32)
        assert turned._spec.dims == ((1, 0), ())
        small = turned.redistribute(placements=[R, R], async_op=True, forward_dtype=torch.float32)
        assert isinstance(small._local_tensor, AsyncTensor) and small.dtype == torch.float32
        (small * 2).sum().backward()
        grad = x.grad.full_tensor()
        return small.to_local().tolist(), grad.dtype, grad.unique().tolist()

    assert world.run(rank) == [(whole.tolist(), torch.float64, [2.0])] * 4
    sent = [(call.kind, call.nbytes) for call in world.calls[0]]
    # 2 of 8 rows a rank: as float64, then float32; the gradient is sliced, turned back in float32, and gathered.
    assert sent == [("all_to_all_single", 48), ("all_gather_into_tensor", 24), ("all_to_all_single", 24),
                    ("all_gather_into_tensor", 48)]  # fmt: skip


def test_what_is_on_its_way_must_not_be_written_to():
    """Else some ranks would receive old values and some new ones. After the wait, writes are allowed."""

    def rank(mesh):
        x = distribute_tensor(torch.arange(8.0), mesh, [S0, S0], src_data_rank=None)
        early, late = (x.redistribute(placements=[R, R], async_op=True) for _ in range(2))
        found = (early + 0).to_local().tolist()
        x.zero_()
        with pytest.raises(RuntimeError, match="the input of all_gather was written to while it was on its way"):
            late + 0
        return found

    assert on_ranks(rank) == [torch.arange(8.0).tolist()] * 4


def test_a_sum_may_be_sent_in_fewer_bits_but_never_as_integers():
    """The sum of numbers of another kind is another number."""

    def rank(mesh):
        x = DTensor.from_local(torch.ones(4), mesh, [SUM, AVG])
        narrow = x.redistribute(placements=[R, R], forward_dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="still to be reduced"):
            x.redistribute(placements=[R, R], forward_dtype=torch.int64)
        return narrow.dtype, narrow.to_local().tolist()

    assert on_ranks(rank) == [(torch.bfloat16, [2.0] * 4)] * 4


def test_an_order_must_name_the_axes_that_shard():
    mesh = mesh_of((2, 2))
    for order, says in (({0: ("dp",)}, "shard it by dp, tp"), ({2: ("dp", "tp")}, "of a tensor of 2 dims")):
        with pytest.raises(ValueError, match=says):
            plan_redistribute(mesh, (8, 8), torch.float32, [S0, S0], [R, S1], src_order=order)


# ---- large meshes -----------------------------------------------------------------------------

LARGE = [
    ("f32[1000@x, 1000@y]", "f32[1000@y, 1000@x]"),
    ("f32[100003@x,y, 8]", "f32[100003, 8]"),
    ("f32[1000@x, 1000] +sum@y", "f32[1000, 1000@y]"),
]


@pytest.mark.parametrize("src, dst", LARGE, ids=[f"{s} to {d}" for s, d in LARGE])
def test_an_uneven_plan_takes_no_longer_on_a_large_mesh(src, dst):
    """Ranks of one kind are looked at once: what all 16,384 ranks receive is an array over the axes that matter."""
    mesh = init_device_mesh("cpu", (128, 128), mesh_dim_names=("x", "y"))
    specs, box = [parse_spec(text, mesh) for text in (src, dst)], Spec.box

    def counted(spec, coordinate):
        asked.append(coordinate)
        return box(spec, coordinate)

    asked: list = []
    with mock.patch.object(Spec, "box", counted):
        found = plan(*specs)
        assert found.lower_bound_bytes <= found.bytes_per_rank and found.modelled_us > 0 and str(found)
    assert len(asked) < 1000
    last = (127, 127)
    assert found.received(last) <= found.bytes_per_rank


@pytest.mark.parametrize("shape", [(2, 4), (3, 2)], ids=str)
def test_what_all_ranks_receive_at_once_is_what_each_receives(shape):
    """The arrays say for every rank what its own boxes say."""
    mesh = init_device_mesh("cpu", shape)
    for src, dst in random.Random(0).sample(every_pair(mesh, (7, 5)), 60):
        for c in mesh.coordinates():
            have, want = src.box(c), dst.box(c)
            assert of_rank(volumes(sides(src)), c) == volume(have)
            assert of_rank(overlaps(sides(src), sides(dst)), c) == volume(overlap(have, want))


def test_the_cost_of_a_layout_is_that_of_its_plan():
    """Also where blocks differ in size; nothing where the layout is there."""
    mesh = init_device_mesh("cpu", (2, 2), topology="hopper")
    rows, whole, turned = (spec_of(mesh, p, (5, 8), torch.float32) for p in ([S0, R], [R, R], [S1, R]))
    assert redistribute_cost(rows, rows) == 0 <= redistribute_cost(whole, rows) < redistribute_cost(rows, whole)
    assert redistribute_cost(rows, turned) == plan(rows, turned).modelled_us > 0


@pytest.mark.parametrize("src, dst", [("f32[4@cp,dp/2]", "f32[4@cp]"), ("f32[12@dp,cp/4]", "f32[12@dp/2]")])
def test_axes_that_cut_alike_are_the_same_whatever_the_unit(src, dst):
    """What is cut further inside the blocks of an axis comes from the ranks with the same block."""
    mesh = init_device_mesh("cpu", (4 if "12" in src else 2, 2), mesh_dim_names=("dp", "cp"))
    assert [legal.fault(step) for step in plan(parse_spec(src, mesh), parse_spec(dst, mesh)).steps] == [""]
