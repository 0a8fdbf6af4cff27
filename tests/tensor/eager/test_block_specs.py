"""Blocks of any memory: with bits that say how to read it, and with strides that say little on some rank."""

from __future__ import annotations

import pytest
import torch
from workers import Pool

from spmd import comm
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import LocalTensor, LocalTensorMode, run_ranks
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from spmd.tensor.eager.local_map import local_map
from spmd.tensor.placement import Partial, Replicate, Shard
from spmd.tensor.spec import dense_strides

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()
Z = torch.arange(10.0).view(5, 2) - 1j * torch.arange(1.0, 11.0).view(5, 2)


def row() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def cut(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of x: a view."""
    mine = distribute_tensor(torch.arange(len(x)), mesh, [S0]).to_local()
    return x[int(mine[0]) : int(mine[-1]) + 1] if len(mine) else x[:0]


# ---- bits -------------------------------------------------------------------------------------

BITS = {"conjugate": lambda z: z.conj(), "negative": lambda z: z.conj().imag, "both": lambda z: (-z).conj().imag.neg()}
"""Views with a bit: conjugated, negated."""

ENTRIES = {
    "from_local": lambda z, view, mesh: DTensor.from_local(cut(view(z), mesh), mesh, [S0], shape=z.shape),
    "from_local, a term": lambda z, view, mesh: DTensor.from_local(view(z) / 4, mesh, [SUM]),
    "from_local, replicated": lambda z, view, mesh: DTensor.from_local(view(z), mesh, [R], run_check=True),
    "from_local, a gradient": lambda z, view, mesh: DTensor.from_local(
        cut(view(z.clone().requires_grad_()), mesh), mesh, [S0], shape=z.shape
    ),
    "distribute_tensor": lambda z, view, mesh: distribute_tensor(view(z), mesh, [S0]),
    "distribute_tensor without a source": lambda z, view, mesh: distribute_tensor(
        view(z), mesh, [R], src_data_rank=None
    ),
    "local_map": lambda z, view, mesh: local_map(view, out_placements=[S0])(distribute_tensor(z, mesh, [S0])),
    "a gradient through to_local": lambda z, view, mesh: gradient_of_blocks(view(z), mesh),
    "a view": lambda z, view, mesh: view(distribute_tensor(z, mesh, [S0])),
    "data": lambda z, view, mesh: with_data(distribute_tensor(view(z), mesh, [S0])),
    "a plain number": lambda z, view, mesh: distribute_tensor(view(z) - view(z)[0, 0], mesh, [S0]) + view(z)[0, 0],
}
"""Ways for a block to come into a DTensor: each gives `view(z)`."""


def gradient_of_blocks(g: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """g, which comes back as the gradient of the ranks' blocks."""
    x = distribute_tensor(torch.zeros_like(g), mesh, [S0]).requires_grad_()
    return torch.autograd.grad(x.to_local(), x, cut(g, mesh))[0]


def with_data(x: DTensor) -> DTensor:
    y = torch.zeros_like(x)
    y.data = x
    return y


def read(rank: int, bits=tuple(BITS)) -> list[str]:
    """The ways in which ops on the tensor, or moves of it, do not see the bit."""
    mesh, wrong = row(), []
    for bit in bits:
        view = BITS[bit]
        want = view(Z)
        for name, enter in ENTRIES.items():
            x = enter(Z.clone(), view, mesh).detach()
            got = {"op": (x * 1).full_tensor(), "move": x.full_tensor() * 1, "sum": x.sum().full_tensor()}
            right = {"op": want, "move": want, "sum": want.sum()}
            wrong += [f"{bit}, {name}, {what}" for what in got if not got[what].allclose(right[what])]
    return wrong


def sent(rank: int) -> list[str]:
    """The collectives that send the memory of a tensor without its bit."""
    mesh, wrong = row(), []
    collectives = {
        "all_reduce": lambda x: comm.all_reduce(x, "sum", mesh),
        "all_gather": lambda x: comm.all_gather_tensor(x, 0, mesh),
        "reduce_scatter": lambda x: comm.reduce_scatter_tensor(x, "sum", 0, mesh),
        "all_to_all": lambda x: comm.all_to_all_single(x, None, None, mesh),
        "broadcast": lambda x: comm.broadcast(x, 0, mesh),
        "permute": lambda x: comm.permute_tensor(x, [1, 2, 3, 0], mesh),
    }
    for bit, view in BITS.items():
        x = view(Z[:4] * (rank + 1))
        for name, collective in collectives.items():
            if not torch.equal(collective(x) * 1, collective(x.clone()) * 1):
                wrong.append(f"{bit}, {name}")
    return wrong


def test_ops_read_blocks_with_their_bits():
    assert run_ranks(read, 4) == [[]] * 4


def test_simulated_ranks_read_tensors_with_their_bits():
    """A LocalTensor has the bits of its ranks' tensors, and writes into a view go to the base as on one device."""
    for bit, view in BITS.items():
        plain = Z.clone()
        view(plain).mul_(2)
        with LocalTensorMode(4):
            x = LocalTensor({rank: Z.clone() for rank in range(4)})
            y = LocalTensor({rank: view(Z) if rank else view(Z).clone() for rank in range(4)})
            assert torch.equal((view(x) * 1).reconcile(), view(Z)), bit
            assert torch.equal((y * 1).reconcile(), view(Z)), bit
            assert torch.equal(DTensor.from_local(view(x), row(), [S0]).full_tensor().reconcile()[:5], view(Z)), bit
            view(x).mul_(2)
            assert torch.equal(x.reconcile(), plain), bit


# ---- kernels that conjugate on their way ------------------------------------------------------

COUNT = torch.arange(24.0, dtype=torch.float64)
TALL = torch.polar((COUNT + 1).sqrt(), COUNT**2).view(3, 4, 2)

KERNELS = {
    "pinv": torch.linalg.pinv,
    "pinv of a Hermitian matrix": lambda a: torch.linalg.pinv(a.mH @ a, hermitian=True),
    "least squares": lambda a: torch.linalg.lstsq(a, a.sum(-1, keepdim=True) ** 2, driver="gelsd").solution,
    "the residuals of least squares": lambda a: torch.linalg.lstsq(a, a.sum(-1, keepdim=True) ** 2)[1],
}


def real_outcome(fn, a: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradient of a weighted sum of its real and imaginary parts."""
    a = a.detach().requires_grad_()
    out = fn(a)
    parts = torch.view_as_real(out) if out.is_complex() else out
    weights = torch.linspace(1, 2, parts.numel(), dtype=torch.float64).view(parts.shape)
    if isinstance(out, DTensor):
        weights = distribute_tensor(weights, out.device_mesh)
    return [out, torch.autograd.grad((parts * weights).sum(), a, allow_unused=True)[0] if out.requires_grad else None]


def conjugating(rank: int) -> list[str]:
    """The kernels that lose a conjugate in a dispatch: of DTensors, of a result that is on its way, of a mode."""
    mesh, wrong = row(), []
    for name, fn in KERNELS.items():
        want = real_outcome(fn, TALL)
        for placement in (R, S0, S1, SUM):
            x = DTensor.from_local(TALL / 4, mesh, [SUM]).redistribute(placements=[placement])
            got = [None if y is None else y.full_tensor() for y in real_outcome(fn, x)]
            if not all(a is b or a.allclose(b) for a, b in zip(got, want, strict=True)):
                wrong.append(f"{name}, {placement}")
        if not fn(comm.all_reduce(TALL / 4, "sum", mesh)).allclose(want[0]):
            wrong.append(f"{name}, on its way")
        whole = distribute_tensor(TALL, mesh).requires_grad_()
        if not local_map(fn, out_placements=[R])(whole).full_tensor().allclose(want[0]):
            wrong.append(f"{name}, local_map")
    return wrong


def test_kernels_heed_the_bits_that_they_set():
    assert run_ranks(conjugating, 4) == [[]] * 4
    with LocalTensorMode(4):
        for fn in KERNELS.values():
            for x in (LocalTensor(dict.fromkeys(range(4), TALL)), TALL):
                out = fn(x)
                assert (out.reconcile() if isinstance(out, LocalTensor) else out).allclose(OUTSIDE[fn])


OUTSIDE = {fn: fn(TALL) for fn in KERNELS.values()}


# ---- strides ----------------------------------------------------------------------------------

LAYOUTS = {
    "by rows": ((5, 3), (1, 0), S0, (3, 1)),
    "by columns, some blocks of one row": ((5, 3), (0, 1), S0, (3, 1)),
    "by columns, two rows or more": ((11, 3), (0, 1), S0, (1, 11)),
    "by columns, sharded columns": ((3, 11), (0, 1), S1, (1, 3)),
    "rows of matrices by columns": ((5, 3, 4), (1, 2, 0), S0, (12, 1, 3)),
    "a dim of size 1": ((11, 1, 3), (0, 2, 1), S0, (1, 33, 11)),
}
"""A global shape, its dims in memory from the innermost, a placement, and the strides that all ranks find."""


def stored(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """x in new memory, with its dims in this order from the innermost."""
    outer_first = order[::-1]
    memory = x.permute(outer_first).clone(memory_format=torch.contiguous_format)
    return memory.permute([outer_first.index(d) for d in range(x.ndim)])


def strides(rank: int) -> list:
    mesh, found = row(), []
    for shape, order, placement, _ in LAYOUTS.values():
        x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        block = stored(distribute_tensor(x, mesh, [placement]).to_local(), order)
        z = DTensor.from_local(block, mesh, [placement], shape=shape, run_check=True)
        written = z.clone()
        written.reshape(-1).zero_()
        is_view = not written.full_tensor().any()
        flat = z.reshape(-1).full_tensor()
        found.append((z.stride(), is_view, torch.equal(z.full_tensor(), x), torch.equal(flat, x.view(-1))))
    return found


WANT = [(stride, stride == torch.empty(shape).stride(), True, True) for shape, _, _, stride in LAYOUTS.values()]


def test_all_ranks_find_one_stride_for_uneven_blocks():
    assert run_ranks(strides, 4) == [WANT] * 4


def unlike(rank: int) -> str:
    """Blocks that rank 2 stores in another order than the others."""
    mesh = row()
    block = stored(torch.ones(2, 3), (1, 0) if rank == 2 else (0, 1))
    with pytest.raises(ValueError) as error:
        DTensor.from_local(block, mesh, [S0], run_check=True)
    return str(error.value)


def test_run_check_compares_strides():
    for text in run_ranks(unlike, 4):
        assert "rank 0 has a block of f32[8@dp, 3] with strides (1, 8), but rank 2 one of f32[8@dp, 3];" in text


def plain_number(rank: int) -> tuple:
    """One element of a tensor that has other sizes, and so other strides, on other ranks."""
    x = distribute_tensor(torch.ones(1, 4), row(), [S1])
    return (x * torch.ones(3, rank + 2)[:1, :1])._spec.stride, (x + torch.ones(2 + rank, 3).t()[:1, :1]).stride()


def test_plain_numbers_have_no_strides_of_their_own():
    assert set(run_ranks(plain_number, 4)) == {((4, 1), (4, 1))}


@pytest.mark.parametrize(
    "shape, stride, thin, want",
    [
        ((4, 6), (6, 1), {0}, (6, 1)),
        ((4, 6), (1, 1), {0}, (6, 1)),
        ((4, 6, 5), (1, 0, 9), set(), (1, 0, 4)),
        ((4, 6, 5), (0, 5, 1), set(), (0, 5, 1)),
        ((4, 6, 5), (7, 3, 70), set(), (6, 1, 24)),
        ((0, 3), (1, 1), {0}, (3, 1)),
        ((), (), set(), ()),
    ],
)
def test_dense_strides(shape, stride, thin, want):
    assert dense_strides(shape, stride, thin) == want


def test_so_it_is_on_gloo(gloo4: Pool):
    assert gloo4.run(read, ("conjugate",)) == [[]] * 4
    assert gloo4.run(sent) == [[]] * 4
    assert gloo4.run(conjugating) == [[]] * 4
    assert gloo4.run(strides) == [WANT] * 4
    assert len(set(gloo4.run(unlike))) == 1
