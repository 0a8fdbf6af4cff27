"""Moves over groups of more ranks than are taken box by box: beside the same ranks taken box by box, and in few ops."""

import itertools

import pytest
import torch
from torch import fx

from spmd import DeviceMesh
from spmd.expand.splits import Splits, in_short
from spmd.tensor.redistribute import runs
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.collective_moves import AllGather, AllToAll, ReduceScatter
from spmd.tensor.redistribute.moves import MoveContext
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.redistribute.runs import Boxes, Run, Sizes
from spmd.tensor.spec import Spec

LINE, GRID = (40,), (2, 24)
CASES = [  # mesh, axes of the group, shape of the tensor, its dims before and after the move
    (LINE, (0,), (80, 3), [(0,), ()], [(), ()]),
    (LINE, (0,), (3, 83), [(), (0,)], [(), ()]),
    (LINE, (0,), (3, 10), [(), (0,)], [(), ()]),
    (LINE, (0,), (120, 81), [(0,), ()], [(), (0,)]),
    (LINE, (0,), (7, 2, 80), [(), (), (0,)], [(0,), (), ()]),
    (LINE, (0,), (5, 6), [(0,), ()], [(), (0,)]),
    (GRID, (1,), (6, 50), [(0,), (1,)], [(0, 1), ()]),
    (GRID, (0, 1), (96, 5), [(0, 1), ()], [(), ()]),
    (GRID, (0, 1), (9, 96), [(0,), (1,)], [(), (0, 1)]),
]


def blocks(x, spec):
    """The block of x of each rank."""
    found = {}
    for at in itertools.product(*map(range, spec.mesh.shape)):
        found[at] = x[tuple(slice(start, stop) for start, stop in spec.box(at))].contiguous()
    return found


@pytest.mark.parametrize("shape, axes, size, before, after", CASES, ids=str)
@pytest.mark.parametrize("few", [0, runs.FEW_RANKS])
def test_a_move_over_many_ranks_gives_each_its_block(shape, axes, size, before, after, few, monkeypatch):
    """What one rank packs for another is what the other unpacks: even, uneven and empty blocks."""
    monkeypatch.setattr(runs, "FEW_RANKS", few)
    for cached in (runs.group_blocks, runs.sent_boxes, runs.received_boxes):
        cached.cache_clear()
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))
    src, dst = (Spec.of(mesh, size, torch.float32, dims=dims) for dims in (before, after))
    x = torch.arange(float(torch.Size(size).numel())).reshape(size)
    have, want = blocks(x, src), blocks(x, dst)
    for group in [[at for at in have if at[0] == k] for k in range(2)] if axes == (1,) else [list(have)]:
        at = {rank: MoveContext(src, dst, rank, None) for rank in group}
        if any(after):
            pieces = [AllToAll(axes).packed(have[r], at[r]).split(AllToAll(axes).sizes(at[r])[1]) for r in group]
            came = [torch.cat([sent[i] for sent in pieces]) for i in range(len(group))]
            got = [AllToAll(axes).unpacked(y, at[r]) for y, r in zip(came, group, strict=True)]
        else:
            rows = torch.cat([AllGather(axes).packed(have[r], at[r]) for r in group])
            got = [AllGather(axes).unpacked(rows, at[r]) for r in group]
        assert all(torch.equal(y, want[r]) for y, r in zip(got, group, strict=True))


@pytest.mark.parametrize("size, dim", [((80, 3), 0), ((3, 83), 1), ((3, 10), 1), ((2, 40), 1)], ids=str)
def test_rows_that_many_ranks_reduce_are_their_blocks(size, dim):
    """Each row of what is sent is one rank's block, and padding that is not read."""
    mesh, dims = DeviceMesh("cpu", torch.arange(40)), [(0,) if d == dim else () for d in range(2)]
    src, dst = Spec.of(mesh, size, torch.float32, partial=[(0, "sum")]), Spec.of(mesh, size, torch.float32, dims=dims)
    x, ctx = torch.arange(float(torch.Size(size).numel())).reshape(size), MoveContext(src, dst, (3,), None)
    rows = ReduceScatter((0,)).packed(x, ctx).view(40, -1)
    for (rank,), block in blocks(x, dst).items():
        assert torch.equal(rows[rank, : block.numel()], block.reshape(-1))


def test_a_rank_of_thousands_writes_a_few_ops():
    """However many they are: an all-to-all over 2,048 ranks is cut, sent and joined in fewer than 20 ops."""
    mesh = DeviceMesh("cpu", torch.arange(2048))
    src, dst = (Spec.of(mesh, (512, 256), torch.float32, dims=dims) for dims in ([(0,), ()], [(), (0,)]))
    graph, ctx = fx.Graph(), MoveContext(src, dst, (5,), None)
    x = fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph))
    AllToAll((0,)).unpacked(AllToAll((0,)).packed(x, ctx), ctx)
    assert len(graph.nodes) < 20
    assert (
        str([Splits.of(sizes) for sizes in AllToAll((0,)).sizes(ctx)])
        == "[[1] * 512 + [0] * 1536, [1] * 256 + [0] * 1792]"
    )


@pytest.mark.parametrize("lengths", [(40,), (256, 1792), (39, 1), (3, 1, 2, 64, 5, 1, 700), (1,) * 50], ids=str)
def test_sizes_that_know_their_runs_are_the_same_in_short(lengths):
    """As when each size is looked at; neighbouring runs of one size are one."""
    sizes = Sizes([(i // 2 % 3, n) for i, n in enumerate(lengths)])
    assert isinstance(in_short(sizes), Splits)
    assert in_short(sizes) == in_short(list(sizes)) and list(in_short(sizes)) == sizes


class Sent:
    """A transport that keeps what is sent, and how it is cut."""

    def group(self, mesh, axes):
        return "all"

    def all_to_all_single(self, flat, received, sent, group):
        self.received, self.pieces = received, flat if isinstance(flat, fx.Proxy) else flat.split(sent)
        return flat

    def wait_tensor(self, y):
        return y


def bucket_of(mesh, *sizes):
    """Tensors of these sizes, from rows to columns, in one bucket."""
    rows, columns = [(0,), ()], [(), (0,)]
    pairs = [[Spec.of(mesh, size, torch.float32, dims=dims) for dims in (rows, columns)] for size in sizes]
    return Bucket(tuple([Step(AllToAll((0,)), *pair) for pair in pairs]))


@pytest.mark.parametrize("ranks", [4, 40])
def test_a_bucket_of_all_to_alls_gives_each_its_blocks(ranks):
    """What one rank packs for another is what the other unpacks: even, uneven and empty blocks beside one another."""
    mesh, sizes = DeviceMesh("cpu", torch.arange(ranks)), [(80, 40), (7, 83), (41, 3), (120, 81), (1, 1)]
    bucket = bucket_of(mesh, *sizes)
    xs = [torch.arange(float(n * m)).view(n, m) + 1_000 * i for i, (n, m) in enumerate(sizes)]
    have, want = (
        [blocks(x, spec) for x, spec in zip(xs, specs, strict=True)] for specs in (bucket.before, bucket.after)
    )
    carriers = [Sent() for _ in range(ranks)]
    for r, carrier in enumerate(carriers):
        bucket.start([x[r,] for x in have], (r,), carrier)
    for r, carrier in enumerate(carriers):
        came = [other.pieces[r] for other in carriers]
        assert list(map(len, came)) == list(carrier.received)
        got = bucket.finish(torch.cat(came), (r,), carrier)
        assert all(torch.equal(y, x[r,]) for y, x in zip(got, want, strict=True))


class Gathering(Sent):
    """A transport that keeps what is sent to all; or to be reduced, what has a row for each rank."""

    def all_gather_into_tensor(self, flat, n, group):
        self.flat = flat
        return flat

    def exchanges_terms(self, device_type):
        return False

    def reduce_scatter_tensor(self, flat, op, n, group):
        self.flat = flat
        return flat


def summed_and_gathered(mesh, *sizes):
    """Buckets that reduce tensors into shards of a dim, every second one of columns, and that gather them again."""
    sharded = [[(0,), ()] if i % 2 else [(), (0,)] for i in range(len(sizes))]
    shards = [Spec.of(mesh, size, torch.float32, dims=dims) for size, dims in zip(sizes, sharded, strict=True)]
    summed = [Spec.of(mesh, size, torch.float32, partial=[(0, "sum")]) for size in sizes]
    whole = [Spec.of(mesh, size, torch.float32) for size in sizes]
    reduced = [Step(ReduceScatter((0,)), a, b) for a, b in zip(summed, shards, strict=True)]
    gathered = [Step(AllGather((0,)), a, b) for a, b in zip(shards, whole, strict=True)]
    return Bucket(tuple(reduced)), Bucket(tuple(gathered))


TABLES = (80, 40), (7, 83), (41, 3), (120, 81), (1, 1)


@pytest.mark.parametrize("ranks", [4, 40])
def test_a_bucket_of_sums_gives_each_its_shards(ranks):
    """A row for each rank has its blocks: even, uneven and empty ones, of rows and of columns."""
    bucket, _ = summed_and_gathered(DeviceMesh("cpu", torch.arange(ranks)), *TABLES)
    xs = [torch.arange(float(n * m)).view(n, m) + 1_000 * i for i, (n, m) in enumerate(TABLES)]
    want, carrier = [blocks(x, spec) for x, spec in zip(xs, bucket.after, strict=True)], Gathering()
    bucket.start(xs, (0,), carrier)
    for r, row in enumerate(carrier.flat.view(ranks, -1)):
        got = bucket.finish(row, (r,), carrier)
        assert all(torch.equal(y, x[r,]) for y, x in zip(got, want, strict=True))


@pytest.mark.parametrize("ranks", [4, 40])
def test_a_bucket_of_gathers_gives_all_the_whole(ranks):
    """What is cut out of the table that comes is each tensor, in memory of its own."""
    _, bucket = summed_and_gathered(DeviceMesh("cpu", torch.arange(ranks)), *TABLES)
    xs = [torch.arange(float(n * m)).view(n, m) + 1_000 * i for i, (n, m) in enumerate(TABLES)]
    have = [blocks(x, spec) for x, spec in zip(xs, bucket.before, strict=True)]
    carriers = [Gathering() for _ in range(ranks)]
    for r, carrier in enumerate(carriers):
        bucket.start([x[r,] for x in have], (r,), carrier)
    came = torch.cat([carrier.flat for carrier in carriers])
    for y, x in zip(bucket.finish(came, (0,), carriers[0]), xs, strict=True):
        assert torch.equal(y, x) and y.is_contiguous()
        assert y.untyped_storage().data_ptr() != came.untyped_storage().data_ptr()


@pytest.mark.parametrize("of, most", [(0, 12), (1, 12)], ids=["sums", "gathers"])
def test_a_bucket_of_thousands_is_a_node_for_each_tensor(of, most):
    """Five tensors are sent and cut by a call each, beside those of the bucket itself."""
    bucket = summed_and_gathered(DeviceMesh("cpu", torch.arange(2048)), *TABLES)[of]
    graph, carrier = fx.Graph(), Gathering()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    xs = [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(TABLES))]
    bucket.finish(bucket.start(xs, (0,), carrier), (0,), carrier)
    assert len(graph.nodes) <= most


def test_a_bucket_over_thousands_of_ranks_is_a_few_ops():
    """However many they are: three all-to-alls over 2,048 ranks are cut, sent and joined in fewer than 60 ops."""
    bucket = bucket_of(DeviceMesh("cpu", torch.arange(2048)), (512, 256), (4096, 2048), (2050, 3))
    graph, carrier = fx.Graph(), Sent()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    xs = [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(3)]
    bucket.finish(bucket.start(xs, (5,), carrier), (5,), carrier)
    assert len(graph.nodes) < 60


def test_equal_runs_behind_each_other_are_cut_twice():
    """Ranks of one axis may have what those of another have again."""
    x, run = torch.arange(12.0).view(2, 6), Run(((0, 2), (0, 2)), 3, 1, 2)
    once = torch.cat([x[:, i : i + 2].reshape(-1) for i in (0, 2, 4)])
    assert torch.equal(Boxes((run, run)).cut(x, x.shape), torch.cat([once, once]))
    assert torch.equal(Boxes((run,)).joined(once, x.shape), x)
