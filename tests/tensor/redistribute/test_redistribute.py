"""A move between any two specs changes neither the global tensor nor its gradient."""

import itertools

import expecttest
import pytest
import torch

from spmd import DTensor, distribute_tensor
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import ThreadWorld, run_ranks
from spmd.tensor.redistribute.plan import forget, plan
from spmd.tensor.spec import Spec, parse_spec, spec_of
from tests.tensor.oracle import close, split
from tests.tensor.planned import block_of, layouts, specs
from tests.tensor.single import AVG, MAX, MIN, PRODUCT, S0, S1, SUM, R, cut, leaf, mesh_of, on_ranks, weights

MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 2, 2)]
SHAPES = [(8, 12), (5, 7), (1, 3), (3, 0), (13, 2)]


def move_all(rank, mesh_shape, shape, pairs_of):
    mesh = init_device_mesh("cpu", mesh_shape)
    x = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    at, wrong, n = mesh.get_coordinate(), [], 0
    for src, dst in pairs_of(mesh, shape):
        got = plan(src, dst).run(block_of(x, src, at))
        want = x
        for dim in range(x.ndim):
            want = want.narrow(dim, *dst.block(dim, at))
        n += 1
        if got.shape != want.shape or not torch.equal(got, want):
            wrong.append(f"{src} -> {dst}: {plan(src, dst)}")
    return n, wrong


def to_whole_or_shard(mesh, shape):
    return itertools.product(specs(mesh, shape, True), specs(mesh, shape, False))


def sampled(mesh, shape):
    pairs = list(to_whole_or_shard(mesh, shape))
    return pairs[:: max(1, len(pairs) // 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_redistribute_keeps_the_tensor(mesh_shape, shape):
    """Between any two layouts, in any order of axes, even, uneven and empty."""
    ranks = torch.Size(mesh_shape).numel()
    pairs = sampled if len(mesh_shape) == 3 else to_whole_or_shard
    for n, wrong in run_ranks(lambda rank: move_all(rank, mesh_shape, shape, pairs), ranks):
        assert n > 10
        assert not wrong, f"{len(wrong)} of {n}: {wrong[0]}"


UNITS = [1, 2, 3, 4, 5, 6, 12]


def cut_in_units(mesh, shape):
    """Sources and targets whose blocks begin at multiples of various units."""
    made = [
        Spec.of(mesh, shape, torch.float64, dims=dims, units=(unit, 1), partial=kept)
        for unit in UNITS if shape[0] % unit == 0
        for dims, kept in layouts(mesh, 2, False)
    ]  # fmt: skip
    pairs = list(itertools.product(dict.fromkeys(made), repeat=2))
    return pairs[:: max(1, len(pairs) // 200)]


@pytest.mark.parametrize("shape", [(36, 3), (30, 4), (12, 2)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (5, 2), (2, 3)], ids=str)
def test_rows_that_stay_together_move_together(mesh_shape, shape):
    """As above, for shards with units, which views of uneven shards have."""
    ranks = torch.Size(mesh_shape).numel()
    for _, wrong in run_ranks(lambda rank: move_all(rank, mesh_shape, shape, cut_in_units), ranks):
        assert not wrong, f"{len(wrong)}: {wrong[0]}"


# ---- DTensor.redistribute, and its gradient ---------------------------------------------------

SOURCES = list(itertools.product([R, S0, S1, SUM, AVG], repeat=2)) + [(MAX, S0), (R, MIN), (PRODUCT, PRODUCT)]
TARGETS = [*itertools.product([R, S0, S1], repeat=2), (SUM, R), (AVG, S1), (SUM, SUM)]
COTANGENTS = [(R, R), (S0, S1), (SUM, S0)]


@pytest.mark.parametrize("shape", [(4, 6), (5, 1)], ids=["even", "uneven"])
def test_redistribute_is_the_identity_and_so_is_its_gradient(shape):
    """For every pair, and for cotangents with several specs: the gradient is that of one device, once.

    It never comes back as a Partial.
    """
    x = weights(torch.empty(shape, dtype=torch.float64)).requires_grad_()
    w = weights(x.detach()) + 1
    parts = {p: cut(x, p, (2, 2)) for p in SOURCES}
    grads = {p: cut(w, p, (2, 2)) for p in COTANGENTS}

    def rank(mesh):
        wrong = []
        for i, (src, dst) in enumerate(itertools.product(SOURCES, TARGETS)):
            given, cotangent = leaf(parts[src], src, x, mesh), COTANGENTS[i % 5 % 3]
            moved = given.redistribute(placements=dst)
            if moved.placements != dst or not close(moved.detach().full_tensor(), x.detach(), 1e-12):
                wrong.append(f"{src} -> {dst}: {moved}")
            moved.backward(leaf(grads[cotangent], cotangent, w, mesh))
            summed = src != dst and any(p.is_partial() for p in given.grad.placements)
            if summed or not close(given.grad.full_tensor(), w, 1e-12):
                wrong.append(f"gradient of {src} -> {dst}, coming {cotangent}: {given.grad}")
        return wrong

    for wrong in on_ranks(rank):
        assert not wrong, f"{len(wrong)} wrong: {wrong[0]}"


@pytest.mark.parametrize("mesh_shape, shape", [((2, 2), (5, 3)), ((2, 3), (4, 7))], ids=str)
def test_gradients_are_those_of_finite_differences(mesh_shape, shape):
    """Of a quadratic, along one direction, where a central difference is exact but for rounding: sums, orders of axes
    and uneven blocks among the sources and the targets."""
    x = weights(torch.empty(shape, dtype=torch.float64))
    along, w, h = x.flip(0) - 0.5, x + 2, 1.0

    def everywhere(t, mesh):
        return DTensor.from_local(t, mesh, [R, R])

    def loss(x, src, dst):
        given = DTensor(block_of(x, src, src.mesh.get_coordinate()), src, requires_grad=True)
        order = {d: axes for d, axes in enumerate(dst.dims) if len(axes) > 1}
        moved = given.redistribute(placements=dst.placements, order=order)
        assert moved._spec is dst
        return given, (moved * moved * everywhere(w, src.mesh)).sum()

    def rank(mesh):
        pairs = list(itertools.product(specs(mesh, shape, True), repeat=2))
        wrong = []
        for src, dst in pairs[:: len(pairs) // 40]:
            with torch.no_grad():
                above, below = (loss(x + s * h * along, src, dst)[1].full_tensor() for s in (1, -1))
            given, value = loss(x, src, dst)
            value.backward()
            slope = (given.grad * everywhere(along, mesh)).sum().full_tensor()
            if not torch.allclose(slope, (above - below) / (2 * h), rtol=1e-11):
                wrong.append(f"{src} -> {dst}: {slope} for {(above - below) / (2 * h)}")
        return wrong

    for wrong in on_ranks(rank, mesh_shape):
        assert not wrong, f"{len(wrong)} wrong: {wrong[0]}"


REDUCTIONS = {
    "sum": [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64],
    "avg": [torch.float64, torch.bfloat16, torch.complex64],
    "max": [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
    "min": [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
    "product": [torch.float64, torch.int64, torch.uint8],
}


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_every_reduction_keeps_value_and_dtype(kind):
    """Partial of every kind and dtype, to replicated, to shards and back to Partial; uneven and empty, too."""
    p = {"sum": SUM, "avg": AVG, "max": MAX, "min": MIN, "product": PRODUCT}[kind]
    xs = [(torch.arange(15).reshape(5, 3) % 4).to(dtype) for dtype in REDUCTIONS[kind]]
    parts = [split(x, [p, p], (2, 2)) for x in xs]

    def rank(mesh):
        found = []
        for x, blocks in zip(xs, parts, strict=True):
            d = leaf(blocks, [p, p], x, mesh)
            targets = [[R, R], [S0, S0], [S1, R], [p, S0]]
            back = [d.redistribute(placements=t).redistribute(placements=[p, R]).full_tensor() for t in targets]
            found.append([d.full_tensor(), *back])
        return found

    for found in on_ranks(rank):
        for x, values in zip(xs, found, strict=True):
            for value in values:
                assert value.dtype == x.dtype and close(value, x, 1e-2), x.dtype


def test_redistribute_to_the_same_placements_is_a_view():
    """Nothing is sent; a write into the result is a write into the tensor, as between views on one device."""
    world = ThreadWorld(4)

    def rank(rank):
        x = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh_of((2, 2)), [S0, S1], src_data_rank=None)
        y = x.redistribute(placements=[S0, S1])
        y.add_(1)
        return torch.equal(x.to_local(), y.to_local()), y.placements == x.placements

    assert world.run(rank) == [(True, True)] * 4
    assert world.calls == [[]] * 4


def test_redistribute_says_what_is_wrong():
    """Errors for a placement that does not fit, and for another mesh."""
    bad = {
        "the tensor has 2 dims": lambda x, mesh: x.redistribute(placements=[R, type(S0)(2)]),
        "give one per axis": lambda x, mesh: x.redistribute(mesh, [R]),
        "have to come back": lambda x, mesh: x.requires_grad_().redistribute(DeviceMesh("cpu", [0, 1]), [R]),
        "use Shard(dim)": lambda x, mesh: x.redistribute(mesh, ["Shard(0)", R]),
    }

    def rank(mesh):
        said = []
        for call in bad.values():
            with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
                call(distribute_tensor(torch.ones(4, 4), mesh, [S0, R]), mesh)
            said.append(str(caught.value))
        return said

    for text, message in zip(bad, on_ranks(rank)[0], strict=True):
        assert text in message


PAIRS = """
f32[8@dp, 8] -> f32[8, 8@dp]
f32[8@dp,tp, 8] -> f32[8, 8]
f32[8@dp, 8@tp] -> f32[8@tp, 8@dp]
f32[8@dp, 8] +sum@tp -> f32[8@dp, 8]
f32[8@dp, 8] +sum@tp -> f32[8@dp,tp, 8]
f32[8, 8] +sum@tp -> f32[8, 8@tp]
f32[8, 8] +sum@dp +sum@tp -> f32[8, 8]
f32[8, 8] -> f32[8@dp, 8] +sum@tp
f32[6@dp,tp, 8] -> f32[6@dp, 8@tp]
"""


class TestPlans(expecttest.TestCase):
    def test_plans_of_typical_pairs(self):
        """The moves of each pair, and their time over the textbook's links."""
        mesh = mesh_of((2, 2))
        pairs = [line.split(" -> ") for line in PAIRS.strip().splitlines()]
        lines = [str(plan(parse_spec(a, mesh), parse_spec(b, mesh))) for a, b in pairs]
        self.assertExpectedInline("\n".join(lines), """\
f32[8@dp, 8] -> f32[8, 8@dp]
  all_to_all(dp, 0, 1)         f32[8, 8@dp]           64 B       7.2 us
  64 bytes a rank of at least 64, 7.2 us, 512 bytes of memory
f32[8@dp,tp, 8] -> f32[8, 8]
  all_gather(dp,tp, 0)         f32[8, 8]          192 B       8.4 us
  192 bytes a rank of at least 192, 8.4 us, 320 bytes of memory
f32[8@dp, 8@tp] -> f32[8@tp, 8@dp]
  permute(dp,tp)               f32[8@tp, 8@dp]           64 B       7.2 us
  64 bytes a rank of at least 64, 7.2 us, 128 bytes of memory
f32[8@dp, 8] +sum@tp -> f32[8@dp, 8]
  all_reduce(tp)               f32[8@dp, 8]          128 B       7.8 us
  128 bytes a rank of at least 128, 7.8 us, 256 bytes of memory
f32[8@dp, 8] +sum@tp -> f32[8@dp,tp, 8]
  reduce_scatter(tp, 0)        f32[8@dp,tp, 8]           64 B       7.2 us
  64 bytes a rank of at least 64, 7.2 us, 192 bytes of memory
f32[8, 8] +sum@tp -> f32[8, 8@tp]
  reduce_scatter(tp, 1)        f32[8, 8@tp]          128 B       7.2 us
  128 bytes a rank of at least 128, 7.2 us, 640 bytes of memory
f32[8, 8] +sum@dp +sum@tp -> f32[8, 8]
  all_reduce(dp,tp)            f32[8, 8]          384 B      10.2 us
  384 bytes a rank of at least 384, 10.2 us, 512 bytes of memory
f32[8, 8] -> f32[8@dp, 8] +sum@tp
  slice(dp,tp, 0)              f32[8@dp,tp, 8]                 0 B       0.0 us
  to_partial(tp, 'sum')        f32[8@dp, 8] +sum@tp            0 B       0.0 us
  0 bytes a rank of at least 0, 0.0 us, 320 bytes of memory
f32[6@dp,tp, 8] -> f32[6@dp, 8@tp]
  all_to_all(tp, 0, 1)         f32[6@dp, 8@tp]           32 B       7.2 us
  32 bytes a rank of at least 32, 7.2 us, 224 bytes of memory""")


def test_a_plan_is_the_same_for_every_rank_and_time():
    """A plan is a function of two specs: no rank and no earlier plan changes it."""
    mesh = mesh_of((2, 2))
    pairs = [(spec_of(mesh, a, (6, 5)), spec_of(mesh, b, (6, 5))) for a in SOURCES[:12] for b in TARGETS[:9]]
    first = [str(plan(a, b)) for a, b in pairs]
    forget()
    assert [str(plan(a, b)) for a, b in reversed(pairs)][::-1] == first
