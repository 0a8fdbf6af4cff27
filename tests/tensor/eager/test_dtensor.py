"""A DTensor behaves as the global tensor: when it is made, read, copied, differentiated and trained."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from examples.gpt import GPT, GPTConfig, train_step
from spmd import DTensor, LocalTensorMode, distribute_tensor, explicit, implicit_replication, init_device_mesh
from spmd.cli.demo import INPUTS, PARAMS
from spmd.comm import all_reduce
from spmd.sim import ThreadWorld, run_ranks
from spmd.tensor.annotations.patterns import check_patterns, in_mesh_order, placements_for
from tests.tensor.oracle import close
from tests.tensor.single import AVG, MAX, S0, S1, SUM, R, agree, cut, leaf, mesh_of, on_ranks, same, weights

F64 = torch.float64


def numbers(*shape: int, dtype=F64) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=F64).reshape(shape).to(dtype)


# ---- distribute_tensor ------------------------------------------------------------------------

PLACED = [
    ((8, 4), [S0, R]), ((8, 4), [S0, S1]), ((8, 4), [S0, S0]), ((8, 4), [R, R]), ((5, 3), [S0, S0]), ((5, 3), [S1, S0]),
    ((1, 3), [S0, R]), ((0, 3), [S0, S1]), ((3, 0), [S0, S0]), ((), [R, R]), ((7,), [S0, R]),
]  # fmt: skip


@pytest.mark.parametrize("shape, placements", PLACED, ids=str)
def test_distribute_tensor_cuts_as_torch_chunk_does(shape, placements):
    """Even, uneven, empty and 0-dim; several axes shard one dim one after the other."""
    x = numbers(*shape)
    blocks = cut(x, placements, (2, 2))

    def rank(mesh):
        d = distribute_tensor(x, mesh, placements)
        return d.to_local(), blocks[mesh.get_coordinate()], d.full_tensor(), d.shape, d.placements

    for local, want, full, given_shape, given in on_ranks(rank):
        assert torch.equal(local, want) and torch.equal(full, x)
        assert given_shape == x.shape and given == tuple(placements)


SOURCES = {
    "a slice of something larger": numbers(8, 8)[::2, 1:7],
    "transposed": numbers(6, 4).t(),
    "expanded": numbers(1, 6).expand(4, 6),
    "integers": numbers(4, 6, dtype=torch.int64),
    "bools": numbers(4, 6) > 5,
    "bfloat16": numbers(4, 6, dtype=torch.bfloat16),
    "complex": torch.complex(numbers(4, 6), -numbers(4, 6)),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("placements", [[S0, S1], [R, R]], ids=str)
def test_distribute_tensor_takes_any_tensor_and_shares_no_memory_with_it(name, placements):
    """Strides and dtypes of all sorts; writing into the DTensor leaves the tensor alone."""
    source = SOURCES[name]
    kept = source.clone()

    def rank(mesh):
        d = distribute_tensor(source, mesh, placements, src_data_rank=None)
        full = d.full_tensor().clone()
        d.zero_()
        return full

    for full in on_ranks(rank):
        assert torch.equal(full, kept) and full.dtype == kept.dtype
    assert torch.equal(source, kept)


@pytest.mark.parametrize("src, holder", [(0, 0), (1, 3)])
def test_the_source_rank_along_each_axis_has_the_truth(src, holder):
    """The tensors of other ranks are not read: that of the rank at (src, src) is used."""
    x = numbers(5, 4)
    given = [x if r == holder else torch.full_like(x, -r - 1.0) for r in range(4)]

    def rank(mesh):
        return distribute_tensor(given[mesh.get_rank()], mesh, [S0, R], src_data_rank=src).full_tensor()

    assert all(torch.equal(full, x) for full in on_ranks(rank))


def test_without_a_source_nothing_is_sent():
    """src_data_rank=None takes every rank's own copy."""
    world = ThreadWorld(4)
    world.run(lambda rank: distribute_tensor(numbers(8, 4), mesh_of((2, 2)), [S0, S1], src_data_rank=None))
    assert world.calls == [[]] * 4


def test_distribute_tensor_makes_a_leaf():
    """The DTensor of a tensor that wants a gradient wants one too, and is a leaf."""
    x = numbers(4, 4).requires_grad_()

    def rank(mesh):
        d = distribute_tensor(x, mesh, [S0, R])
        (d * 2).sum().backward()
        return d.is_leaf, d.requires_grad, type(d.grad), d.grad.full_tensor()

    for leaf_, wants, kind, grad in on_ranks(rank):
        assert leaf_ and wants and kind is DTensor and torch.equal(grad, torch.full((4, 4), 2.0, dtype=F64))
    assert x.grad is None


def test_a_tensor_without_data_is_distributed_without_sending():
    """Tensors without data can be distributed, before there is memory for them."""

    def rank(mesh):
        d = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [S0, S1])
        local = d.to_local()
        return tuple(d.shape), tuple(local.shape), local.is_meta, DTensor.from_local(local, mesh, [S0, S1]).shape

    assert on_ranks(rank) == [((6, 4), (3, 2), True, (6, 4))] * 4


BAD_DISTRIBUTE = {
    "would be Partial": lambda mesh: distribute_tensor(numbers(4), mesh, [SUM, R]),
    "the tensor has 1 dims": lambda mesh: distribute_tensor(numbers(4), mesh, [S1, R]),
    "give one per axis": lambda mesh: distribute_tensor(numbers(4), mesh, [S0]),
    "no gradient would come back": lambda mesh: distribute_tensor(numbers(4).requires_grad_() * 2, mesh, [S0, R]),
    "use redistribute": lambda mesh: distribute_tensor(distribute_tensor(numbers(4), mesh), mesh, [S0, R]),
    "a place within each axis": lambda mesh: distribute_tensor(numbers(4), mesh, [S0, R], src_data_rank=2),
    "is not in DeviceMesh": lambda mesh: distribute_tensor(numbers(4), init_device_mesh("cpu", (1,)), [S0]),
}


@pytest.mark.parametrize("text", BAD_DISTRIBUTE)
def test_distribute_tensor_says_what_is_wrong(text):
    """Each error says what was asked and what would work."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
        on_ranks(BAD_DISTRIBUTE[text])


# ---- from_local and to_local ------------------------------------------------------------------


def test_from_local_infers_the_global_shape_of_equal_blocks():
    """Each axis that shards a dim multiplies its size; without placements the tensor is replicated."""

    def rank(mesh):
        local = numbers(2, 3) + 100 * mesh.get_rank()
        makes = [[S0, S1], [S0, S0], [R, S0], [R, R], None, [SUM, S1]]
        return [tuple(DTensor.from_local(local, mesh, p).shape) for p in makes]

    assert on_ranks(rank) == [[(4, 6), (8, 3), (4, 3), (2, 3), (2, 3), (2, 6)]] * 4


@pytest.mark.parametrize("placements", [[S0, R], [S0, S0], [S1, S0], [SUM, S1], [AVG, SUM], [MAX, R]], ids=str)
def test_from_local_and_to_local_are_inverse(placements):
    """With shape= for uneven blocks. to_local returns the block, and the blocks make up the global tensor."""
    x = numbers(5, 3)
    blocks = cut(x, placements, (2, 2))

    def rank(mesh):
        local = blocks[mesh.get_coordinate()]
        d = DTensor.from_local(local, mesh, placements, shape=x.shape, run_check=True)
        return torch.equal(d.to_local(), local), d.full_tensor()

    for inverse, full in on_ranks(rank):
        assert inverse and close(full, x, 1e-12)


def test_from_local_takes_blocks_of_any_stride():
    """A transposed block makes a transposed tensor; views of blocks with holes in memory are right, as copies."""
    base = numbers(8, 6)

    def rank(mesh):
        i = mesh.get_coordinate()[0]
        turned = DTensor.from_local(base[4 * i : 4 * i + 4].t(), mesh, [S1, R])
        holed = DTensor.from_local(base[4 * i : 4 * i + 4, ::2], mesh, [S0, R])
        return turned.stride(), turned.t().reshape(-1).full_tensor(), holed.view(-1).full_tensor()

    for stride, flat, cut_ in on_ranks(rank):
        assert stride == (1, 6) and torch.equal(flat, base.flatten()) and torch.equal(cut_, base[:, ::2].flatten())


def ragged(mesh, **options):
    return DTensor.from_local(numbers(2 + mesh.get_rank(), 3), mesh, [S0, S0], **options)


BAD_FROM_LOCAL: dict[str, Callable] = {
    "pass the global shape with shape=": lambda mesh: ragged(mesh, shape=(9, 3)),
    "on rank [0-3]: from_local: this rank's block|pass the global shape": lambda mesh: ragged(
        mesh, shape=(8, 3), run_check=True
    ),
    "rank 0 has a block of .*, but rank 1 one of": lambda mesh: ragged(mesh, run_check=True),
    "b8|f64": lambda mesh: DTensor.from_local(
        numbers(2, 3) > 0 if mesh.get_rank() == 2 else numbers(2, 3), mesh, [S0, R], run_check=True
    ),
    "takes this rank's plain tensor": lambda mesh: DTensor.from_local(distribute_tensor(numbers(4), mesh), mesh),
    "the tensor has 0 dims": lambda mesh: DTensor.from_local(torch.tensor(1.0), mesh, [S0, R]),
    "sum and max": lambda mesh: DTensor.from_local(numbers(2), mesh, [SUM, MAX]),
    "no average of i64": lambda mesh: DTensor.from_local(torch.ones(2, dtype=torch.int64), mesh, [AVG, R]),
}


@pytest.mark.parametrize("text", BAD_FROM_LOCAL)
def test_from_local_says_what_is_wrong(text):
    """With run_check all ranks raise if one block is wrong; no rank is left waiting."""
    with pytest.raises((ValueError, TypeError), match=text):
        on_ranks(BAD_FROM_LOCAL[text])


def test_run_check_raises_on_every_rank():
    """The ranks that are right raise too, and name the one that is not."""

    def rank(mesh):
        with pytest.raises(ValueError) as caught:
            ragged(mesh, shape=(8, 3), run_check=True)
        return str(caught.value)

    said = on_ranks(rank)
    assert "on rank 1" in said[0] and "was given" in said[1]


# ---- gradients at the boundary ----------------------------------------------------------------


def test_gradients_through_from_local():
    """A block gets its block of the cotangent; a term of a sum all of it; a term of an average a share of it."""
    w = weights(numbers(4, 6))
    want = {
        "shard": lambda i, j: w[2 * i : 2 * i + 2], "replicate": lambda i, j: w,
        "sum": lambda i, j: w, "avg": lambda i, j: w / 2, "sum of averages": lambda i, j: w / 2,
    }  # fmt: skip
    placings = {"shard": [S0, R], "replicate": [R, R], "sum": [SUM, R], "avg": [R, AVG], "sum of averages": [SUM, AVG]}

    def rank(mesh):
        found = {}
        for name, placements in placings.items():
            local = numbers(2 if name == "shard" else 4, 6).requires_grad_()
            x = DTensor.from_local(local, mesh, placements)
            (x * distribute_tensor(w, mesh)).sum().backward()
            found[name] = local.grad
        return mesh.get_coordinate(), found

    for at, found in on_ranks(rank):
        for name, grad in found.items():
            assert type(grad) is torch.Tensor and close(grad, want[name](*at), 1e-12), (name, at)


@pytest.mark.parametrize("first", [S0, R], ids=str)
def test_gradients_of_blocks_in_the_users_placements(first):
    """With Partial() each rank keeps its own term, and no reduction is made; the terms are the gradient together."""
    x, w, cotangent = numbers(4, 6), weights(numbers(6, 8)), weights(numbers(4, 8))

    def gradient(mesh, grad_placements):
        local = cut(x, [first, R], (2, 2))[mesh.get_coordinate()].requires_grad_()
        y = DTensor.from_local(local, mesh, [first, R], grad_placements=grad_placements)
        y = y @ distribute_tensor(w, mesh, [R, S1], src_data_rank=None)
        given = distribute_tensor(cotangent, mesh, [first, S1], src_data_rank=None)
        with explicit(grad_placements == [first, SUM]):  # nothing is sent
            y.backward(given)
        return local.grad

    def rank(mesh):
        terms = gradient(mesh, [first, SUM])
        return gradient(mesh, None), gradient(mesh, [first, R]), all_reduce(terms, "sum", (mesh, 1)).clone()

    for grads in on_ranks(rank):
        assert close(grads[0], grads[1], 1e-12) and close(grads[0], grads[2], 1e-12)


def test_gradients_of_blocks_have_the_shape_of_the_blocks():
    def rank(mesh):
        for placements, wanted in (([R, R], [S0, R]), ([MAX, R], [R, R])):
            with pytest.raises(ValueError, match=r"has to shard alike|leave it out"):
                DTensor.from_local(numbers(4, 6), mesh, placements, grad_placements=wanted)

    on_ranks(rank)


@pytest.mark.parametrize(
    "placements, grad_placements, share",
    [
        ([S0, S1], None, 1.0),
        ([R, R], None, 1.0),  # every rank computes the same loss
        ([R, R], [SUM, SUM], 1.0),  # every rank computes a quarter of it
        ([S0, R], [S0, SUM], 1.0),
        ([R, S1], [AVG, S1], 1.0),
        ([SUM, R], None, 1.0),
    ],
    ids=str,
)
def test_gradients_through_to_local(placements, grad_placements, share):
    """The gradient is that of one device, if the caller says how the ranks' losses make up the loss."""
    x, w = numbers(4, 6), weights(numbers(4, 6))
    parts = cut(x, placements, (2, 2))
    lies = grad_placements or [R if p == SUM else p for p in placements]
    given = cut(w, lies, (2, 2))

    def rank(mesh):
        d = leaf(parts, placements, x.requires_grad_(), mesh)
        d.to_local(grad_placements=grad_placements).backward(given[mesh.get_coordinate()])
        return d.grad.full_tensor()

    for grad in on_ranks(rank):
        assert close(grad, w * share, 1e-12)


def test_full_tensor_has_the_gradient_of_one_device():
    """Each rank computes the loss from the full tensor: its gradient counts once."""

    def rank(mesh):
        x = distribute_tensor(numbers(5, 3).requires_grad_(), mesh, [S0, S1])
        (x.full_tensor() ** 2).sum().backward()
        y = distribute_tensor(numbers(5, 3).requires_grad_(), mesh, [S0, S1])
        mine = (y.full_tensor(grad_placements=[SUM, SUM]) ** 2).sum() / 4  # a quarter of the loss on each rank
        mine.backward()
        return x.grad.full_tensor(), y.grad.full_tensor(), x.grad.placements

    for grad, summed, lies in on_ranks(rank):
        assert torch.equal(grad, 2 * numbers(5, 3)) and torch.equal(summed, grad) and lies == (S0, S1)


def test_second_derivatives_cross_the_boundary():
    """The backward of each boundary can be differentiated in its turn."""

    def cubed(x):
        y = (x**3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (first**2).sum().backward()
        return x.grad

    want = cubed(numbers(4, 2).requires_grad_())

    def rank(mesh):
        local = numbers(4, 2)[2 * mesh.get_coordinate()[0] :][:2].clone().requires_grad_()
        x = DTensor.from_local(local, mesh, [S0, R])
        y = (x.redistribute(placements=[R, S1]) ** 3).full_tensor().sum()
        (first,) = torch.autograd.grad(y, local, create_graph=True)
        (DTensor.from_local(first, mesh, [S0, R]) ** 2).sum().backward()
        return local.grad, want[2 * mesh.get_coordinate()[0] :][:2]

    for got, wanted in on_ranks(rank):
        assert close(got, wanted, 1e-12)


# ---- reading ----------------------------------------------------------------------------------


def test_numbers_read_from_a_dtensor_are_global():
    """item, float, int, bool, tolist, comparisons in Python and formats read the global tensor, not the block."""

    def rank(mesh):
        x = distribute_tensor(numbers(5, 3), mesh, [S0, S1])
        total = x.sum()  # a Partial
        assert total.placements == (SUM, SUM)
        n = distribute_tensor(torch.tensor([1, 2, 3, 4]), mesh, [S0, R])
        return [
            total.item(), float(total), int(n.sum()), bool((x > 14).any()), bool((x > 15).any()), x.tolist(),
            f"{total:.2f}", len(x), 15.0 in x, 16.0 in x, torch.equal(x, x + 0), torch.allclose(x, x * 1), x.numel(),
            [row.sum().item() for row in x], n.max().item(), torch.is_nonzero(total), [1, 2, 3, 4, 5][n.min()],
        ]  # fmt: skip

    x = numbers(5, 3)
    want = [
        120.0, 120.0, 10, True, False, x.tolist(), "120.00", 5, True, False, True, True, 15, x.sum(1).tolist(), 4,
        True, 2,
    ]  # fmt: skip
    assert on_ranks(rank) == [want] * 4


def test_printing_sends_nothing():
    """repr, str and an f-string without a format may be used by one rank alone."""
    world = ThreadWorld(4)

    def rank(rank):
        mesh = mesh_of((2, 2))
        x = distribute_tensor(numbers(2, 2), mesh, [S0, R], src_data_rank=None)
        total = x.sum().requires_grad_()
        return [repr(x), str(total), f"{total}"] if rank == 1 else None

    assert world.run(rank)[1] == [
        "DTensor(f64[2@dp, 2], local=tensor([[1., 2.]], dtype=torch.float64))",
        "DTensor(f64[] +sum@dp, local=tensor(3., dtype=torch.float64))",
        "DTensor(f64[] +sum@dp, local=tensor(3., dtype=torch.float64))",
    ]
    assert world.calls == [[]] * 4


def test_numpy_needs_the_full_tensor():
    """There is no memory to share; the error says what to call."""
    with pytest.raises(TypeError, match="full_tensor"):
        on_ranks(lambda mesh: distribute_tensor(numbers(4), mesh, [S0, R]).numpy())


# ---- copies -----------------------------------------------------------------------------------


def saved_and_loaded(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved_and_loaded,  # weights only, as is torch's default
    "torch.save of all": lambda x: saved_and_loaded(x, weights_only=False),
    "clone": lambda x: x.detach().clone().requires_grad_(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_equal_and_apart(name):
    """The copy has the same values, the same spec object and the same requires_grad, and its own memory."""

    def rank(mesh):
        x = nn.Parameter(distribute_tensor(numbers(5, 3), mesh, [S0, S1]))
        y = COPIES[name](x)
        with torch.no_grad():
            x.zero_()
        return y.full_tensor(), y._spec is x._spec, y.requires_grad, isinstance(y, nn.Parameter) or name == "clone"

    for full, one_spec, wants, parameter in on_ranks(rank):
        assert torch.equal(full, numbers(5, 3)) and one_spec and wants and parameter


def test_a_deep_copy_of_a_parameter_has_no_gradient():
    """As with torch's own: a plain one, one on simulated ranks, and one on a mesh. That of another leaf has one."""

    def have_gradients(x):
        x.grad = x.detach().clone()
        return copy.deepcopy(x).grad is not None

    def rank(mesh):
        x = distribute_tensor(numbers(5, 3), mesh, [S0, S1])
        return have_gradients(nn.Parameter(x)), have_gradients(x.clone().requires_grad_())

    assert not have_gradients(nn.Parameter(numbers(5, 3)))
    with LocalTensorMode(2):
        x = torch.ones(2)
        assert not have_gradients(nn.Parameter(x)) and have_gradients(x.clone().requires_grad_())
    assert all(found == (False, True) for found in on_ranks(rank))


def test_memory_that_is_shared_is_the_blocks():
    """Of a tensor and of a module; torch would crash when it asks for the memory of the global tensor."""

    def rank(mesh):
        x = distribute_tensor(numbers(5, 3), mesh, [S0, S1])
        model = linear(mesh, nn.Linear(3, 4).double()).share_memory()
        before = x.is_shared()
        return before, x.share_memory_() is x, x.is_shared() and x.to_local().is_shared(), model.weight.is_shared()

    assert on_ranks(rank) == [(False, True, True, True)] * 4


def linear(mesh: object, module: nn.Linear) -> nn.Linear:
    """A linear layer with its rows over tp."""
    for name, p in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [R, S0])))
    return module


def test_modules_hold_dtensors():
    """Parameters, state_dict and back, also in another layout; deepcopy; a change of dtype in place."""
    models = [nn.Linear(4, 6).double() for _ in range(4)]

    def rank(mesh):
        model = linear(mesh, models[mesh.get_rank()])
        before = model.weight.full_tensor().detach().clone()
        state = {k: v.clone().redistribute(placements=[S0, R]) for k, v in model.state_dict().items()}
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight.zero_()
        other.load_state_dict(state)
        half = other.float()
        return [
            isinstance(half.weight, nn.Parameter), half.weight.dtype == torch.float32,
            half.weight.placements == (R, S0), len(list(half.parameters())) == 2,
            torch.equal(half.weight.full_tensor(), before.float()), type(state["bias"]) is DTensor,
        ]  # fmt: skip

    assert on_ranks(rank) == [[True] * 6] * 4


def test_data_can_be_replaced():
    """`.data` is a view without history; an assignment gives the tensor another block, or raises a clear error."""

    def rank(mesh):
        x = distribute_tensor(numbers(4, 2).requires_grad_(), mesh, [S0, R])
        x.data.add_(1)
        added = x.full_tensor().detach().clone()
        x.data = distribute_tensor(numbers(4, 2) * 2, mesh, [R, S1])
        with pytest.raises(TypeError, match="cannot assign"):
            x.data = torch.ones(4, 2)
        return added, x.full_tensor().detach(), x.placements

    for added, replaced, lies in on_ranks(rank):
        assert torch.equal(added, numbers(4, 2) + 1) and torch.equal(replaced, numbers(4, 2) * 2) and lies == (R, S1)


# ---- ops, forward and backward ----------------------------------------------------------------


def smooth(*shape: int) -> torch.Tensor:
    """Numbers without ties, in no order, that want a gradient."""
    return weights(torch.empty(shape, dtype=F64)).requires_grad_()


def tokens(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % 5).reshape(shape)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


OPS: dict[str, tuple[Callable, list[torch.Tensor]]] = {
    "add": (lambda x, y: x + y, [smooth(5, 4), smooth(5, 4)]),
    "broadcast": (lambda x, y: x * y + y, [smooth(5, 4), smooth(4)]),
    "column-parallel linear": (F.linear, [smooth(3, 4, 6), smooth(8, 6), smooth(8)]),
    "uneven linear": (F.linear, [smooth(3, 5, 6), smooth(7, 6), smooth(7)]),
    "two linears": (lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b), [smooth(5, 4), smooth(6, 4), smooth(4, 6)]),
    "matmul": (torch.matmul, [smooth(2, 3, 4), smooth(4, 5)]),
    "bmm": (torch.bmm, [smooth(3, 2, 4), smooth(3, 4, 5)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [smooth(6, 5, 4), smooth(4), smooth(4)]),
    "softmax": (lambda x: x.softmax(-1), [smooth(5, 6)]),
    "mean": (lambda x: (x.mean(), x.mean(0), x.mean(1, keepdim=True)), [smooth(5, 4)]),
    "var": (lambda x: x.var(0), [smooth(5, 4)]),
    "embedding": (lambda w: F.embedding(tokens(3, 4), w), [smooth(5, 6)]),
    "attention": (attention, [smooth(3, 4, 5, 2), smooth(3, 4, 5, 2), smooth(3, 4, 5, 2)]),
    "heads": (lambda x: x.view(3, 5, 4, 2).transpose(1, 2).flatten(2), [smooth(3, 5, 8)]),
    "flatten": (lambda x: x.flatten(0, 1) * 2, [smooth(3, 5, 2)]),
    "cross entropy": (lambda x: F.cross_entropy(x, tokens(6)), [smooth(6, 5)]),
    "cross entropy, ignored": (lambda x: F.cross_entropy(x, tokens(6), ignore_index=2), [smooth(6, 5)]),
    "mse": (F.mse_loss, [smooth(5, 3), smooth(5, 3)]),
    "smooth l1": (F.smooth_l1_loss, [smooth(5, 3), smooth(5, 3)]),
    "norm": (lambda x: (x.norm(), torch.linalg.vector_norm(x, 3)), [smooth(5, 3)]),
    "cat and split": (lambda x, y: torch.cat([x, y], 1).split([3, 3], 1)[0] * 3, [smooth(5, 2), smooth(5, 4)]),
    "stack and unbind": (lambda x, y: torch.stack([x, y]).unbind(1)[2], [smooth(5, 2), smooth(5, 2)]),
    "slice": (lambda x: x[1:4, ::2] * x[0, 1], [smooth(5, 6)]),
    "index": (lambda x: x[torch.tensor([3, 0, 0])], [smooth(5, 6)]),
    "where": (lambda x, y: torch.where(x > 0, x * y, y), [smooth(5, 6), smooth(5, 6)]),
    "max": (lambda x: (x.amax(0), x.max()), [smooth(5, 6)]),
    "cumsum": (lambda x: x.cumsum(0), [smooth(5, 6)]),
    "in place": (lambda x: (x * 2).add_(1).mul_(x).clamp_(min=0.3), [smooth(5, 6)]),
    "in place on a view": (lambda x: _doubled_in_part(x * 1), [smooth(5, 6)]),
    "inverse, gathered": (lambda x: torch.linalg.inv(x + torch.eye(4, dtype=F64) * 3), [smooth(4, 4)]),
    "fft, gathered": (lambda x: torch.fft.rfft(x).abs(), [smooth(5, 6)]),
}


def _doubled_in_part(x):
    x.t()[:, :].mul_(2)
    return x * x


def placings_of(tensors: list[torch.Tensor]) -> list[list]:
    """A few layouts of operands on two axes: data- and tensor-parallel, all sharded, partial, and mixed."""

    def shard(t, d):
        return type(S0)(d % t.ndim) if t.ndim else R

    return [
        [[R, R] for t in tensors],
        [[shard(t, 0), R] for t in tensors],
        [[shard(t, 0), shard(t, -1)] for t in tensors],
        [[shard(t, 0), shard(t, 0)] for t in tensors],
        [[shard(t, 0), R] if i == 0 else [R, shard(t, i)] for i, t in enumerate(tensors)],
        [[SUM, shard(t, i + 1)] for i, t in enumerate(tensors)],
        [[AVG, SUM] if i % 2 == 0 else [R, shard(t, 0)] for i, t in enumerate(tensors)],
    ]


@pytest.mark.parametrize("name", OPS)
def test_ops_and_their_gradients_are_those_of_one_device(name):
    """For all placements: even, uneven, with empty shards, and with sums that are not reduced yet."""
    fn, tensors = OPS[name]
    with implicit_replication():  # tokens and indices are plain
        agree(fn, tensors, *placings_of(tensors))


# ---- training ---------------------------------------------------------------------------------

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=16, block_size=8, vocab=32)
LIES = check_patterns(mesh_of((2, 2)), PARAMS, "params")


def distribute_model(model: nn.Module, mesh) -> nn.Module:
    """The tensor-parallel plan of the demo, parameter by parameter; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in made:
                placements = placements_for(LIES, [f"model.{path}.{name}"])
                made[id(p)] = nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
            setattr(module, name, made[id(p)])
    return model


def batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, CONFIG.vocab, (size, CONFIG.block_size + 1), generator=draw)
    return x[:, :-1], x[:, 1:]


def trained(model: nn.Module, given: tuple, make: Callable, steps: int, plain: Callable = lambda t: t) -> dict:
    """Losses, last gradients and parameters after some steps."""
    optimizer = make(model.parameters())
    losses = [train_step(model, optimizer, *given).detach() for _ in range(steps)]
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    everything = {f"loss {i}": x for i, x in enumerate(losses)} | grads | dict(model.named_parameters())
    return {name: plain(x.detach()) for name, x in everything.items()}


def check_training(mesh_shape, size: int, make: Callable, steps: int = 2) -> None:
    """A GPT is trained on DTensors, and the same GPT on one device."""
    torch.manual_seed(0)
    start = GPT(CONFIG).double()
    given = batch(size)
    want = trained(copy.deepcopy(start), given, make, steps)
    n = mesh_shape[0] * mesh_shape[1]
    models = [copy.deepcopy(start) for _ in range(n)]

    def rank(rank):
        mesh = mesh_of(mesh_shape)
        model = distribute_model(models[rank], mesh)
        lies = [in_mesh_order(mesh, INPUTS[name], name) for name in ("tokens", "targets")]
        mine = [distribute_tensor(t, mesh, p) for t, p in zip(given, lies, strict=True)]
        with implicit_replication():  # positions come from a plain arange
            return trained(model, mine, make, steps, DTensor.full_tensor)

    for got in run_ranks(rank, n):
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert same(got[name], x, 1e-8), f"{name}: {(got[name] - x).abs().max()}"


@pytest.mark.parametrize("size", [4, 3], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_a_gpt_trains_eagerly_as_on_one_device(mesh_shape, size):
    """Losses, gradients and parameters of AdamW; a batch that does not divide leaves a rank without a row."""
    check_training(mesh_shape, size, lambda p: torch.optim.AdamW(p, lr=1e-2))


OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_step_on_dtensors(name):
    """One tensor at a time, in lists, or fused."""
    check_training((2, 2), 3, OPTIMIZERS[name])


def test_optimiser_state_lies_as_its_parameter_does():
    """The state also survives state_dict and load_state_dict."""
    x = numbers(5, 3)

    def rank(mesh):
        p = nn.Parameter(distribute_tensor(x, mesh, [S0, S1]))
        found = []
        state = None
        for _ in range(2):  # the second time from what the first one saved
            with torch.no_grad():
                p.copy_(distribute_tensor(x, mesh, [R, S0]))
            optimizer = torch.optim.AdamW([p], lr=0.1)
            if state is not None:
                optimizer.load_state_dict(state)
            (p * p).sum().backward()
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            kept = optimizer.state[p]["exp_avg"]
            found.append((kept.placements, kept.full_tensor()))
            p.grad = None
        return found

    def plain():
        p = nn.Parameter(x.clone())
        optimizer = torch.optim.AdamW([p], lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                p.copy_(x)
            p.grad = 2 * x
            optimizer.step()
            yield optimizer.state[p]["exp_avg"].clone()

    want = list(plain())
    for found in on_ranks(rank):
        assert all(lies == (S0, S1) and close(got, w, 1e-9) for (lies, got), w in zip(found, want, strict=True))


def test_checkpointing_and_autocast_work():
    """A forward pass that runs again in the backward pass; casts to half precision and back."""
    x, w = smooth(6, 4), smooth(4, 4)

    def computed(x, w):
        y = torch.utils.checkpoint.checkpoint(lambda x: F.gelu(x @ w), x, use_reentrant=False, preserve_rng_state=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = (x.float() @ w.float()).sum()
        assert z.dtype == torch.bfloat16 or z.dtype == torch.float32
        return y

    agree(computed, [x, w], [[S0, R], [R, S1]], [[SUM, R], [S0, R]])


def test_a_plain_tensor_in_the_model_is_an_error_that_says_what_to_do():
    """Positions come from a plain arange: without implicit_replication it may differ between ranks."""
    model = GPT(CONFIG)

    def rank(mesh):
        with pytest.raises(RuntimeError) as caught:
            distribute_model(copy.deepcopy(model), mesh)(distribute_tensor(batch(4)[0], mesh, [S0, R]))
        return str(caught.value)

    assert "plain tensor of shape [8] met a DTensor" in (said := on_ranks(rank)[0]), said
    assert "implicit_replication" in said and "from_local" in said


def clipped(model: nn.Module, given: tuple, plain: Callable = lambda t: t, **options) -> list[torch.Tensor]:
    logits = model(given[0])
    F.cross_entropy(logits.flatten(0, 1), given[1].flatten()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, **options)
    return [plain(x.detach()) for x in (norm, *(p.grad for p in model.parameters()))]


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_clip_grad_norm_sees_the_global_norm(norm_type):
    """The total norm of gradients that are sharded, replicated and partial."""
    torch.manual_seed(0)
    start = GPT(CONFIG).double()
    want = clipped(copy.deepcopy(start), batch(3), norm_type=norm_type)
    models = [copy.deepcopy(start) for _ in range(4)]

    def rank(mesh):
        model = distribute_model(models[mesh.get_rank()], mesh)
        given = [distribute_tensor(t, mesh, [S0, R]) for t in batch(3)]
        with implicit_replication():
            return clipped(model, given, DTensor.full_tensor, norm_type=norm_type)

    for got in on_ranks(rank):
        assert all(same(a, b, 1e-9) for a, b in zip(got, want, strict=True))


def test_gradients_accumulate_and_hooks_see_dtensors():
    """Two backward passes add up; a hook on a tensor may change its gradient."""
    x0 = numbers(5, 3)

    def rank(mesh):
        x = distribute_tensor(x0.clone().requires_grad_(), mesh, [S0, S1])
        seen = []
        x.register_hook(lambda g: seen.append(type(g)) or g * 2)
        for _ in range(2):
            (x * x).sum().backward()
        return x.grad.full_tensor(), seen

    for grad, seen in on_ranks(rank):
        assert torch.equal(grad, 8 * x0) and seen == [DTensor, DTensor]


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
def test_a_gpt_runs_without_autograd(mode):
    """In inference_mode composite ops arrive as one op, and are decomposed here."""
    torch.manual_seed(0)
    model = GPT(CONFIG).double()
    with torch.no_grad():
        want = model(batch(3)[0])
    models = [copy.deepcopy(model) for _ in range(4)]

    def rank(mesh):
        ready = distribute_model(models[mesh.get_rank()], mesh)
        with MODES[mode](), implicit_replication():
            out = ready(distribute_tensor(batch(3)[0], mesh, [S0, R]))
            assert not out.requires_grad
            return out.full_tensor().clone(), float(out.mean()), out.argmax(-1).full_tensor()

    for got, mean, best in on_ranks(rank):
        assert same(got, want) and abs(mean - want.mean().item()) < 1e-12 and torch.equal(best, want.argmax(-1))


# ---- on a network -----------------------------------------------------------------------------


def gpt_on_gloo(rank: int) -> tuple:
    """One training step of a GPT; every dtype and reduction through the wire."""
    torch.manual_seed(0)
    mesh = mesh_of((2, 2))
    model = distribute_model(GPT(CONFIG).double(), mesh)
    given = [distribute_tensor(t, mesh, [S0, R]) for t in batch(3)]
    with implicit_replication():
        got = trained(model, given, lambda p: torch.optim.AdamW(p, lr=1e-2), 2, DTensor.full_tensor)
    kinds = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        x = distribute_tensor(numbers(5, 3, dtype=F64).sub(3).clamp(0, 1).to(dtype), mesh, [S0, S1])
        kinds[str(dtype)] = [x.full_tensor(), x.redistribute(placements=[S1, R]).full_tensor()]
        if dtype is not torch.bool:
            kinds[str(dtype)] += [x.sum().full_tensor(), x.amax(0).full_tensor(), x.prod().full_tensor()]
        kinds[str(dtype)] += [x.any(0).full_tensor(), x.all().full_tensor()]
    return got, kinds


def test_on_gloo(gloo4):
    """Four real processes: the GPT's training, and every dtype through gathers, exchanges and reductions."""
    torch.manual_seed(0)
    want = trained(GPT(CONFIG).double(), batch(3), lambda p: torch.optim.AdamW(p, lr=1e-2), 2)
    for got, kinds in gloo4.run(gpt_on_gloo):
        assert all(same(got[name], x, 1e-8) for name, x in want.items())
        for name, found in kinds.items():
            x = numbers(5, 3).sub(3).clamp(0, 1).to(getattr(torch, name.removeprefix("torch.")))
            rest = [] if x.dtype == torch.bool else [x.sum(), x.amax(0), x.prod()]
            for a, b in zip(found, [x, x, *rest, x.any(0), x.all()], strict=True):
                assert same(a, b, 1e-2), name
