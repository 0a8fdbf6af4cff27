"""Sums in a program are reduced where that costs least, and the numbers stay those of one device."""

import itertools
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard
from spmd.expand.minimum_cut import minimum_cut
from spmd.expand.passes.place_reductions import place_reductions

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def sent(program) -> list[tuple[str, int]]:
    return [(c.kind, c.nbytes) for c in program.collectives]


def compiled(fn, tensors, placements, shape=(4,), without=False):
    """The results on the ranks, as whole tensors, and the program."""
    names = [f"a{i}" for i in range(len(tensors))]
    code = f"lambda {', '.join(names)}: fn({', '.join(names)})"
    step = eval(code, {"fn": fn})
    with LocalTensorMode(shape[0] * (shape[1] if len(shape) > 1 else 1)):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("tp", "dp")[: len(shape)])
        off = mock.patch("spmd.expand.expansion.place_reductions", lambda program, own: program)
        with off if without else mock.MagicMock():
            ready = spmd.compile(step, mesh, inputs=dict(zip(names, placements, strict=True)), bucket_mb=None)
            out = ready(*tensors)
        out = [x.full_tensor().reconcile() for x in (out if isinstance(out, tuple) else (out,))]
        return out, ready.program


# ---- the cut ----------------------------------------------------------------------------------


def cheapest(prices, edges, sources, sinks) -> float:
    """The price of the cheapest cut, by trying all."""
    def leads(cut):
        queue, seen = [s for s in sources if s not in cut], set()
        while queue:
            n = queue.pop()
            if n not in seen:
                seen.add(n)
                queue += [m for m in edges.get(n, ()) if m not in cut]
        return seen & set(sinks)

    sets = itertools.chain.from_iterable(itertools.combinations(prices, k) for k in range(len(prices) + 1))
    return min(sum(prices[n] for n in cut) for cut in sets if not leads(set(cut)))


def test_a_minimum_cut_is_the_cheapest_of_all_cuts():
    draw = random.Random(0)
    for _ in range(60):
        n = draw.randint(2, 8)
        prices = {i: draw.randint(1, 5) for i in range(n)}
        edges = {i: [j for j in range(i + 1, n) if draw.random() < 0.4] for i in range(n)}
        sources, sinks = draw.sample(range(n), 2), draw.sample(range(n), 2)
        cut, reached = minimum_cut(prices, edges, sources, sinks)
        assert cut <= reached
        assert sum(prices[i] for i in cut) == cheapest(prices, edges, sources, sinks)


def test_a_path_that_cannot_be_cut_is_an_error():
    with pytest.raises(ValueError, match="finite price"):
        minimum_cut({0: float("inf")}, {}, [0], [0])


# ---- programs ---------------------------------------------------------------------------------

X, Y = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
Z = torch.randn(4, 4, dtype=torch.float64)
OPERANDS, PLACES = (X, Y, X.sin(), Y.cos(), Z), ([S1], [S0], [S1], [S0], [R])  # x @ y owes a sum

CASES = {
    "two terms and a residual": (lambda x, y, u, v, z: ((z + x @ y) + u @ v).relu(), [128]),
    "an op that is linear, twice": (lambda x, y, u, v, z: ((x @ y) * z.sin(), ((x @ y) * 3).sum(0)), [128, 32]),
    "one value with two linear readers": (lambda x, y, u, v, z: _readers(x @ y, z), [128]),
    "a sum that is needed, and terms of it": (lambda x, y, u, v, z: _needed(x @ y, z), [128]),
    "a small sum stays small": (lambda x, y, u, v, z: ((x @ y).sum(0) + z).relu(), [32]),
    "not through what is not linear": (lambda x, y, u, v, z: (x @ y).relu() + (u @ v).relu(), [128, 128]),
    "a product of two sums": (lambda x, y, u, v, z: (x @ y) * (u @ v), [128, 128]),
    "a product with itself": (lambda x, y, u, v, z: (lambda a: a * a)(z + x @ y), [128]),
}


def _readers(a, z):
    return a * z, (a * z.sin()).sum(0)


def _needed(a, z):
    return a.relu() + (a * z).sum(0)


@pytest.mark.parametrize("name", CASES)
def test_reductions_are_where_they_cost_least(name):
    fn, nbytes = CASES[name]
    out, program = compiled(fn, OPERANDS, PLACES)
    want = fn(*OPERANDS)
    torch.testing.assert_close(out, list(want) if isinstance(want, tuple) else [want])
    assert sorted(sent(program)) == sorted(("all_reduce", n) for n in nbytes)


def random_function(seed: int):
    """A function of the operands: sums, products with what is not owed, reductions, views, and ops not linear."""
    draw = random.Random(seed)
    steps = [(draw.choice("++--*kstvnr"), draw.random(), draw.random()) for _ in range(draw.randint(4, 14))]

    def fn(x, y, u, v, z):
        made = [x @ y, u @ v, z]
        for kind, i, j in steps:
            a, b = made[int(i * len(made))], made[int(j * len(made))]
            made.append({
                "+": lambda a=a, b=b: a + b, "-": lambda a=a, b=b: a - b, "*": lambda a=a, b=b: a * b,
                "k": lambda a=a: a * 0.5, "s": lambda a=a: a.sum(0, keepdim=True) + torch.zeros_like(a),
                "t": lambda a=a: a.t(), "v": lambda a=a: a.contiguous().view(-1).view(4, 4), "n": lambda a=a: a.tanh(),
                "r": lambda a=a: a.reshape(2, 8).reshape(4, 4),
            }[kind]())  # fmt: skip
        return made[-1], made[-2].sum()

    return fn


@pytest.mark.parametrize("shape, seeds", [((2,), range(8)), ((2, 2), range(6, 10))])
def test_random_programs_keep_their_numbers_and_never_cost_more(shape, seeds):
    check_random(shape, seeds)


@pytest.mark.parametrize("shape, programs", [((2,), 24), ((2, 2), 10)])
def test_many_random_programs_keep_their_numbers_and_never_cost_more(shape, programs):
    check_random(shape, range(programs))


def check_random(shape, seeds):
    places = [[*p, *[[R], [S0]][i % 2]][: len(shape)] if i < 4 else [R] * len(shape) for i, p in enumerate(PLACES)]
    better = 0
    for seed in seeds:
        fn = random_function(seed)
        out, program = compiled(fn, OPERANDS, places, shape)
        _, before = compiled(fn, OPERANDS, places, shape, without=True)
        torch.testing.assert_close(out, list(fn(*OPERANDS)))
        assert program.comm_time() <= before.comm_time() + 1e-9, seed
        better += program.comm_time() < before.comm_time() - 1e-9
        again = place_reductions(program).verify()
        assert again.comm_time() <= program.comm_time() + 1e-9
    assert better


# ---- norms ------------------------------------------------------------------------------------


class WrittenOut(nn.Module):
    """RMSNorm as models write it themselves."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layers(nn.Module):
    """Two blocks of a transformer without its attention, which sends nothing."""

    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList(norm(16) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(4))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.silu(up(norm(x))))
        return x


def step(model, x):
    model.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    return loss


PLAN = {"up.*": {"tp": S0}, "down.*.weight": {"tp": S1}}


def test_rms_norm_sends_no_more_than_layer_norm():
    """One sum for each norm forward, and one backward; the first has none, and the weights' travel together."""
    programs = {}
    x = torch.randn(8, 6, 16, dtype=torch.float64)
    for norm in (nn.LayerNorm, nn.RMSNorm, WrittenOut):
        torch.manual_seed(0)
        model = Layers(norm).double()
        want = [step(model, x), *(p.grad for p in model.parameters())]
        torch.manual_seed(0)
        model = Layers(norm).double()
        with LocalTensorMode(4):
            mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
            ready = spmd.compile(step, mesh, params=PLAN)
            out = [ready(model, x), *(p.grad for p in model.parameters())]
            torch.testing.assert_close([t.full_tensor().reconcile() for t in out], want)
        programs[norm] = ready.program
    layer, *others = programs.values()
    for program in others:
        assert len(program.collectives) <= len(layer.collectives)
        assert sum(n for _, n in sent(program)) <= sum(n for _, n in sent(layer))
