"""One seed gives one global tensor, bit for bit, on any mesh with any placements. The truth is a mesh of one rank."""

from __future__ import annotations

import functools
import math
import resource
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from ways import WAYS, run

import spmd
from spmd import DTensor, LocalTensorMode, Partial, Replicate, Shard
from spmd.mesh import DeviceMesh, as_rank, init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor.recipes import random
from spmd.tensor.recipes.random_words import word_formula
from spmd.tensor.rules.random_ops import RANDOM_FILLS, random_decompositions
from tests.tensor.single import on_ranks

aten = torch.ops.aten
R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESHES = [(1,), (2,), (4,), (2, 2), (4, 1), (1, 4)]
PLACINGS = [(R, R), (S0, R), (S1, R), (R, S1), (S0, S1), (S1, S0), (S0, S0)]
SIZES = [(4, 6), (7, 5), (1, 3), (0, 3), (130, 150), (2, 3, 70, 30), (9000,), ()]
"""Shapes with even, uneven and empty shards, empty ones, ones of several tiles, of many dims, of one and of none."""


def fits(placings, shape):
    """The placements for tensors of few dims: Replicate where the dim to shard does not exist."""
    return [p if not p.is_shard() or p.dim < len(shape) else R for p in placings]


def source(shape, mesh, placings, dtype=torch.float32):
    """Numbers between 0 and 1 that are the same on any mesh and are not random."""
    n = math.prod(shape)
    whole = ((torch.arange(n, dtype=torch.float64) * 0.7548776662466927) % 1).reshape(shape).to(dtype)
    return spmd.distribute_tensor(whole, mesh, fits(placings, shape)[: mesh.ndim], src_data_rank=None)


def drawn(draw, shape, mesh_shape, placings, dtype=torch.float32, seed=1):
    """The global results of a draw, as each rank has them, and then the global gradients."""

    def rank(mesh):
        spmd.manual_seed(seed)
        x = source(shape, mesh, placings, dtype)
        if dtype.is_floating_point:
            x = x.requires_grad_()
        out = draw(x)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        smooth = [o for o in outs if o.requires_grad]
        if smooth:
            sum((o * o.detach()).sum() for o in smooth).backward()
        return [o.detach().full_tensor() for o in outs] + [x.grad.full_tensor() for _ in smooth[:1]]

    return on_ranks(rank, mesh_shape)


def fill(name, *args):
    def run_fill(x):
        with torch.no_grad():
            return getattr(x.clone(), name)(*args)

    return run_fill


def initialised(init, *args):
    def run_init(x):
        with torch.no_grad():
            return init(x.clone(), *args)

    return run_init


def images(x):
    """Images of one channel and of three."""
    return x.reshape(-1)[:90].reshape(-1, 3 if x.numel() > 90 else 1, 1, 1) if x.numel() else x.reshape(0, 1, 1, 1)


def attention(x):
    q = x.reshape(-1)[:48].reshape(2, 2, 4, 3)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)


OPS = {
    "uniform_": fill("uniform_", -1, 2),
    "normal_": fill("normal_", 3, 0.5),
    "bernoulli_": fill("bernoulli_", 0.3),
    "exponential_": fill("exponential_", 2),
    "random_": fill("random_", 1000),
    "random_ between": fill("random_", -5, 5),
    "random_ any": fill("random_"),
    "cauchy_": fill("cauchy_"),
    "log_normal_": fill("log_normal_"),
    "geometric_": fill("geometric_", 0.2),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like between": lambda x: torch.randint_like(x, -5, 5, dtype=torch.int32),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda x: torch.bernoulli(x.detach(), 0.7),
    "bernoulli_ by a tensor": lambda x: x.detach().clone().bernoulli_(x.detach()),
    "normal around": lambda x: torch.normal(x.detach(), 0.5),
    "normal spread": lambda x: torch.normal(1.0, x.detach()),
    "normal": lambda x: torch.normal(x.detach(), x.detach() + 1),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.4) * 2, 0.1),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "dropout2d": lambda x: F.dropout2d(images(x), 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(images(x), 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.5, 0.1, 0.4, True),
    "rrelu in evaluation": lambda x: F.rrelu(x - 0.5, 0.1, 0.4, False),
    "gumbel": lambda x: F.gumbel_softmax(x.double(), dim=-1) if x.ndim else torch.rand_like(x),
    "poisson": lambda x: torch.poisson(x.detach() * 7),
    "binomial": lambda x: torch.binomial((x.detach() * 9).round(), x.detach()),
    "standard_gamma": lambda x: torch._standard_gamma(x.detach() + 0.1),
}


@functools.cache
def on_one_rank(name, shape):
    return drawn(OPS[name], shape, (1,), (R, R))[0]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_any_mesh_draws_what_one_rank_draws(name, shape):
    """Bit for bit, forward and backward, on every rank."""
    same = torch.allclose if name in SUMMED else torch.equal
    want = on_one_rank(name, shape)
    for i, mesh_shape in enumerate(MESHES[1:]):
        for placings in (PLACINGS[(i + hash_of(name)) % 7], PLACINGS[(i + 3 + hash_of(name)) % 7]):
            for got in drawn(OPS[name], shape, mesh_shape, placings):
                assert len(got) == len(want)
                for a, b in zip(got, want, strict=True):
                    assert a.dtype == b.dtype and same(a, b), (mesh_shape, placings)


SUMMED = {"gumbel"}
"""Ops that draw the same numbers but then sum over the ranks in another order, as a softmax does."""


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
@pytest.mark.parametrize("placings", PLACINGS, ids=str)
def test_any_placement_draws_the_same(mesh_shape, placings):
    for shape in SIZES:
        want = drawn(torch.randn_like, shape, (1,), (R, R))[0]
        assert all(torch.equal(got[0], want[0]) for got in drawn(torch.randn_like, shape, mesh_shape, placings))


PICKING = {
    "multinomial": lambda x: torch.multinomial(x.detach(), 1),
    "multinomial several": lambda x: torch.multinomial(x.detach(), 3),
    "multinomial put back": lambda x: torch.multinomial(x.detach(), 9, replacement=True),
    "attention": attention,
    "kaiming_uniform_": initialised(nn.init.kaiming_uniform_),
    "kaiming_normal_": initialised(nn.init.kaiming_normal_),
    "xavier_uniform_": initialised(nn.init.xavier_uniform_),
    "xavier_normal_": initialised(nn.init.xavier_normal_),
    "trunc_normal_": initialised(nn.init.trunc_normal_),
    "orthogonal_": initialised(nn.init.orthogonal_),
    "init.normal_": initialised(nn.init.normal_),
    "init.uniform_": initialised(nn.init.uniform_),
}


@pytest.mark.parametrize("name", PICKING)
def test_matrices(name):
    """Ops that need a matrix: choices, initial weights, attention with dropout."""
    exact = name not in ("attention", "orthogonal_")  # their products are summed in another order
    want = drawn(PICKING[name], (12, 10), (1,), (R, R))[0]
    for mesh_shape in MESHES[1:]:
        for placings in PLACINGS:
            for got in drawn(PICKING[name], (12, 10), mesh_shape, placings):
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-6), (mesh_shape, placings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    """All dtypes, also integers, and those with few values."""
    draws = [fill("random_"), fill("bernoulli_", 0.5)]
    draws += [fill("normal_"), fill("uniform_")] if dtype.is_floating_point else []
    for draw in draws:
        want = drawn(draw, (70, 90), (1,), (R, R), dtype)[0]
        assert want[0].dtype == dtype
        for got in drawn(draw, (70, 90), (2, 2), (S0, S1), dtype):
            assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("name", ["uniform_", "normal_", "bernoulli_", "random_ between", "dropout", "randn_like"])
def test_so_do_the_generators_of_other_devices(name, monkeypatch):
    """torch's CPU generator takes the place of the device's, with small tiles."""

    class Device(random._Device):
        least = most = 64

    monkeypatch.setattr(random, "_source", Device)
    for shape in ((9, 5), (30, 40)):
        want = drawn(OPS[name], shape, (1,), (R, R))[0]
        for mesh_shape in ((4,), (2, 2)):
            for got in drawn(OPS[name], shape, mesh_shape, (S0, S1)):
                assert all(map(torch.equal, got, want))


def test_each_op_that_draws_is_asked():
    """All ops that torch tags as random were run. The others have no kernel here, or are refused."""
    seen = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(op)
            return op(*args, **(kwargs or {}))

    x = torch.rand(12, 10)
    with Seen():
        for draw in (*OPS.values(), *PICKING.values()):
            draw(x.clone())
    names = {str(op).split(".")[1].rstrip("_") for op in seen}
    asked = {str(op).split(".")[1].rstrip("_") for op in (*RANDOM_FILLS, *random_decompositions)}
    # normal_functional replaces normal_ in a program; the last ones make plain tensors, or are drawn in programs
    elsewhere = {"normal_functional", "rrelu_with_noise_functional", "rrelu_with_noise_backward"}
    assert asked - names - elsewhere <= {"rand", "randn", "randint", "randperm"}


# ---- distributions ----------------------------------------------------------------------------


def alone(seed=0):
    """A mesh of one rank, without threads."""
    spmd.manual_seed(seed)
    return DeviceMesh("cpu", [0])


def kolmogorov(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance between two empirical distributions."""
    both = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


DISTRIBUTIONS = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(3, 2),
    "normal_ of half precision": lambda x: x.half().normal_(3, 2),
    "exponential_": lambda x: x.exponential_(0.5),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(0, 0.5),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(0, 50),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "normal": lambda x: torch.normal(torch.full_like(x, 3.0), torch.full_like(x, 2.0)),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4.0)),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9.0), torch.full_like(x, 0.4)),
    "dropout2d": lambda x: F.dropout2d(torch.ones_like(x)[:, :, None, None], 0.4),
    "rrelu": lambda x: F.rrelu(torch.full_like(x, -1.0), 0.1, 0.4, True),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.4),
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones_like(x), 0.4, True),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x) + (x * 0).cumsum(-1).add(1).cumsum(-1), 1) * 1.0,
    "multinomial put back": lambda x: torch.multinomial((x * 0 + 1).cumsum(-1), 4, True) * 1.0,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_torchs(name):
    """Mean and variance, and the distribution by the Kolmogorov-Smirnov test, against torch's own."""
    draw = DISTRIBUTIONS[name]
    shape = (40000, 5) if "multinomial" in name else (400, 500)
    torch.manual_seed(0)
    want = draw(torch.zeros(shape)).flatten().double().numpy()
    got = draw(spmd.zeros(shape, device_mesh=alone())).full_tensor().flatten().double().numpy()
    assert kolmogorov(got, want) < 2.2 * math.sqrt(2 / min(len(got), len(want)))  # one in 10 000
    if name != "cauchy_":  # which has no mean
        error = math.sqrt(want.var() / len(want))
        assert abs(got.mean() - want.mean()) < 6 * error and abs(got.var() / want.var() - 1) < 0.05


WORDS = {
    "uniform_": (aten.uniform_.default, (-1.0, 2.0), lambda x: (x + 1) / 3),
    "normal_": (aten.normal_.default, (3.0, 2.0), lambda x: torch.special.ndtr((x - 3) / 2)),
    "exponential_": (aten.exponential_.default, (0.5,), lambda x: -torch.expm1(-x / 2)),
    "cauchy_": (aten.cauchy_.default, (1.0, 2.0), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
    "log_normal_": (aten.log_normal_.default, (0.5, 2.0), lambda x: torch.special.ndtr((x.log() - 0.5) / 2)),
}
"""Ops whose numbers are made from words, and their distribution functions, which make them uniform again."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_numbers_formula_words(name, dtype):
    """Chi-squared in 1000 cells and in tails of a 10,000th. All numbers, of the extreme words too, are in bounds."""
    op, args, to_uniform = WORDS[name]
    formula = word_formula(op, dtype, *args)
    word = np.uint64 if formula.wide else np.uint32
    drawn = formula.make(np.random.SFC64(1).random_raw(1_000_000).astype(word))
    assert drawn.dtype == np.float64 or dtype == torch.float32
    places = to_uniform(torch.from_numpy(drawn).to(dtype).double())
    for cells in (torch.linspace(0, 1, 1001), torch.tensor([0, 1e-4, 0.5, 1 - 1e-4, 1])):
        expected = cells.double().diff() * len(drawn)
        found = torch.histogram(places, cells.double())[0]
        free = len(expected) - 1
        assert ((found - expected) ** 2 / expected).sum() < free + 4 * math.sqrt(2 * free) + 8
    edges = np.array([0, 1, 2**7, 2**31 - 1, 2**31, 2**32 - 1], np.uint64)
    ends = formula.make((edges if not formula.wide else np.append(edges, np.uint64(2**64 - 1))).astype(word))
    places = to_uniform(torch.from_numpy(ends).double())
    assert np.isfinite(ends).all() and places.min() >= 0 and places.max() <= 1
    excluded = {"normal_": 3, "exponential_": 0, "log_normal_": 0}
    assert name not in excluded or (ends != excluded[name]).all()


@pytest.mark.parametrize("low, end", [(0, 1), (-3, 1000), (0, 2**16), (0, 2**16 + 1), (5, 5 + 2**32)])
def test_whole_numbers_of_words(low, end):
    """Each integer gets an equal number of words, in order, and all words are used."""
    formula = word_formula(getattr(aten.random_, "from"), torch.int64, low, end)
    n, all_words = end - low, 2**64 if formula.wide else 2**32
    assert n <= all_words >> 16
    firsts = [-(-k * all_words // n) for k in {0, 1, n // 2, n - 1} if k < n]  # the first word of the k-th number
    words = [w for first in firsts for w in (first, max(first - 1, 0))] + [all_words - 1]
    drawn = formula.make(np.array(words, np.uint64 if formula.wide else np.uint32))
    assert drawn.tolist() == [low + w * n // all_words for w in words]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_geometric_numbers_of_words(p):
    """The frequencies of the first numbers are right, to a ten thousandth of all."""
    formula = word_formula(aten.geometric_.default, torch.float32, p)
    drawn = formula.make(np.random.SFC64(2).random_raw(1_000_000).astype(np.uint32))
    assert drawn.min() == 1
    for k in range(1, 9):
        chance = p * (1 - p) ** (k - 1)
        assert abs((drawn == k).mean() - chance) < 4.5 * math.sqrt(chance / 1e6)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1e-4, 2**-12, 0.3, 0.5, 1 - 1e-4, 1.0])
def test_yes_or_no_of_words(p):
    """The share of the words below the bound is p, to a millionth of p and of 1 - p."""
    formula = word_formula(aten.bernoulli_.float, torch.bool, p)
    word, words = (np.uint64, 2**64) if formula.wide else (np.uint32, 2**32)
    low, high = 0, words  # the bound is between them
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if formula.make(np.array([middle], word))[0] else (low, middle)
    assert abs(Fraction(low, words) - Fraction(p)) <= Fraction(1, 10**6) * min(Fraction(p), 1 - Fraction(p))


def test_numbers_do_not_repeat():
    """Two draws, two shards, two tiles and two seeds give different and unrelated numbers."""
    mesh = alone(0)
    found = [spmd.randn(256, 256, device_mesh=mesh).to_local() for _ in range(2)]
    spmd.manual_seed(1)
    found.append(spmd.randn(256, 256, device_mesh=mesh).to_local())
    tiles = [t[i : i + 64, j : j + 64].flatten() for t in found for i in range(0, 256, 64) for j in range(0, 256, 64)]
    related = torch.corrcoef(torch.stack(tiles)) - torch.eye(len(tiles))
    assert related.abs().max() < 0.1


def test_multinomial_takes_each_once_and_none_of_rate_zero():
    mesh = alone()
    rates = spmd.distribute_tensor(torch.tensor([[0.0, 1, 2, 3, 0, 1]]).repeat(500, 1), mesh)
    picked = torch.multinomial(rates, 4).to_local()
    assert picked.dtype == torch.int64 and all(sorted(row) == [1, 2, 3, 5] for row in picked.tolist())
    assert set(torch.multinomial(rates, 50, True).to_local().flatten().tolist()) == {1, 2, 3, 5}
    with pytest.raises(RuntimeError, match="cannot draw 7 of 6 without putting back"):
        torch.multinomial(rates, 7)


# ---- Partial ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "avg", "max"])
def test_of_a_partial_as_of_its_value(kind):
    """A mask is applied to the reduced tensor, once. A fill replaces the value of the Partial."""

    def rank(mesh):
        spmd.manual_seed(4)
        half = torch.full((6, 5), 0.25 if kind == "sum" else 0.5)
        if mesh.size() > 1:
            x = DTensor.from_local(half, mesh, [Partial(kind), R])
        else:
            x = spmd.full((6, 5), 0.5, device_mesh=mesh)
        outs = [F.dropout(x, 0.5), torch.bernoulli(x), torch.normal(x, x), torch.rand_like(x), x.clone().normal_()]
        return [o.full_tensor() for o in outs]

    want = on_ranks(rank, (1,))[0]
    for got in on_ranks(rank, (2, 2)):
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


# ---- the state --------------------------------------------------------------------------------


def test_seed_and_state():
    """A seed and a state reproduce the numbers. Draws advance the state, draws of plain tensors do not."""
    mesh = alone(5)
    assert spmd.get_rng_state() == {"seed": 5, "drawn": 0}
    a = spmd.rand(3, 4, device_mesh=mesh)
    torch.rand(5)
    state = spmd.get_rng_state()
    assert state == {"seed": 5, "drawn": 1}
    b = F.dropout(a, 0.5)
    spmd.set_rng_state(state)
    assert torch.equal(F.dropout(a, 0.5).to_local(), b.to_local())
    spmd.manual_seed(5)
    assert torch.equal(spmd.rand(3, 4, device_mesh=mesh).to_local(), a.to_local())
    assert not torch.equal(spmd.rand(3, 4, device_mesh=mesh).to_local(), a.to_local())


def test_torchs_own_numbers_are_left_alone():
    """All of torch's state from which plain tensors draw; the seed that it keeps besides is marked."""
    torch.manual_seed(6)
    torch.randn(3)
    before = torch.get_rng_state()
    want = torch.randn(1000)
    torch.set_rng_state(before)
    F.dropout(spmd.randn(200, 200, device_mesh=alone()), 0.5)
    assert torch.equal(torch.get_rng_state()[8:], before[8:])
    assert torch.equal(torch.randn(1000), want)


def test_without_a_seed_torchs_is_taken():
    """The seed is that of the mesh's first rank, whatever seeds the others have."""

    def rank(number):
        spmd.set_rng_state(None)
        assert spmd.get_rng_state() is None
        mesh = init_device_mesh("cpu", (4,))
        return spmd.rand(8, device_mesh=mesh, placements=[S0]).full_tensor(), spmd.get_rng_state()

    torch.manual_seed(11)
    found = run_ranks(rank, 4)
    assert all(torch.equal(x, found[0][0]) and state == {"seed": 11, "drawn": 1} for x, state in found)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: spmd.manual_seed(1.5), TypeError, "manual_seed: 1.5 must be an int"),
        (lambda: spmd.manual_seed(2**64), ValueError, "does not fit into 64 bits"),
        (lambda: spmd.set_rng_state(torch.get_rng_state()), TypeError, "give what get_rng_state"),
        (lambda: spmd.rand(2, 3), TypeError, "rand: device_mesh is None; give the mesh"),
        (lambda: spmd.zeros(2, -3, device_mesh=alone()), ValueError, r"size \(2, -3\) must be ints"),
        (lambda: spmd.ones(2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Partial()]), ValueError,
         "would be Partial"),
        (lambda: spmd.ones(2, device_mesh=alone(), layout=torch.sparse_coo), NotImplementedError, "is strided"),
        (lambda: spmd.ones(2, device_mesh=DeviceMesh("cpu", [1, 2])), RuntimeError, "rank 0 is not in"),
    ],
)  # fmt: skip
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_simulated_ranks_have_states_of_their_own():
    """They start from the state of the caller, and do not change it."""
    spmd.manual_seed(9)

    def rank(number):
        mesh = init_device_mesh("cpu", (2,))
        before = spmd.get_rng_state()
        spmd.rand(4, device_mesh=mesh)
        return before, spmd.get_rng_state()

    assert run_ranks(rank, 2) == [({"seed": 9, "drawn": 0}, {"seed": 9, "drawn": 1})] * 2
    assert spmd.get_rng_state() == {"seed": 9, "drawn": 0}


def test_a_generator_is_a_stream_of_its_own():
    """Its state determines the numbers, and is advanced. The seed of spmd does not matter."""

    def rank(mesh):
        g = torch.Generator().manual_seed(3)
        spmd.manual_seed(mesh.size())
        x = spmd.zeros(9, 7, device_mesh=mesh, placements=[S0, S1][: mesh.ndim])
        first = x.normal_(generator=g).full_tensor()
        state = g.get_state()
        outs = [torch.rand_like(x, generator=g), torch.bernoulli(x.abs().clamp_max(1), generator=g)]
        outs += [torch.poisson(x.abs(), generator=g), torch.multinomial(x.abs(), 2, generator=g)]
        g.set_state(state)
        again = torch.rand_like(x, generator=g)
        assert torch.equal(again.full_tensor(), outs[0].full_tensor())
        g.manual_seed(3)
        assert torch.equal(x.normal_(generator=g).full_tensor(), first)
        assert spmd.get_rng_state()["drawn"] == 0
        return [first, *(o.full_tensor() for o in outs)]

    want = on_ranks(rank, (1,))[0]
    for mesh_shape in ((4,), (2, 2)):
        for got in on_ranks(rank, mesh_shape):
            assert all(map(torch.equal, got, want))


# ---- three ways -------------------------------------------------------------------------------


def several_draws():
    mesh = init_device_mesh("cpu", (2, 2))
    spmd.manual_seed(2)
    x = spmd.randn(7, 5, device_mesh=mesh, placements=[S0, S1], requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        outs = [x, y, x.grad, torch.poisson(x.abs()), torch.multinomial(x.abs(), 2), x.clone().uniform_(generator=g)]
        outs += [x.clone().exponential_(generator=g), torch.bernoulli(x.sigmoid()), spmd.rand(3, device_mesh=mesh)]
    return [o.full_tensor() for o in outs], outs[0], spmd.get_rng_state()


def on_a_mesh_of_one():
    mesh = alone(2)
    x = spmd.randn(7, 5, device_mesh=mesh)
    return x.to_local()


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_draw_the_same(way, gloo4):
    """One thread for all ranks, a thread each, a process each."""
    found = run(way, gloo4, several_draws)
    want = run("threads", gloo4, several_draws)
    for rank in range(4):
        assert all(map(torch.equal, found[rank][0], want[0][0]))
        assert torch.equal(found[rank][1], want[rank][1]) and found[rank][2] == want[rank][2]
    assert torch.equal(found[0][0][0], on_a_mesh_of_one())


def test_a_tensor_from_outside_the_simulation_is_not_written_with_several_values():
    """A plain tensor is shared by all simulated ranks, so the last rank would overwrite the others."""
    local = torch.zeros(3, 4)
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        spmd.manual_seed(0)
        with pytest.raises(RuntimeError, match="localize"):
            DTensor.from_local(local, mesh, [S0]).uniform_()


# ---- dropout and its gradient -----------------------------------------------------------------


def test_the_backward_meets_the_mask_of_the_forward():
    def rank(mesh):
        spmd.manual_seed(1)
        x = spmd.ones(8, 6, device_mesh=mesh, placements=[S0, S1], requires_grad=True)
        y = F.dropout(x, 0.5)
        y.sum().backward()
        return torch.equal(x.grad.full_tensor(), y.detach().full_tensor())

    assert on_ranks(rank) == [True] * 4


def test_what_is_computed_again_draws_again():
    """Under activation checkpointing, with `context_fn=spmd.recompute` or torch's `preserve_rng_state`. Without either,
    an error and not a wrong number."""

    def rank(mesh):
        x = spmd.ones(8, 6, device_mesh=mesh, placements=[S0, S1], requires_grad=True)

        def block(x):
            return F.dropout(F.dropout(x, 0.5) * x, 0.2)

        spmd.manual_seed(1)
        plain = block(x).sum()
        plain.backward()
        want, x.grad, state = x.grad.full_tensor(), None, spmd.get_rng_state()
        for options in ({"context_fn": spmd.recompute}, {}, {"use_reentrant": True}):
            for seed in (spmd.manual_seed, torch.manual_seed):
                seed(1)
                x.grad = None
                checkpoint(block, x, **{"use_reentrant": False} | options).sum().backward()
                assert torch.equal(x.grad.full_tensor(), want) and spmd.get_rng_state() == state, options
        with pytest.raises(RuntimeError, match=r"context_fn=spmd\.recompute"):
            checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        return True

    assert on_ranks(rank) == [True] * 4


def test_fused_attention_with_dropout_says_what_to_do():
    mesh = alone()
    q = spmd.rand(1, 2, 3, 4, device_mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"SDPBackend\.MATH"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)


# ---- memory and tiles -------------------------------------------------------------------------


def test_no_rank_makes_the_global_tensor():
    """Each of 4096 ranks makes its block of 4 MiB and a tile. The global tensor would have 16 GiB."""
    ranks, side = 4096, 1 << 16
    mesh = DeviceMesh("cpu", list(range(ranks)))
    spmd.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with as_rank(77, ranks):
        for placement in (S0, S1):
            x = spmd.randn(side, side, device_mesh=mesh, placements=[placement]).to_local()
            assert x.numel() == side * side // ranks and 0.99 < x.std() < 1.01
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def numbered(shape, sides, blocks):
    """For each element the number of its tile, from 1, assembled like a block of random numbers."""
    block = torch.zeros([length for _, length in blocks], dtype=torch.int64)
    for inside, dim, tiles in random.bands(shape, sides, blocks, 40000):
        block[inside or ...] += torch.cat([torch.full(t.size, t.number + 1)[t.kept or ...] for t in tiles], dim)
    return block


@pytest.mark.parametrize("shape", [(5,), (70000,), (300, 400), (3, 5, 90, 90), (1, 1, 20000), (64, 64, 3, 3), (0, 4)])
def test_tiles_cover_each_block_once(shape):
    sides = random.tile_of(shape, 4096, 16384)
    assert math.prod(sides) <= 16384
    whole = numbered(shape, sides, [(0, n) for n in shape])
    blocks = [(n // 3, n - n // 3) for n in shape]
    assert torch.equal(numbered(shape, sides, blocks), whole[tuple(slice(a, a + n) for a, n in blocks)])
    sizes = whole.flatten().unique(return_counts=True)[1]
    assert not whole.numel() or (whole.min() == 1 and sizes.max() <= 16384)


def test_the_numbers_of_this_version():
    """A seed must keep giving the same numbers, because users repeat trainings with it."""
    mesh = alone(0)
    drawn = [spmd.rand(3, device_mesh=mesh), spmd.randn(2, device_mesh=mesh), spmd.zeros(2, device_mesh=mesh).cauchy_()]
    assert [round(v, 4) for x in drawn for v in x.to_local().tolist()] == [
        0.7139, 0.7152, 0.6024, 0.4456, -1.0866, -0.489, -1.6219
    ]


# ---- factories --------------------------------------------------------------------------------


def test_factories():
    """The names and arguments of torch.distributed.tensor, sizes in any form. Each rank makes its block."""

    def rank(mesh):
        made = {
            "zeros": spmd.zeros(7, 5, device_mesh=mesh, placements=[S0, S1]),
            "ones": spmd.ones((7, 5), dtype=torch.int32, device_mesh=mesh, placements=[S1, R]),
            "full": spmd.full((7, 5), 3, device_mesh=mesh, placements=[S0, S0]),
            "empty": spmd.empty([7, 5], dtype=torch.float64, device_mesh=mesh).fill_(2),
            "scalar": spmd.full((), 2.5, device_mesh=mesh, requires_grad=True),
        }
        assert made["scalar"].requires_grad and made["scalar"].is_leaf
        assert spmd.rand(4, device_mesh=mesh, requires_grad=True).is_leaf
        assert tuple(made["zeros"].to_local().shape) == made["zeros"]._spec.local_shape_here()
        return {name: x.detach().full_tensor() for name, x in made.items()}

    for found in on_ranks(rank):
        assert torch.equal(found["zeros"], torch.zeros(7, 5))
        assert torch.equal(found["ones"], torch.ones(7, 5, dtype=torch.int32))
        assert torch.equal(found["full"], torch.full((7, 5), 3)) and found["full"].dtype == torch.int64
        assert torch.equal(found["empty"], torch.full((7, 5), 2.0, dtype=torch.float64))
        assert found["scalar"] == 2.5


def test_a_model_is_initialised_alike_on_any_mesh():
    """`reset_parameters` of distributed modules, as each layer defines it."""

    def rank(mesh):
        spmd.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3))
        placings = [S0, S1, S0, S1]
        for layer, p in zip(model, placings, strict=True):
            for name, w in list(layer.named_parameters(recurse=False)):
                placed = spmd.empty(w.shape, device_mesh=mesh, placements=fits([p, S0], w.shape)[: mesh.ndim])
                setattr(layer, name, nn.Parameter(placed))
            layer.reset_parameters()
        return [w.detach().full_tensor() for w in model.parameters()]

    want = on_ranks(rank, (1,))[0]
    for mesh_shape in MESHES[1:]:
        for got in on_ranks(rank, mesh_shape):
            assert all(map(torch.equal, got, want))
