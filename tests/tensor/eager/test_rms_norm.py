"""`rms_norm` is one op eagerly, with the numbers of one device, and sends no more than layer norm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard, distribute_tensor
from spmd.tensor.redistribute.plan import steps_made
from tests.tensor.single import S0, S1, S2, SUM, R, agree_at_once

X, W = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6, 8), (8,)))
PLACINGS = [[[S0, S1], [R, R]], [[S1, R], [R, R]], [[S2, S0], [R, S0]], [[SUM, S0], [R, R]], [[R, R], [S0, SUM]]]


def gradients(fn, *tensors):
    """The result, and its gradients, which can be differentiated again."""
    y = fn(*tensors)
    return y, *torch.autograd.grad((y * y.detach().cos()).sum(), tensors, create_graph=True)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2)])
def test_it_is_the_norm_of_one_device(mesh_shape):
    """Rows are sharded, unevenly and to none; or the normalised dim is; or terms are owed. Twice differentiated."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    agree_at_once(lambda x, w: gradients(lambda x, w: F.rms_norm(x, (8,), w), x, w), [x, w], *PLACINGS,
                  mesh_shape=mesh_shape)  # fmt: skip


@pytest.mark.parametrize("shape, eps", [((8,), 0.1), ((6, 8), None), ((5, 6, 8), None)])
def test_without_a_weight_and_over_several_dims(shape, eps):
    fn = lambda x: gradients(lambda x: F.rms_norm(x, shape, None, eps), x)  # noqa: E731
    agree_at_once(fn, [X.clone().requires_grad_()], [[S0, R]], [[R, S1]])


def test_low_precision_is_rounded_as_on_one_device():
    x, w = (t.bfloat16().requires_grad_() for t in (X, W))
    want = F.rms_norm(x, (8,), w)
    want.sum().backward()
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,))
        a, b = (distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in ((x, S0), (w, R)))
        y = F.rms_norm(a, (8,), b)
        y.sum().backward()
        assert torch.equal(y.full_tensor().reconcile(), want)
        for mine, alone in ((a, x), (b, w)):
            torch.testing.assert_close(mine.grad.full_tensor().reconcile(), alone.grad, rtol=0.03, atol=0.03)


class Layers(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList(norm(16) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.silu(up(norm(x))))
        return x


def test_an_eager_backward_sends_what_that_of_layer_norm_sends():
    sent = {}
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for norm in (nn.LayerNorm, nn.RMSNorm):
            model = spmd.distribute_module(
                Layers(norm), mesh, params={"up.*": {"tp": Shard(0)}, "down.*.weight": {"tp": Shard(1)}}
            )
            x = distribute_tensor(torch.randn(8, 6, 16), mesh, [Replicate()])
            with steps_made() as steps:
                model(x).pow(2).sum().backward()
            owed = [p for p in model.parameters() if any(q.is_partial() for q in p.grad.placements)]
            sent[norm] = sum(s.sends for s in steps), sum(s.before.nbytes for s in steps if s.sends), len(owed)
    assert all(rms <= layer for rms, layer in zip(sent[nn.RMSNorm], sent[nn.LayerNorm], strict=True)), sent
    assert sent[nn.RMSNorm][0] == 5  # one forward for each layer, and one backward for each but the first
