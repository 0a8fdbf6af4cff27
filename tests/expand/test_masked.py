"""`x[mask]` in a compiled step is what it is on one device, as far as it is used for something that has a size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.test_sizes import on_ranks, tensor


def written(x, mask):
    y, z = x * 3, torch.arange(x.shape[0])
    y[mask] = (x * x)[mask]
    y[mask] -= 1
    y[~mask] *= 0.5
    z[mask] = -z[mask] // 2
    return y, z


def safely(x, mask):
    """Of what does not count no infinity comes back as a gradient: log(0) and 1 / 0."""
    x = torch.where(mask[:, None], x.abs() + 0.1, 0).requires_grad_()
    loss = x[mask].log().sum() + (1 / x[mask]).mean()
    return torch.autograd.grad(loss, x)[0]


def classes(x, mask):
    y, weight = x.argmax(1), torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=x.dtype)
    each = F.cross_entropy(x[mask], y[mask], reduction="none")
    smooth = nn.CrossEntropyLoss(weight, label_smoothing=0.1)(x[mask], y[mask])
    return F.cross_entropy(x[mask], y[mask]), each.sum(), smooth, (x[mask].argmax(dim=1) == y[mask]).sum()


def of_rows(x, mask):
    layer = torch.linspace(-1, 1, 12, dtype=x.dtype).view(3, 4)
    h = F.gelu(F.linear(x[mask], layer, layer[:, 0]))
    return (h.softmax(-1) * F.log_softmax(h, dim=-1)).sum(-1).mean(), h.sum(0), h.mean(dim=0), torch.sum(h)


def of_words(x, mask):
    """A mask of words in sentences."""
    words, logits = x > 0.3, torch.stack([x, -x, x * x], -1)
    y = (x.abs() * 2).long() % 3
    return F.cross_entropy(logits[words], y[words]), logits[words].sum(0), logits[words].mean()


USES = {
    "a sum": lambda x, mask: x[mask].sum(),
    "means": lambda x, mask: (x[x > 0.5].mean(), x[mask].square().mean(), torch.mean(x[mask] * 2 - 1)),
    "numbers": lambda x, mask: (1 - x[mask] ** 2 / 3).clamp(min=0).sum() + (2.0 * -x[mask]).sum(),
    "what all rows share": lambda x, mask: (x[0] * x[mask]).sum() + (x[mask] - x.mean(0)).square().mean(0),
    "writes": written,
    "gradients": safely,
    "classes": classes,
    "rows": of_rows,
    "losses": lambda x, mask: [f(x[mask], x.flip(1)[mask]) for f in (F.mse_loss, nn.SmoothL1Loss(), nn.HuberLoss())],
    "bits": lambda x, mask: nn.BCEWithLogitsLoss()(x[mask], (x > 0).to(x.dtype)[mask]),
    "a mask of two dims": of_words,
    "nothing": lambda x, mask: (x[x > 99].sum(), x[x > 99].mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_what_counts_is_that_of_one_device(name):
    """For batches of several sizes, by one capture."""
    given = [(tensor(n, 4), tensor(n, 4).sin()[:, 1] > 0.2) for n in (8, 5, 3)]
    found, captured = on_ranks(
        USES[name], given, inputs={"x": {"dp": Shard(0)}, "mask": {"dp": Shard(0)}}, mesh_shape=(4, 1)
    )
    torch.testing.assert_close(found, [USES[name](*args) for args in given], rtol=1e-12, atol=1e-12, equal_nan=True)
    assert captured == 1


class Keeps(nn.Module):
    def forward(self, x, mask):
        self.kept = x[mask]
        return x


KEEPS = Keeps()

REFUSED = {
    "a result in a dict": lambda x, mask: {"x": [x[mask] * 2]},
    "an attribute": lambda x, mask: KEEPS(x, mask),
    "a result": lambda x, mask: x[mask],
    "its length": lambda x, mask: x.sum() / len(x[mask]),
    "its shape": lambda x, mask: x.sum() / x[mask].shape[0],
    "several": lambda x, mask: torch.cat([x[mask], x[mask]]).sum(),
    "other masks": lambda x, mask: (x[mask] * x[~mask]).sum(),
    "as many rows": lambda x, mask: (x[mask] * x).sum(),
    "a row": lambda x, mask: x[mask][0],
    "an order": lambda x, mask: x[mask].sort().values.sum(),
    "a write of another size": lambda x, mask: x.clone().__setitem__(mask, x[~mask]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_size_is_an_error(name):
    x = tensor(8, 4)
    with LocalTensorMode(4), pytest.raises(NotImplementedError, match=r"use torch.where(.|\n)*test_masked.py:\d+"):
        step = spmd.compile(REFUSED[name], spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        step(x, x[:, 0] > 0)


def test_a_step_trains_on_the_nodes_of_a_mask():
    """As graph nets are trained: the loss of the nodes that are for training, and how many others are right."""

    def step(model, optimizer, x, y, mask):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out[mask], y[mask])
        loss.backward()
        optimizer.step()
        others = ~mask
        return loss.detach(), (out[others].argmax(1) == y[others]).sum()

    def train(prepare):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, dtype=torch.float64)
        optimizer, run, losses = torch.optim.Adam(model.parameters(), lr=0.1), prepare(step), []
        for n in (8, 7, 8):
            x = tensor(n, 4).cos()
            losses += run(model, optimizer, x, torch.arange(n) % 3, x[:, 0] > 0)
        return [x.full_tensor().reconcile() if isinstance(x, spmd.DTensor) else x for x in losses]

    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        got = train(lambda fn: spmd.compile(fn, mesh, inputs={"x": {"dp": Shard(0)}}, fully_shard="dp"))
    torch.testing.assert_close(got, train(lambda fn: fn), rtol=1e-12, atol=1e-12)
