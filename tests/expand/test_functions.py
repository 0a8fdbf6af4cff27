"""Functions other than train steps give the same results on a mesh as on one device."""

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import Shard
from spmd.sim import run_ranks

g = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(3, heads, 5, 4, generator=g) for heads in (6, 2, 2))
MASK2, MASK4 = torch.randn(5, 5, generator=g), torch.randn(3, 1, 5, 5, generator=g)
X = torch.randn(6, 4, generator=g)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("masked", [None, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_with_and_without_masks(grouped, causal, masked, shape):
    """Heads over one axis, the batch over the other; fewer heads of keys than of queries."""
    if causal and masked:
        pytest.skip("torch takes a mask or is_causal, not both")

    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    k, v = (K, V) if grouped else (Q.roll(1, 0), Q.flip(2))
    mask = {None: None, 2: MASK2, 4: MASK4}[masked]
    placed = {"q": {"a": Shard(0), "b": Shard(1)}, "k": {"a": Shard(0)}, "v": {"b": Shard(1)}}
    check(attend, shape, placed, Q, k, v, mask)


STRIDES = {
    "transposed, summed up, flattened": lambda x: (x.t() * 1.0).cumsum(0).t().reshape(-1),
    "transposed, sorted": lambda x: x.t().sort(1)[0].t().reshape(-1),
    "transposed, flipped, viewed": lambda x: x.t().flip(0).t().contiguous().view(2, -1),
    "transposed, normed": lambda x: F.batch_norm(x.t(), None, None, training=True).t().reshape(-1),
    "softmax over either dim": lambda x: (x.softmax(0) @ x.t().softmax(0)).reshape(4, -1),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", STRIDES)
def test_views_after_moves(name, placement):
    """A move makes blocks contiguous, even if the tensor on one device has other strides."""
    check(STRIDES[name], (3, 1), {"x": {"a": placement}}, X)


def test_reading_memory_is_refused():
    with pytest.raises(NotImplementedError, match=r"strides of a distributed tensor(.|\n)* at .*test_functions.py:\d+"):
        check(lambda x: x.as_strided((2, 2), (1, 2)), (2, 1), {"x": {"a": Shard(0)}}, X)


def check(fn, shape, placed, *args):
    want = fn(*args)

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        return spmd.compile(fn, mesh, inputs=placed)(*args).full_tensor()

    for got in run_ranks(rank, torch.Size(shape).numel()):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


LOGITS = torch.randn(7, 4, 5, generator=g)
TARGETS = torch.tensor([[1, 2, 3], [2, 2, 0], [4, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ctc_loss_and_its_gradient(dim, reduction):
    """Sequences, steps or classes over an axis: three ranks for four sequences, one of which has no target."""

    def fn(x, targets):
        x = x.detach().requires_grad_()
        loss = F.ctc_loss(x.log_softmax(-1), targets, (7, 6, 2, 7), (3, 2, 0, 3), 0, reduction, True)
        (found,) = torch.autograd.grad(loss.sum(), x)
        return torch.cat([found.flatten(), loss.flatten()])

    check(fn, (3, 1), {"x": {"a": Shard(dim)}}, LOGITS, TARGETS)


LENGTHS = torch.tensor([7, 6, 2, 7]), torch.tensor([3, 2, 0, 3])
LISTED = torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS[1].tolist(), strict=True)])
CTC = {
    "arguments": lambda x, *given: F.ctc_loss(x, *given, zero_infinity=True),
    "arguments, for a list of targets": lambda x, *given: F.ctc_loss(x, *given, zero_infinity=True),
    "made in the step": lambda x, t, *_: F.ctc_loss(x, t, torch.full((4,), 7), torch.tensor([3, 2, 1, 3]), 4, "sum"),
    "no batch": lambda x, t, *_: F.ctc_loss(x[:, 0], t[0], torch.tensor(7), torch.tensor(3)),
    "a module": lambda x, t, *given: torch.nn.CTCLoss(0, "none", True)(x, t.int(), *[n.int() for n in given]),
}


@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("name", CTC)
def test_ctc_losses_with_lengths_in_tensors(name, dim):
    def fn(x, targets, listed, *lengths):
        x = x.detach().requires_grad_()
        given = listed if "list" in name else targets
        loss = CTC[name](x.log_softmax(-1), given, *lengths).nan_to_num(0, 0, 0)
        (found,) = torch.autograd.grad(loss.sum(), x)
        return torch.cat([found.flatten(), loss.flatten()])

    placed = {"x": {"a": Shard(dim)}, "targets": {"a": Shard(0)}} if dim is not None else {"targets": {"a": Shard(0)}}
    check(fn, (3, 1), placed, LOGITS, TARGETS, LISTED, *LENGTHS)


def test_nothing_is_computed_while_a_step_is_expanded():
    """Nor is memory taken: the values of this step have 2 to 512 GB each."""
    x, y = (torch.zeros(1).expand(1 << 17, 1 << n) for n in (12, 20))

    def step(x, y):
        x = x.detach().requires_grad_()
        loss = ((x.t() @ y).relu() * 2).sum() + (y[:, : 1 << 12] * x).exp().sum()
        return torch.autograd.grad(loss, x)[0]

    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    program = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}).program_for(x, y)
    assert max(c.nbytes for c in program.collectives) == 1 << 34


DIAGONALS = {
    "filled": lambda x: (x * 1).fill_diagonal_(-1e9),
    "filled, and read": lambda x: (x @ x.T).fill_diagonal_(float("-inf")).softmax(1),
    "filled and wrapped": lambda x: x[:, :2].clone().fill_diagonal_(3, wrap=True),
    "of three dims": lambda x: torch.stack([x[:3, :3]] * 3).fill_diagonal_(0.5),
    "of bools": lambda x: torch.where(torch.ones(6, 4, dtype=torch.bool).fill_diagonal_(False), x, -x),
    "of a view": lambda x: (y := x * 1, y.T[1:].fill_diagonal_(2), y[2:].sin_(), y)[-1],
    "in inference mode": lambda x: torch.inference_mode()(lambda: (x * 1).fill_diagonal_(7))(),
    "written": lambda x: (y := x * 1, y.diagonal(1).mul_(3), torch.diagonal(y).fill_(2), y)[-1],
    "copied": lambda x: (y := x * 1, y.diagonal(-1).copy_(x[0]), y)[-1],
    "masked": lambda x: (x * 1).masked_fill_(torch.eye(6, 4, dtype=torch.bool), -1.0),
    "embedded": lambda x: torch.diag_embed(x, 1, 0, 2).sum(1),
    "triangles": lambda x: (x * 1).tril_(-1) + (x * 2).triu_(),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_and_their_gradients(name, placement):
    """Six rows on four ranks, one of which has none; four columns."""

    def fn(x):
        x = x.detach().requires_grad_()
        out = DIAGONALS[name](x)
        return torch.autograd.grad(out.nan_to_num(0, 0, 0).square().sum(), x)[0] if out.requires_grad else out

    check(fn, (4, 1), {"x": {"a": placement}}, X)
    check(DIAGONALS[name], (4, 1), {"x": {"a": placement}}, X)


OUTS = {
    "a sum into bools": lambda x: torch.sum(torch.stack([x, -x]), 0, out=torch.empty(6, 4, dtype=torch.bool)),
    "a product into floats": lambda x: torch.prod(x.int(), 0, out=torch.empty(4, dtype=torch.float64)),
    "a sum into another dtype": lambda x: torch.add(x, 1, out=torch.empty(6, 4, dtype=torch.float64)),
    "a view": lambda x: (y := x * 1, torch.exp(x[:2], out=y[4:]), y)[-1],
    "a product of matrices": lambda x: torch.matmul(x, x.T, out=x.new_empty(6, 6)),
    "what is empty": lambda x: torch.cat([x, x], out=x.new_empty(0)),
    "several": lambda x: torch.cat(torch.max(x, 1, out=(x.new_empty(6), torch.empty(6, dtype=torch.long)))),
    "bits as integers": lambda x: x.view(torch.int32) + 1,
    "bits as half as many": lambda x: (x.double().view(torch.int32) >> 1)[:, ::2],
    "draws with a chance of 0": lambda x: (x * 1).bernoulli_(0.0) + x,
}


@pytest.mark.parametrize("name", OUTS)
def test_results_in_given_memory(name):
    check(OUTS[name], (3, 1), {"x": {"a": Shard(0)}}, X)


def test_an_out_of_another_size_is_refused():
    """What shares its memory would keep the old one, and the graph does not know what does."""
    step = spmd.compile(lambda x: torch.cat([x, x], out=x.clone()), spmd.DeviceMesh("cpu", [0, 1]))
    with pytest.raises(NotImplementedError, match=r"cat.*would get new memory(.|\n)*test_functions.py"):
        step.program_for(X)
