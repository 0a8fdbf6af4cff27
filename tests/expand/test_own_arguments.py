"""Ranks that give blocks of their own, as loaders give them that read other rows on each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workers import Pool

import spmd
from spmd import DTensor, LocalTensor, LocalTensorMode, PerRank, Replicate, Shard, init_device_mesh
from spmd.sim import run_ranks
from tests.expand.side_by_side import Net, seeded, train_step

ROWS = PerRank(Shard(0))
DP = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
OWN = {"x": {"dp": ROWS}, "y": {"dp": ROWS}}

Batch = tuple[torch.Tensor, torch.Tensor]


def batch(rows: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=g), torch.randint(0, 3, (rows,), generator=g)


def by_sizes(sizes: Sequence[int], seed: int) -> list[Batch]:
    """Blocks of these many rows."""
    return [batch(rows, 10 * seed + i) for i, rows in enumerate(sizes)]


def joined(blocks: list[Batch]) -> Batch:
    xs, ys = zip(*blocks, strict=True)
    return torch.cat(xs), torch.cat(ys)


def on_one_device(batches: list[list[Batch]]) -> list[float]:
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return [train_step(model, optimizer, *joined(blocks)).item() for blocks in batches]


def trained(mesh: spmd.DeviceMesh, batches: list[Batch], **how) -> tuple[list[float], spmd.CompiledStep]:
    """The losses of a training with a block of each rank, and the step."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = spmd.compile(train_step, mesh, **how)
    return [step(model, optimizer, *each).item() for each in batches], step


EQUAL = [[2] * 4] * 4
LAST_IS_SMALLER = [[2] * 4, [2] * 4, [2] * 4, [1] * 4, [2] * 4]
UNEVEN = [[2] * 4, [2] * 4, [4, 2, 1, 2], [4, 2, 1, 2], [1, 3, 1, 3], [9, 0, 0, 0], [0, 0, 1, 8], [3, 3, 3, 1], [2] * 4]
UNEVEN_FROM_THE_FIRST = [[1, 3, 1, 3], [1, 3, 1, 3], [2] * 4, [1, 3, 1, 3]]


@pytest.mark.parametrize("sizes", [EQUAL, LAST_IS_SMALLER, UNEVEN, UNEVEN_FROM_THE_FIRST])
@pytest.mark.parametrize("how", [{}, {"fully_shard": "dp"}], ids=["replicated", "sharded"])
def test_blocks_are_the_parts_of_a_tensor(sizes: list[list[int]], how: dict) -> None:
    batches = [by_sizes(each, seed) for seed, each in enumerate(sizes)]
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        given = [tuple(LocalTensor(dict(enumerate(x))) for x in zip(*blocks, strict=True)) for blocks in batches]
        losses, _ = trained(mesh, given, inputs={"x": ROWS, "y": ROWS}, **how)
    assert losses == pytest.approx(on_one_device(batches), rel=1e-5)


# What the inputs say, and which block each of four ranks gives.
ON_TWO_AXES: dict[str, tuple[dict, list[int]]] = {
    "rows over dp": (OWN, [0, 0, 1, 1]),
    "in the order of the mesh": ({"x": [ROWS, Replicate()], "y": [ROWS, Replicate()]}, [0, 0, 1, 1]),
    "rows over dp, parts of rows over tp": ({"x": {"dp": ROWS, "tp": Shard(1)}, "y": {"dp": ROWS}}, [0, 0, 1, 1]),
    "rows over dp, and these over tp": ({"x": {"dp": ROWS, "tp": Shard(0)}, "y": {"dp": ROWS}}, [0, 0, 1, 1]),
    "rows over tp": ({"x": {"tp": ROWS}, "y": {"tp": ROWS}}, [0, 1, 0, 1]),
    "rows over both": ({"x": ROWS, "y": ROWS}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("inputs, places", ON_TWO_AXES.values(), ids=ON_TWO_AXES)
def test_blocks_lie_along_axes(inputs: dict, places: list[int]) -> None:
    sizes = [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2], [5, 1, 0, 1], [1, 2, 2, 2]]
    batches = [by_sizes(each[: len(set(places))], seed) for seed, each in enumerate(sizes)]
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        given = [
            tuple(LocalTensor({r: blocks[i][k] for r, i in enumerate(places)}) for k in range(2)) for blocks in batches
        ]
        losses, _ = trained(mesh, given, inputs=inputs)
    assert losses == pytest.approx(on_one_device(batches), rel=1e-5)


def test_blocks_may_lie_along_two_dims() -> None:
    """Rows over dp, parts of rows over tp: a grid of blocks, uneven in both."""
    whole = torch.arange(7 * 9.0).view(7, 9)
    blocks = [part for rows in whole.split([5, 2]) for part in rows.split([8, 1], 1)]
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(lambda x: x * 2, mesh, inputs={"x": {"dp": ROWS, "tp": PerRank(Shard(1))}})
        found = step(LocalTensor(dict(enumerate(blocks))))
        assert str(found._spec) == "f32[7@dp, 9@tp]"
        assert torch.equal(found.full_tensor().reconcile(), whole * 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_blocks_have_any_dtype(dtype: torch.dtype) -> None:
    parts = [torch.arange(n).view(-1, 1).expand(n, 3).to(torch.float32).to(dtype) for n in (3, 0, 5, 1)]
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(lambda batch: batch["x"].clone(), mesh, inputs={"batch.x": ROWS})
        found = step({"x": LocalTensor(dict(enumerate(parts)))})
        assert torch.equal(found.full_tensor().reconcile().view(torch.uint8), torch.cat(parts).view(torch.uint8))


def test_equal_blocks_are_not_copied() -> None:
    def rank(r: int) -> tuple[bool, int]:
        x = torch.ones(2, 3)
        step = spmd.compile(lambda x: x, init_device_mesh("cpu", (2,)), inputs={"x": ROWS})
        return step(x).to_local().data_ptr() == x.data_ptr(), step(torch.ones(5, 3)).shape[0]

    assert run_ranks(rank, 2) == [(True, 10)] * 2


def test_a_plan_takes_blocks_as_equal() -> None:
    """No other rank takes part."""
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    program = spmd.compile(lambda x: x.sum(), mesh, inputs={"x": ROWS}).program_for(torch.ones(3, 2))
    assert str(program.inputs[0][1]) == "f32[6@dp, 2]"


# ---- real ranks -------------------------------------------------------------------------------


def loader(rank: int) -> list[Batch]:
    """The batches of a rank, of two epochs, as for DistributedDataParallel. The last ones are smaller."""
    x, y = batch(22, 0)
    sampler = DistributedSampler(TensorDataset(x, y), num_replicas=4, rank=rank, seed=3)
    batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches += [tuple(each) for each in DataLoader(sampler.dataset, batch_size=2, sampler=sampler)]
    return batches


def of_loaders() -> list[list[Batch]]:
    return [list(blocks) for blocks in zip(*map(loader, range(4)), strict=True)]


def uneven_of_ranks() -> list[list[Batch]]:
    return [by_sizes(each, seed) for seed, each in enumerate(UNEVEN[1:6])]


def train_on_own(rank: int) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    of_loader, _ = trained(mesh, loader(rank), inputs=OWN)
    uneven, _ = trained(mesh, [blocks[rank] for blocks in uneven_of_ranks()], inputs=OWN, fully_shard="dp")
    return of_loader, uneven


def test_a_distributed_sampler_feeds_a_step(gloo4: Pool) -> None:
    wanted = on_one_device(of_loaders()), on_one_device(uneven_of_ranks())
    for of_loader, uneven in gloo4.run(train_on_own):
        assert of_loader == pytest.approx(wanted[0], rel=1e-5)
        assert uneven == pytest.approx(wanted[1], rel=1e-5)


def kept_between(folder: str) -> list:
    def rank(r: int) -> tuple[list[float], int]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        losses, step = trained(mesh, [blocks[r] for blocks in uneven_of_ranks()], inputs=OWN, cache=folder)
        if r == 0:
            step.save(f"{folder}/saved")
        return losses, len(step.programs)

    return run_ranks(rank, 4)


def test_programs_are_kept(tmp_path) -> None:
    first, again = (kept_between(str(tmp_path)) for _ in range(2))
    assert first == again
    assert first[0][0] == pytest.approx(on_one_device(uneven_of_ranks()), rel=1e-5)

    def loaded(r: int) -> list[float]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = seeded(Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = spmd.load_step(f"{tmp_path}/saved", train_step, mesh)
        return [step(model, optimizer, *blocks[r]).item() for blocks in uneven_of_ranks()]

    assert run_ranks(loaded, 4)[0] == pytest.approx(first[0][0], rel=1e-6)


# ---- what is said -----------------------------------------------------------------------------


def own_taken_as_global(call: int, sizes: Sequence[int] = (2, 2, 2, 2)) -> None:
    """Each rank gives its own rows from a call on, and inputs do not say so."""
    def rank(r: int) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        given = [batch(2, seed) if seed < call else by_sizes(sizes, seed)[r] for seed in range(6)]
        trained(mesh, given, inputs=DP)

    run_ranks(rank, 4)


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 2, 2, 1)])
def test_own_rows_are_not_taken_for_the_batch(call: int, sizes: Sequence[int]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)differ") as error:
        own_taken_as_global(call, sizes)
    if sizes == (2, 2, 2, 2):
        said = r"x differs between ranks: .* without a DistributedSampler; or, .*{\"x\": spmd.PerRank\(Shard\(0\)\)}"
        assert re.search(said, str(error.value)), error.value


def test_later_calls_compare_nothing() -> None:
    own_taken_as_global(3)


def test_what_no_program_reads_may_differ() -> None:
    """Such as notes of each rank, which the step is given."""
    def rank(r: int) -> float:
        step = spmd.compile(lambda x, notes: x.sum(), init_device_mesh("cpu", (2,)))
        return step(torch.ones(4), torch.full((3,), float(r))).item()

    assert run_ranks(rank, 2) == [4.0, 4.0]


def of_ranks(blocks: Sequence, inputs: dict, fn=lambda x: x * 2, shape: tuple[int, ...] = (4,)) -> list:
    names = ("dp", "tp")[: len(shape)]

    def rank(r: int) -> torch.Tensor:
        x = blocks[r]
        step = spmd.compile(fn, init_device_mesh("cpu", shape, mesh_dim_names=names), inputs=inputs)
        return step(x)

    return run_ranks(rank, 4)


ZEROS = torch.zeros(2, 3)

# What four ranks give, what inputs say, on which mesh, and what is wrong.
WRONG: dict[str, tuple] = {
    "other dtype": ([ZEROS, ZEROS, ZEROS.long(), ZEROS], {"x": ROWS}, (4,), r"x \(torch.float32\), but rank 2 of x"),
    "other width": ([ZEROS, ZEROS, ZEROS[:, :2], ZEROS], {"x": ROWS}, (4,), r"block of \[2, 3\], but rank 2 one of"),
    "other rank": ([ZEROS, ZEROS[0], ZEROS, ZEROS], {"x": ROWS}, (4,), r"\[2, 3\], but rank 1 one of \[3\]"),
    "other rows over tp": ([ZEROS, ZEROS[:1], ZEROS, ZEROS], {"x": {"dp": ROWS}}, (2, 2), "over dp alone"),
    "other values over tp": ([ZEROS, ZEROS + 1, ZEROS, ZEROS], {"x": {"dp": ROWS}}, (2, 2), "x differs .*PerRank"),
    "no such dim": ([ZEROS] * 4, {"x": PerRank(Shard(2))}, (4,), "argument x.*allowed dims"),
    "with a gradient": ([ZEROS, ZEROS.clone().requires_grad_(), ZEROS, ZEROS], {"x": ROWS}, (4,), r"x.detach\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("blocks, inputs, shape, said", WRONG.values(), ids=WRONG)
def test_blocks_that_make_no_tensor_are_refused(blocks: list, inputs: dict, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){said}"):
        of_ranks(blocks, inputs, shape=shape)


def test_a_block_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"writes into the argument x.a, .* x.a = x.a.clone\(\)"):
        of_ranks([{"a": ZEROS.clone()} for _ in range(4)], {"x.a": ROWS}, lambda x: x["a"].mul_(2))


def test_a_dtensor_is_no_block() -> None:
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(TypeError, match="x is a DTensor, and inputs say PerRank"):
            spmd.compile(lambda x: x, mesh, inputs={"x": ROWS})(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))


def test_one_tensor_is_placed_once() -> None:
    with LocalTensorMode(2):
        x = torch.ones(2)
        with pytest.raises(ValueError, match="y and x are one tensor, and inputs place them in two ways"):
            spmd.compile(lambda x, y: x + y, init_device_mesh("cpu", (2,)), inputs={"x": ROWS})(x, x)


@pytest.mark.parametrize("wrong", [Replicate(), 0, Shard(0, blocks=3)])
def test_blocks_lie_along_a_dim(wrong: object) -> None:
    with pytest.raises(TypeError, match="takes the dim along which"):
        PerRank(wrong)
