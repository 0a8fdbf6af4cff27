"""Sizes are symbols: one capture serves other sizes; what else decided the trace is said in one line."""

import copy
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import spmd
import spmd.expand.compile as compiling
from spmd import LocalTensorMode, Partial, Shard
from spmd.expand.sizes.alike import NotAlike, Texts
from spmd.expand.sizes.size import Size, evaluated
from spmd.sim import run_ranks
from tests.expand.side_by_side import INPUTS, NET, Net, seeded, train_step, values


@contextmanager
def captures():
    """Inside, the captures that are made are counted, in a list."""
    made, real = [], compiling.capture

    def counted(*args):
        made.append(args)
        return real(*args)

    with mock.patch.object(compiling, "capture", counted):
        yield made


def first(x):
    """The value on rank 0 of a simulation."""
    x = x.detach().full_tensor() if isinstance(x, spmd.DTensor) else x
    return x.reconcile() if isinstance(x, torch.Tensor) else x


def on_ranks(fn, calls, inputs=None, mesh_shape=(2, 2), **options):
    """The result of each call on simulated ranks, with one compiled step, and how many captures it took."""
    with LocalTensorMode(torch.Size(mesh_shape).numel()), captures() as made:
        mesh = spmd.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        step = spmd.compile(fn, mesh, inputs=inputs or {"x": {"dp": Shard(0)}}, **options)
        return [torch.utils._pytree.tree_map(first, step(*args)) for args in calls], len(made)


def tensor(*shape):
    return torch.linspace(-1.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _solutions(a, x):
    factor = torch.linalg.cholesky(a)
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(x[:, 0]), scale_tril=factor, validate_args=False)
    solved = torch.linalg.solve_triangular(factor.expand(2, *a.shape), x, upper=False)
    return [torch.cholesky_solve(x, factor), solved, normal.log_prob(x[:, 0])]


KEPT = {
    "linspace": lambda x: x * torch.linspace(-1, 2.5, x.shape[0], dtype=x.dtype)[:, None],
    "linspace of floats": lambda x: x * torch.linspace(0, 1, steps=x.shape[0] * 2 + 1)[1::2, None],
    "logspace": lambda x: x * torch.logspace(0, 1, x.shape[0], base=2.0, dtype=x.dtype)[:, None],
    "polar": lambda x: torch.polar(x, x[:, :1]).real + torch.complex(x, x.flip(0)).abs(),
    "losses under vmap": lambda x: [
        torch.vmap(torch.func.grad(lambda a, i: F.cross_entropy(a, i)))(x, (x.argmax(1) + 1) % 4),
        torch.vmap(lambda a, i: F.cross_entropy(a, i, ignore_index=1))(
            x[:, None].expand(-1, 2, 4), torch.tensor([[1, 3]]).repeat(x.shape[0], 1)
        ),
        torch.vmap(F.cross_entropy)(x[:, :, None] + torch.ones(1, 3), torch.full((x.shape[0], 4), 2)),
    ],
    "matrices": lambda x: _solutions(x @ x.T + 9 * torch.eye(x.shape[0], dtype=x.dtype), x),
    "inference mode": lambda x: x * torch.inference_mode()(lambda: x[1:].detach().sum(0, keepdim=True)[None, 0])(),
    "kron": lambda x: torch.kron(x, x[:2, 0].reshape(2, 1)) + x.kron(torch.ones(2, 1, dtype=x.dtype)),
    "kron of other dims": lambda x: torch.kron(x[0], x),
    "vander": lambda x: torch.vander(x[:, 0], 4) + torch.vander(x[:, 1], 4, increasing=True),
    "vander of its size": lambda x: torch.vander(x[:, 0]),
    "powers": lambda x: torch.linalg.vander(x, N=3) * torch.vander(x[0], 1)[0],
    "powers of whole numbers": lambda x: torch.linalg.vander(torch.arange(x.shape[0])),
    "gradient": lambda x: torch.gradient(x, dim=0),
    "gradients": lambda x: torch.gradient(x, spacing=[0.5, 2.0], edge_order=2),
    "lerp": lambda x: torch.lerp(x, x.flip(0), x[:, :1]) + x.clone().lerp_(x + 1, x[:, 0].view(-1, 1)),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1) + x.take_along_dim(x.argsort(0), -2),
    "take_along_dim of one row": lambda x: torch.take_along_dim(x, torch.tensor([[0, 2, 1]]), 1),
    "take_along_dim of all": lambda x: torch.take_along_dim(x, x.flatten().argsort()),
}


@pytest.mark.parametrize("name", KEPT)
def test_functions_keep_sizes_as_symbols(name):
    given = [(tensor(n, 4),) for n in (8, 12, 7)]
    want = [KEPT[name](*args) for args in given]
    for mesh_shape in ((2, 2), (4, 1)):
        found, captured = on_ranks(KEPT[name], given, mesh_shape=mesh_shape)
        torch.testing.assert_close(found, want)
        assert captured == 1


DIAGONALS = {
    "read": lambda x: x.diagonal() * 2,
    "beside": lambda x: x.diagonal(-1) * x.shape[0],
    "written": lambda x: (y := x * 1, y.diagonal().fill_(1), y)[-1],
    "filled": lambda x: (x * 1).fill_diagonal_(2.0),
    "triangles": lambda x: (x * 1).tril_() + (x * 2).triu_(1),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_and_triangles_have_symbols_for_sizes(name):
    given = [(tensor(n, n),) for n in (6, 9, 3)]
    found, captured = on_ranks(DIAGONALS[name], given)
    assert captured == 1
    for got, args in zip(found, given, strict=True):
        torch.testing.assert_close(got, DIAGONALS[name](*args))


PARTS = {
    "chunk": lambda x: x.chunk(3),
    "split": lambda x: x.split(x.shape[0] // 3),
    "split by a number": lambda x: torch.split(x, 2),
    "tensor_split": lambda x: x.tensor_split(3),
    "of the second dim": lambda x: x.chunk(2, 1),
    "with gradients": lambda x: (x * 1.0).requires_grad_().chunk(3),
}


@pytest.mark.parametrize("way", PARTS)
def test_parts_of_a_batch_are_those_of_one_device_at_any_size(way):
    """Sizes that are divisible have one capture; where the last part is shorter, there is another one."""

    def step(x):
        return [part.cumsum(0).sum(1) * i for i, part in enumerate(PARTS[way](x), 1)]

    sizes = [(6, 4), (12, 4), (9, 6), (7, 4), (8, 5), (6, 4), (3, 8), *([] if way == "split" else [(2, 2), (1, 4)])]
    got, _ = on_ranks(step, [(tensor(*size),) for size in sizes])
    for mine, size in zip(got, sizes, strict=True):
        expected = step(tensor(*size))
        assert len(mine) == len(expected)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other.detach())
    _, made_for_even = on_ranks(step, [(tensor(*size),) for size in [(6, 4), (12, 4), (9, 6), (6, 8)]])
    assert made_for_even == (3 if way == "split by a number" else 1)


# ---- trainings --------------------------------------------------------------------------------

BATCHES = [(4, 6), (4, 6), (3, 5), (1, 6), (5, 1)]
"""Even, twice (the second step has gradients), uneven, with empty shards, a batch of one, a length of one."""


def test_a_model_trains_on_any_sizes_without_another_capture():
    """Its parameters are in shards on both axes: those that tp does not shard are stored so."""
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(*n, 4, generator=g).double(), torch.randint(3, n, generator=g)) for n in BATCHES]
    model = seeded(Net).double()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    want = [train_step(alone, optimizer, *batch).item() for batch in batches]
    with LocalTensorMode(4), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS, fully_shard="dp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got = [first(step(model, optimizer, *batch)).item() for batch in batches]
        assert len(made) == 1 and len(step.programs) == len(set(BATCHES))
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(first(mine), theirs.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_ranks_on_threads_take_one_capture_each():
    """The ranks agree on the program of each size, and send what it says."""

    def step(x):
        return x.sum(0) / x.shape[0], x.shape[0] * 2

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})
        return [values(compiled(tensor(n, 3))) for n in (4, 3, 1, 4)], len(compiled._captures._kept)

    for got, kept in run_ranks(rank, 2):
        assert kept == 1
        for (mean, twice), n in zip(got, (4, 3, 1, 4), strict=True):
            torch.testing.assert_close(mean, tensor(n, 3).mean(0))
            assert twice == 2 * n


def test_a_gradient_with_sizes_of_the_batch_is_that_of_a_parameter():
    """The gradient of positions has as many rows as the batch has patches, and a stride that depends on them."""

    def step(model, optimizer, x):
        n = x.shape[0]
        x = torch.cat([model["start"].expand(n, -1, -1), x.flatten(2).transpose(1, 2)], 1) + model["places"]
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()

    def begin():
        model = torch.nn.ParameterDict({"start": tensor(1, 1, 3), "places": tensor(1, 5, 3)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (alone, other) = begin(), begin()
    batches = [(model, optimizer, tensor(n, 3, 2, 2)) for n in (4, 4, 3)]
    _, made = on_ranks(step, batches)
    for *_, x in batches:
        step(alone, other, x)
    assert made == 1
    for name, p in alone.items():
        torch.testing.assert_close(first(model[name]), p.detach(), rtol=1e-12, atol=1e-12)


# ---- sizes at which an op does nothing -----------------------------------------------------------

DOES_NOTHING = {
    "more rows than there are": (lambda x: x[:10].sum(), [(8,), (20,), (4,)]),
    "more columns than there are": (lambda x: x[:, :5].sum(1), [(8, 3), (8, 9), (8, 3)]),
    "rows from the end": (lambda x: x[-10:].sum(), [(8,), (20,), (4,)]),
    "rows of another": (lambda x, y: x[: y.shape[0]].sum(), [((8,), (8,)), ((8,), (4,)), ((8,), (20,))]),
    "as many rows": (lambda x, n: x[:n].sum(), [((8,), 8), ((8,), 2), ((8,), 100)]),
    "no row less": (lambda x, n: x[n:].sum(), [((8,), 0), ((8,), 2), ((8,), -2)]),
    "a narrow part": (lambda x, n: x.narrow(0, 0, n).sum(), [((8,), 8), ((8,), 2)]),
    "a gradient of rows": (
        lambda x, n: torch.autograd.grad((y := x.clone().requires_grad_())[:n].square().sum(), y)[0],
        [((8,), 100), ((8,), 2), ((8,), 8)],
    ),
    "rows that are written": (
        lambda x, n: torch.slice_scatter(x, torch.zeros_like(x[:n]), 0, 0, n), [((8,), 8), ((8,), 2), ((8,), 100)]
    ),
    "the same shape": (lambda x, n: x.view(n, -1).sum(0), [((4, 4), 4), ((4, 4), 2), ((4, 4), 16), ((4, 4), 1)]),
    "the same last dim": (lambda x, n: x.view(-1, n).sum(0), [((4, 4), 4), ((4, 4), 2), ((4, 4), 8)]),
    "one more dim": (lambda x, n: x.unflatten(0, (n, -1)).sum(0), [((4, 4), 4), ((4, 4), 2), ((4, 4), 1)]),
    "once": (lambda x, n: x.repeat_interleave(n, 0), [((2, 3), 1), ((2, 3), 3)]),
    "one row": (lambda x, n: x[:1].expand(n, 3).sum(), [((8, 3), 1), ((8, 3), 4)]),
    "nothing": (lambda x, n: torch.arange(n).sum() + x.sum(), [((2,), 0), ((2,), 3), ((2,), 1)]),
    "one number": (lambda x, n: torch.linspace(0, 1, n).sum() + x.sum(), [((2,), 3), ((2,), 1), ((2,), 4)]),
}  # fmt: skip


@pytest.mark.parametrize("back", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", DOES_NOTHING)
def test_an_op_that_does_nothing_at_some_sizes_is_there_at_others(name, back):
    """A slice that was all of its operand left nothing in the graph that other sizes could be compared with, and an int
    that was equal to a size nothing that said so. Each call is made three times: the last ones are quick."""
    fn, calls = DOES_NOTHING[name]
    calls = [call if any(isinstance(each, (tuple, list)) for each in call) else (call,) for call in calls]
    args = [[tensor(*each) if isinstance(each, tuple) else each for each in call] for call in calls]
    step = spmd.compile(fn, spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    for given in reversed(args) if back else args:
        for _ in range(3):
            torch.testing.assert_close(step(*given).full_tensor(), fn(*given), rtol=1e-12, atol=1e-12)


# ---- functions --------------------------------------------------------------------------------

TO_INTERPOLATE = (
    {"size": 7}, {"scale_factor": 2}, {"scale_factor": (3.0,), "mode": "linear"}, {"size": 2, "mode": "area"},
    {"size": [5], "mode": "nearest-exact"}, {"size": 3, "mode": "linear", "align_corners": True},
)  # fmt: skip


def recurrent(x):
    """Cells, and a layer, with the rows as the batch."""
    x, wide, square = x[:, :1] * x.new_ones(3), x.new_ones((8, 3)), x.new_ones((8, 2))
    h = x.new_zeros((x.shape[0], 2))
    layer = torch.lstm(x[None], (h[None], h[None]), [wide, square], False, 1, 0.0, True, False, False)
    return torch.gru_cell(x, h, wide[:6], square[:6]), torch.lstm_cell(x, (h, h), wide, square)[1], *layer


OF_IMAGES = ("nearest", "nearest-exact", "bilinear", "bicubic")

FUNCTIONS = {
    "reshapes": lambda x: (x.flatten(), x.reshape(-1, 2, x.shape[1] // 2).sum(1), x.T.contiguous()),
    "means": lambda x: (x.mean(), x.square().mean(0), F.softmax(x, 0), F.layer_norm(x, x.shape[1:])),
    "sizes as numbers": lambda x: (x.sum() / x.shape[0], x * x.numel(), x.new_ones((x.shape[0], 2)) * x.sum()),
    "windows": lambda x: (F.pad(x, (1, 2)), x[1:], x[:, -2:], x[: x.shape[0] // 2], torch.cat([x, x])),
    "places": lambda x: (torch.arange(x.shape[0]) + x.sum(), x.tril(), x.cumsum(0)),
    "written in place": lambda x: ((x * 1).clamp_(0, 1), (x * 1).clamp_min_(x.mean()), F.cosine_similarity(x, x * 2)),
    "interpolated": lambda x: [F.interpolate(x[:, None], **how) for how in TO_INTERPOLATE],
    "interpolated images": lambda x: [F.interpolate(x[:, None, None], (3, 5), mode=mode) for mode in OF_IMAGES],
    "copies": lambda x: (x.repeat(2, 1), x[None].expand(3, -1, -1), x.split(x.shape[1] // 2, 1)[0], x.unsqueeze(-1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_sizes_are_captured_once(name):
    """Also on a batch smaller than the axis. The gradient is taken along."""

    def step(x):
        leaf = x.detach().requires_grad_()
        out = FUNCTIONS[name](leaf)
        return out, torch.autograd.grad([y.sum() for y in out if y.requires_grad], leaf)

    calls = [(tensor(*shape),) for shape in ((8, 4), (5, 6), (1, 4))]
    got, made = on_ranks(step, calls, mesh_shape=(4, 1))
    for (x,), result in zip(calls, got, strict=True):
        want = torch.utils._pytree.tree_map(lambda t: t.detach(), step(x))
        torch.testing.assert_close(result, want, equal_nan=True)
    assert made == 1


def test_recurrent_layers_have_one_capture_for_all_batches_but_one_of_one_row():
    batches = [(tensor(n, 4),) for n in (8, 5, 3, 2, 8)]
    got, made = on_ranks(recurrent, batches)
    assert made == 1
    for (x,), result in zip(batches, got, strict=True):
        torch.testing.assert_close(result, recurrent(x), rtol=1e-12, atol=1e-12)


WITHOUT_FORM = ("windows", "places", "interpolated", "interpolated images")
"""Their programs have numbers that the capture has no text for. They are expanded at most sizes."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_form_gives_what_an_expansion_gives(name):
    """The program of a form is, to the letter, the one that the sizes would have been expanded to."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    step = spmd.compile(FUNCTIONS[name], mesh, inputs={"x": {"dp": Shard(0)}})
    for shape in ((8, 4), (12, 6), (16, 10), (20, 8), (5, 4), (9, 6), (13, 8), (1, 4), (1, 6)):
        _, program = step._capture_and_expand(step._call((tensor(*shape),), {}, True))
        assert str(program) == str(step.program_for(tensor(*shape)))
    (_, written), *_ = step._forms._of.values()
    assert len(written) == 3 or name in WITHOUT_FORM  # even, uneven, and one row


def test_what_is_decided_otherwise_is_expanded():
    """Uneven, empty and far larger sizes; a number that nothing in the capture says has no form."""
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    step = spmd.compile(lambda x: x.sum(0), mesh, inputs={"x": {"dp": Shard(0)}})
    for n, expanded in ((4, 1), (6, 1), (7, 2), (9, 2), (1, 3), (34, 4), (8, 4)):
        step._capture_and_expand(step._call((tensor(n, 2),), {}, True))
        (_, written), *_ = step._forms._of.values()
        assert len(written) == expanded


def test_numbers_that_are_not_known_have_no_form():
    texts = Texts(("n", "n * m", "m"), {"n": 4, "m": 4}, {"n": 6, "m": 7}, {"n": 101, "m": 103})
    forms = [texts.number(a, b) for a, b in ((12, 18), (16, 42), (5, 5), (0.25, 1 / 6))]
    assert [evaluated(tuple(texts.used), {"n": 8, "m": 3})[f.place] if f else f for f in forms] == [24, 24, None, 1 / 8]
    for a, b in ((3, 5), (4, 8), (0.5, 0.75)):
        with pytest.raises(NotAlike):
            texts.number(a, b)


def test_an_empty_batch_is_a_size():
    """And where a Python number cannot be had of it, one device fails, too."""
    calls = [(tensor(4, 2),), (tensor(0, 2),)]
    got, made = on_ranks(lambda x: (F.softmax(x, 0), x.mean(), x * 2), calls)
    assert made == 1 and got[1][0].shape == (0, 2) and got[1][1].isnan()
    with pytest.raises(ZeroDivisionError):
        on_ranks(lambda x: x.sum() * (6 / x.shape[0]), calls)


def test_equal_sizes_are_not_taken_for_one():
    """A batch that happens to be as long as it is wide, and as another argument, is a size of its own."""
    calls = [(tensor(4, 4), tensor(4)), (tensor(6, 2), tensor(3)), (tensor(2, 5), tensor(7))]
    got, made = on_ranks(lambda x, y: x.sum() * y, calls)
    assert made == 1 and all(torch.allclose(out, x.sum() * y) for out, (x, y) in zip(got, calls, strict=True))


def test_terms_are_left_on_the_ranks_at_any_size():
    got, made = on_ranks(lambda x: x.sum(0), [(tensor(n, 2),) for n in (4, 3)], outputs={"result": {"dp": Partial()}})
    assert made == 1 and torch.allclose(got[1], tensor(3, 2).sum(0))


# ---- what is captured anew --------------------------------------------------------------------


def branches(x):
    if x.shape[0] > 4:
        return x * 2
    return x + 1


def unrolled(x):
    return sum(x[i] * i for i in range(x.shape[0]))


def described(x):
    return x * float(f"{x.shape[0]:02d}.5") + {4: 0.25}.get(x.shape[0], 0.0)


def flagged(x, double=False):
    return x * 2 if double else x


def scaled(x, scale):
    return x * scale


def repeated(x, times):
    return sum(x * i for i in range(times))


def broadcast(x, y):
    return x + y


ANEW = {
    "a branch": (branches, [(tensor(8, 2),), (tensor(6, 2),), (tensor(3, 2),), (tensor(2, 2),)], 2,
                 "holds where x.shape[0] > 4, at {here}, in branches"),
    "a loop": (unrolled, [(tensor(3, 2),), (tensor(3, 5),), (tensor(2, 2),)], 2,
               "x.shape[0] == 3, at {here}, in unrolled"),
    "a text": (described, [(tensor(4, 2),), (tensor(3, 2),)], 2, "x.shape[0] == 4, at {here}, in described"),
    "a broadcast": (broadcast, [(tensor(n, 2), tensor(m, 2)) for n, m in ((4, 4), (6, 6), (4, 1))], 2, "y.shape[0]"),
    "a flag": (flagged, [(tensor(4), True), (tensor(6), True), (tensor(4), False)], 2,
               "double was True and is False, read at {here}, in flagged"),
    "a number": (scaled, [(tensor(4), 1.0), (tensor(6), 2.0), (tensor(4), True)], 2,
                 "scale was a number that may change and is True, read at {here}, in scaled"),
    "a loop of an int": (repeated, [(tensor(4), 2), (tensor(6), 2), (tensor(4), 3)], 2,
                         "times == 2, at {here}, in repeated"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANEW)
def test_what_else_decides_is_said(name, caplog):
    """A trace that other sizes or values would have taken elsewhere is made again, and one line says why."""
    fn, calls, count, said = ANEW[name]
    with caplog.at_level(logging.WARNING, "spmd"):
        got, made = on_ranks(fn, [*calls, *calls])
    for out, args in zip(got, [*calls, *calls], strict=True):
        torch.testing.assert_close(out, fn(*args))
    assert made == count
    (line,) = [record.getMessage() for record in caplog.records]
    before, _, after = said.partition("{here}")
    assert before in line and after in line and (__file__ in line or "{here}" not in said)


# ---- ints -------------------------------------------------------------------------------------


def decayed(x, count):
    """As bias corrections and warm-ups are written."""
    rate = min(count, 10) / 10 * (1 - 0.9**count)
    return x * rate + count // 3 - count % 2 if isinstance(count, int) else x, count + 1


def masked(x, count):
    return x.masked_fill(torch.arange(x.shape[0])[:, None] < count, count)


def cut(x, n):
    return x[:n].sum(0), x.new_full((n, 2), n) + n * x.shape[1], x.select(0, n)


def warmed(x, count):
    return x * count if count < 4 else x / (count + x.shape[0])


@dataclass
class Cache:
    seen: int
    total: torch.Tensor


def counted(x, cache):
    cache.seen += x.shape[0]
    return x / cache.seen + cache.total


INTS = {
    "arithmetic": (decayed, [1, 2, 7, 40], 1, 1),
    "a mask": (masked, [1, 3, 0, -2], 1, 1),
    "sizes and places": (cut, [2, 1, 3], 1, 3),
    "a branch": (warmed, [1, 3, 7, 2], 2, 2),
}


@pytest.mark.parametrize("name", INTS)
def test_ints_are_symbols(name):
    """An int makes no new capture, and where no shape depends on it no new program."""
    fn, ints, captured, programs = INTS[name]
    with LocalTensorMode(2), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(fn, mesh, inputs={"x": {"dp": Shard(0)}})
        for n in ints:
            x = tensor(4, 2)
            got = torch.utils._pytree.tree_map(first, step(x, n))
            torch.testing.assert_close(got, fn(x, n))
        assert (len(made), len(step.programs)) == (captured, programs)


def test_ints_in_objects_are_symbols():
    with LocalTensorMode(2), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step, cache, alone = spmd.compile(counted, mesh), Cache(1, tensor(2)), Cache(1, tensor(2))
        for n in (4, 3, 4):
            torch.testing.assert_close(first(step(tensor(n, 2), cache)), counted(tensor(n, 2), alone))
            assert cache.seen == alone.seen and type(cache.seen) is int
        assert len(made) == 1 and len(step.programs) == 2


def test_a_size_is_text():
    assert evaluated(("x0 // 2", "max(x0, 3)"), {"x0": 7}) == (3, 7) and repr(Size("x0 * 2")) == "x0 * 2"
