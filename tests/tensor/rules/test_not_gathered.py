"""Ops that used to gather their operands: they are those of one device, and no operand is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import debug
from tests.tensor.rules.test_norms import smooth
from tests.tensor.single import S0, S1, S2, SUM, R, agree_at_once, every_rank, mesh_of, placed

aten, inf = torch.ops.aten, float("inf")
UNEVEN, EMPTY = (5, 7), (2, 3)
PLACED = [[S0, S1], [S1, S0], [S0, S0], [R, S1], [SUM, S1]]


def sharp(x: torch.Tensor) -> torch.Tensor:
    """A mask that some elements pass, and the same on any mesh."""
    return x.detach().sin() > 0.1


def counting(x: torch.Tensor) -> torch.Tensor:
    """1, 2, .. along the first dim."""
    return torch.ones_like(x, dtype=torch.int64).cumsum(0)


def anywhere(x: torch.Tensor) -> list[torch.Tensor]:
    """Indices of rows and columns, some of them beyond x."""
    return [sharp(x[:, :1]).long() * 9 - 4, sharp(x[:1]).long() * 9]


ELEMENTS = {
    "dist": lambda x: [torch.dist(x, x.sin(), p) for p in (1, 2, 3.5, inf)],
    "norm": lambda x: (aten.norm.Scalar(x, 3), aten.norm.ScalarOpt_dim(x, None, [0]), F.pairwise_distance(x, x.cos())),
    "vdot": lambda x: torch.vdot(x.flatten(), x.sin().flatten()),
    "masked_select": lambda x: x.masked_select(sharp(x)),
    "x[mask]": lambda x: (x[sharp(x)], x.detach()[sharp(x[:, 0])], x.detach()[:, sharp(x[0])]),
    "x[mask] = y": lambda x: (
        x.index_put([sharp(x)], x[0, 0]), x.index_put([sharp(x)], x[sharp(x)].cos(), True),
        x.clone().index_put_([sharp(x)], x[sharp(x)].cos()),
    ),
    "masked_scatter": lambda x: x.masked_scatter(sharp(x), x.cos()),
    "masked_scatter_": lambda x: x.clone().masked_scatter_(sharp(x), x.exp()),
    "nonzero": lambda x: (sharp(x).nonzero(), (x * sharp(x)).argwhere(), torch.nonzero_static(sharp(x), size=7)),
    "block_diag": lambda x: torch.block_diag(x, x[0].cos(), x.sin()),
    "chunk_cat": lambda x: aten._chunk_cat([x.detach(), x.detach().sin()], 1, 3),
    "diagonal_scatter": lambda x: [x.diagonal_scatter(x.diagonal(k).sin(), k) for k in (-1, 0, 2)],
    "allclose": lambda x: (torch.allclose(x, x + 1e-12), torch.allclose(x, x + 1), torch.equal(x, x * 1), x.equal(-x)),
    "margins": lambda x: [
        F.multi_margin_loss(x, torch.zeros_like(x[:, 0]).long() + 1, reduction=r) for r in ("none", "mean", "sum")
    ],
    "margins of many": lambda x: [
        F.multilabel_margin_loss(x, torch.zeros_like(x).long() - 1, reduction=r) for r in ("none", "mean", "sum")
    ],
    "histogramdd": lambda x: torch.histogramdd(x.detach()[:, :2], [2, 3])[0],
    "bincount": lambda x: (sharp(x).flatten().long().bincount(), (x[0] * 2).abs().long().bincount(x[0].detach())),
    "addmm_": lambda x: torch.zeros_like(x @ x.mT).addmm_(x, x.mT),
    "in place": lambda x: (
        (x * 1).abs_(), (x * 1).copysign_(x.detach().cos()), (x * 1).copysign_(-2), (x * 1).detach().ge_(0.0),
        F.mish(x * 1, inplace=True), F.threshold_(x * 1, 0.1, 0.2), (x * 1).xlogy_(2.0), (x * 1).true_divide_(2),
        (x * 9).long().gcd_((x * 4).long()),
    ),
    "squeeze_copy": lambda x: (torch.squeeze_copy(x.unsqueeze(1)), torch.squeeze_copy(x.unsqueeze(0), 0)),
    "masked_index": lambda x: aten._unsafe_masked_index(x, sharp(x), anywhere(x), 0.5),
    "masked_index_put": lambda x: aten._unsafe_masked_index_put_accumulate(x, sharp(x), anywhere(x), x.cos()),
    "put": lambda x: [x.put(counting(x[0]) - 2, x[0].sin(), add) for add in (False, True)],
    "put_, take": lambda x: (x.clone().put_(counting(x[0]) - 1, x[0].sin()), x.take(counting(x[0]) - 2)),
    "scatter": lambda x: (x.scatter(0, counting(x[:1]) - 1, x[:1].sin()), x.scatter(1, sharp(x[:, :1]).long(), 2.5)),
    "scatter_reduce": lambda x: [
        x.scatter_reduce(d, sharp(x).long(), x.sin() + 2, kind, include_self=own)
        for d, kind, own in ((0, "prod", True), (1, "mean", True), (0, "mean", False), (1, "amax", False))
    ],
    "scatter of fewer rows": lambda x: (
        x.scatter_reduce(1, sharp(x[:2]).long(), x[:2].sin() + 2, "prod"),
        x.scatter(0, sharp(x[:, :2]).long(), x[:, :2]),
    ),
    "pdist": lambda x: [F.pdist(x, p) for p in (1.0, 2.0, 3.5, inf)],
    "embedding_bag": lambda x: F.embedding_bag(sharp(x[:, 0]).long(), x, sharp(x[0, :2]).long() * 0, mode="sum"),
    "batch_norm": lambda x: aten._batch_norm_with_update(
        x.exp(), x[0], x[1], *torch.zeros_like(x[:2]).detach().clone(), 0.1, 1e-5
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_those_of_one_device(name):
    """Forward and backward, with uneven and empty blocks; and nothing is gathered. The placements take turns."""
    turn = list(ELEMENTS).index(name)
    for shape, placing in ((UNEVEN, PLACED[turn % 5]), (EMPTY, PLACED[(turn + 2) % 5])):
        debug.fallbacks.clear()
        agree_at_once(ELEMENTS[name], [smooth(*shape)], [placing])
        assert not debug.fallbacks(), f"{placing}: {debug.fallbacks()}"


def solvable(x: torch.Tensor) -> torch.Tensor:
    """Well-conditioned square matrices made of x."""
    return x @ x.mT + 4 * torch.diag_embed(torch.ones_like(x[..., 0]))


ONE_MATRIX = {
    "inv": lambda x: torch.linalg.inv(x),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x.tril()),
    "lu_unpack": lambda x: torch.lu_unpack(x, torch.ones_like(x[0], dtype=torch.int32)),
    "ldl_solve": lambda x: torch.linalg.ldl_solve(x.detach(), torch.ones_like(x[0]).cumsum(0).int(), x.detach()),
}
BATCHES = {
    "inv": lambda x: torch.linalg.inv(x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "lu_factor": lambda x: torch.linalg.lu_factor(x),
    "lu_unpack": lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x)),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x),
    "det": lambda x: (torch.linalg.det(x), torch.linalg.slogdet(x)[1]),
    "solve": lambda x: torch.linalg.solve(x, x[..., 0]),
    "solve, broadcast": lambda x: torch.linalg.solve(x, x[:1].sin()),
    "solve, one matrix": lambda x: torch.linalg.solve(x[0], x.sin()),
}


def check_matrices(table, x, placings):
    for name, fn in table.items():
        debug.fallbacks.clear()
        agree_at_once(fn, [x.clone().requires_grad_()], *[[placing] for placing in placings])
        assert not debug.fallbacks(), f"{name}: {debug.fallbacks()}"


def test_matrices_are_those_of_one_device():
    """One matrix whose rows or columns are sharded, and a batch whose batch, rows or columns are."""
    for n in (5, 3):
        check_matrices(ONE_MATRIX, solvable(smooth(n, n).detach()), [[S0, S1], [S1, R]])
    check_matrices(BATCHES, solvable(smooth(5, 3, 4).detach()), [[S0, S0], [S1, S2]])


def test_ctc_losses_are_those_of_one_device():
    """Lengths as numbers and as tensors, targets in rows and in one list. Of 4 ranks, one has no sequence."""
    scores, targets = smooth(7, 5, 4).detach().requires_grad_(), 1 + counting(torch.ones(3, 5)).t() % 3
    inputs, lengths = [7, 6, 7, 5, 7], [3, 1, 2, 0, 3]
    flat = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])

    def losses(x, rows, flat, *tensors):
        return [
            F.ctc_loss(x.log_softmax(2), *given, reduction=how, zero_infinity=True)
            for how in ("none", "mean")
            for given in ((rows, inputs, lengths), (flat, inputs, lengths), (rows, *tensors))
        ]

    given = [scores, targets, flat, torch.tensor(inputs), torch.tensor(lengths)]
    for x, y, z in (([S1, R], [S0, R], [R, R]), ([S2, S1], [S1, S0], [S0, R])):
        debug.fallbacks.clear()
        agree_at_once(losses, given, [x, y, z, [S0, S0], [R, S0]])
        assert not debug.fallbacks(), debug.fallbacks()


def test_the_ctc_loss_of_one_sequence_takes_lengths_without_dims():
    def loss(x, targets, *lengths):
        return F.ctc_loss(x.log_softmax(1), targets, *lengths)

    given = [smooth(7, 4).detach().requires_grad_(), torch.tensor([1, 2, 2]), torch.tensor(7), torch.tensor(3)]
    agree_at_once(loss, given, [[S0, S1], [S0, R], [R, R], [R, R]])


def test_a_singular_matrix_of_a_batch_is_named():
    """One flag is reduced; if it is set, the op says which matrix it was, as on one device."""
    x = solvable(smooth(5, 3, 3).detach())
    x[3] = 0
    with spmd.LocalTensorMode(4), pytest.raises(torch.linalg.LinAlgError, match=r"Batch element 3"):
        torch.linalg.inv(placed(x, [S0, R], mesh_of((2, 2))))


def test_results_stay_sharded():
    with spmd.LocalTensorMode(4):
        x = placed(solvable(smooth(8, 8).detach()), [S0, S0], mesh_of((2, 2)))
        assert str(torch.linalg.inv(x)._spec) == "f64[8@dp,tp, 8]"
        assert str(torch.lu_unpack(x, torch.ones_like(x[0], dtype=torch.int32))[1]._spec) == "f64[8@dp,tp, 8]"
        assert str(x.diagonal_scatter(x[0])._spec) == "f64[8@dp,tp, 8]"


def test_scans_of_uneven_blocks_send_totals():
    """Of 5 numbers on 4 ranks, blocks of 2, 2, 1 and 0, only totals are sent. A rank may have one number, or none."""
    debug.fallbacks.clear()
    with spmd.LocalTensorMode(4) as mode:
        for shape, placing in (((5,), [S0, S0]), ((2,), [S0, S0]), ((3, 4001), [S1, R]), ((4, 9), [S1, S1])):
            x = smooth(*shape).detach()
            y = placed(x, placing, mesh_of((2, 2)))
            sent = len(mode.sent)
            results = y.cumsum(-1), y.argmax(-1), y.max(-1)[0]
            assert max([each.nbytes for each in mode.sent[sent:]], default=0) <= 4 * 4 * 8
            for got, want in zip(results, (x.cumsum(-1), x.argmax(-1), x.max(-1)[0]), strict=True):
                assert all(torch.allclose(each, want) for each in every_rank(got))
    assert not debug.fallbacks()


COMPILED = {
    "scans": lambda x: (x.cumsum(0), x.cumsum(1), x.argmax(0), x.max(1)[0], x[0].logcumsumexp(0)),
    "masks": lambda x: (x.masked_scatter(x > 0, x.cos()), torch.nonzero_static(x > 0, size=4)),
    "joins": lambda x: (torch.block_diag(x, x[:2]), x.diagonal_scatter(x[0, :5], 1), torch.dist(x, x.sin())),
    "inverse": lambda x: (torch.linalg.inv_ex(x @ x.mT + torch.eye(5, dtype=x.dtype))[0], torch.vdot(x[0], x[1])),
    "recipes": lambda x: (
        F.pdist(x), x.put(counting(x[0]) - 2, x[0]), x.scatter_reduce(0, (x > 0).long(), x, "prod")
    ),
    "losses": lambda x: F.multi_margin_loss(x, (x[:, 0] > 0).long()),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_they_are_those_of_one_device(name):
    x = smooth(5, 7).detach()
    want = COMPILED[name](x)
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for d in (0, 1):
            got = spmd.compile(COMPILED[name], mesh, inputs={"x": {"dp": spmd.Shard(d)}})(x)
            for a, b in zip(*([y] if isinstance(y, torch.Tensor) else y for y in (got, want)), strict=True):
                assert all(torch.allclose(each, b) for each in every_rank(a))
