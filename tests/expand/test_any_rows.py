"""Any legal choice of rows gives the numbers of one device.

The lowering picks the cheapest row of a rule for each axis. Which row is cheapest depends on sizes and links, so a
wrong row may stay unnoticed for years. Here the row is chosen at random among the legal ones, the same on all ranks. A
complete train step must still be right. This tests the rows, the moves between any two of them, and the expander.
"""

import contextlib
import random
import threading
import zlib
from unittest import mock

import pytest
import torch
from torch import nn, optim

import spmd.expand.expand as expand_module
import spmd.expand.lowered as lowered_module
import spmd.tensor.lower as lower_module
from spmd import Shard
from tests.expand.side_by_side import GPT_PLAN, Case, Net, gpt, rows, tokens
from tests.expand.test_train import Normed, clipping_step, penalty_step


@contextlib.contextmanager
def random_rows(seed: int):
    """Inside, programs are expanded with legal rows chosen at random. The choice depends on the call and the seed."""
    real_rows, real_lower = lower_module._cheapest_rows, lower_module.lower
    here = threading.local()

    def choose(call, rule, options, in_place):
        if not getattr(here, "random", False):
            return real_rows(call, rule, options, in_place)
        text = f"{seed} {call.op} {call.args} {call.kwargs} {rule}"
        rng = random.Random(zlib.crc32(text.encode()))
        choice = [options[0]] * call.mesh.ndim
        for axis in rng.sample(range(call.mesh.ndim), call.mesh.ndim):
            legal = [row for row in options if lower_module._is_legal(call, rule, choice, axis, row)]
            choice[axis] = rng.choice(legal)
        return choice

    def lower(call, **how):
        here.random = True
        try:
            return real_lower(call, **how)
        finally:
            here.random = False

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(lower_module, "_cheapest_rows", choose))
        for module in (expand_module, lowered_module):
            patched.enter_context(mock.patch.object(module, "lower", lower))
        yield


class Zoo(nn.Module):
    """Ops of many families in one small network; images in, a few numbers out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.mixed = nn.Conv1d(4, 6, 1, bias=False)
        self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 4)
        self.table = nn.Embedding(5, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, y):
        x = torch.relu(self.conv(x)).flatten(2)  # [batch, 4, 12]
        x = self.mixed(x).transpose(1, 2)  # [batch, 12, 6]
        x = torch.cat([x[:, :5], self.table(y)[:, None], x[:, 6:].roll(1, 1)], 1)
        x = nn.functional.rms_norm(x, (6,), self.scale) + x.flip(1).cumsum(1) / 12
        scores = torch.einsum("bic,bjc->bij", self.q(x), self.k(x))
        scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -1e9).softmax(-1)
        x = scores @ x
        a, b = x.chunk(2, -1)
        x = torch.stack([a.tanh(), b.sigmoid(), torch.where(a > b, a, b * 0.5)], 2)  # [batch, 12, 3, 3]
        picked = x.gather(3, (y % 3).view(-1, 1, 1, 1).expand(-1, 12, 3, 1)).squeeze(3)
        return picked.amax(1) + x.mean((1, 3)) + x.logsumexp(1).var(-1) + x.unbind(1)[2].clamp(-1, 1).prod(-1)


def zoo_step(model, optimizer, x, y):
    optimizer.zero_grad()
    out = model(x, y)
    target = torch.zeros_like(out).scatter(1, (y % 3)[:, None], 1.0)
    loss = nn.functional.mse_loss(out, target) + nn.functional.binary_cross_entropy_with_logits(out, target)
    loss = (
        loss + nn.functional.smooth_l1_loss(out, target, beta=0.3) + nn.functional.nll_loss(out.log_softmax(1), y % 3)
    )
    loss.backward()
    optimizer.step()
    order = out.argsort(1).float().mean(0)
    return loss, out.std(), order, out.new_ones(3).repeat(2), torch.linalg.vector_norm(out, 3, dim=0)


def images(batch, n=2):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(batch, 2, 3, 4, generator=g), torch.randint(0, 5, (batch,), generator=g)) for _ in range(n)]


ZOO = {"conv.weight": {"tp": Shard(0)}, "q.weight": {"tp": Shard(0)}}


pytestmark = pytest.mark.usefixtures("one_thread")


def sgd(params):
    return optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "shape, batch, layers, seed", [((2, 2), 4, 1, 0), ((2, 2), 3, 1, 1), ((3, 1), 4, 2, 2), ((3, 1), 2, 1, 3)]
)
def test_a_gpt_trains_by_any_rows(shape, batch, layers, seed):
    """Hundreds of moves between all kinds of placements, even, uneven and empty shards, and the same gradients."""
    model = lambda: gpt(n_layer=layers, tied=seed % 2 == 0, n_head=2)  # noqa: E731
    case = Case(model, sgd, batches=tokens(batch, n=1), params=GPT_PLAN)
    with random_rows(seed):
        moves = case.check(shape, probe=lambda step, *_: len(step.program.collectives), rtol=1e-3, atol=1e-4)
    assert moves > 100


@pytest.mark.parametrize("shape, seed", [((2, 2), 0), ((3, 1), 1)])
def test_a_zoo_of_ops_trains_by_any_rows(shape, seed):
    """Convolution, norms, losses, indexing, reductions, movement."""
    with random_rows(seed):
        Case(Zoo, sgd, zoo_step, images(5, n=1), ZOO).check(shape, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "step, model, seed", [(clipping_step, Net, 0), (penalty_step, Net, 1), (clipping_step, Normed, 2)]
)
def test_steps_of_many_kinds_train_by_any_rows(step, model, seed):
    """Gradient clipping, second derivatives, batch norm; the second call's program too."""
    plan = {"up.*": {"tp": Shard(0)}}
    with random_rows(seed):
        Case(model, sgd, step, rows(5, n=2), plan).check((2, 2), rtol=1e-3, atol=1e-4)
