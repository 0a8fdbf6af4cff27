"""torch.distributed.checkpoint saves and loads DTensors: any layout, on any mesh, with torch's own DTensor as peer."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from spmd import DTensor, LocalTensorMode, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.mesh import DeviceMesh, current_rank
from spmd.sim import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE, SQUARE, PAIR = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [2, 1])

LAYOUTS = {
    "even": ((8, 6), LINE, [S0], {}),
    "uneven": ((5, 3), LINE, [S0], {}),
    "uneven, last dim": ((3, 7), LINE, [S1], {}),
    "empty blocks": ((1, 3), LINE, [S0], {}),
    "empty blocks that start where others do": ((5, 2), SQUARE, [S0, S0], {}),
    "no elements": ((0, 4), LINE, [S1], {}),
    "no dims": ((), SQUARE, [R, R], {}),
    "two dims": ((5, 7), SQUARE, [S1, S0], {}),
    "other order of axes": ((7, 2), SQUARE, [S0, S0], {0: (1, 0)}),
    "units": ((18,), LINE, [Shard(0, unit=3)], {}),
    "partly replicated": ((6, 5), SQUARE, [R, S1], {}),
    "packed": ((12, 4), LINE, [Shard(0, blocks=3)], {}),
    "packed, uneven": ((10, 4), SQUARE, [Shard(0, blocks=2)] * 2, {}),
    "packed columns": ((4, 8), SQUARE, [S0, Shard(1, blocks=2)], {}),
    "replicated": ((4, 3), LINE, [R], {}),
    "some of the ranks": ((5, 4), PAIR, [S0], {}),
}  # fmt: skip
"""By name: shape, mesh, placements, order of axes."""


def number(name: str) -> torch.Tensor:
    """The tensor of this name: numbers that no other has."""
    shape = LAYOUTS[name][0]
    first = 1000.0 * list(LAYOUTS).index(name)
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


def placed(x: torch.Tensor, mesh, placements, order=None) -> DTensor:
    """x in this layout, on all ranks; outside the mesh an empty block."""
    if current_rank() not in mesh:
        return DTensor.elsewhere(mesh, placements, x.shape, x.dtype)
    replicated = distribute_tensor(x, mesh, src_data_rank=None)
    return replicated.redistribute(placements=placements, order=order).detach()


def all_placed(values, layout_of=lambda name: name) -> dict[str, DTensor]:
    return {name: placed(values(name), *layout(name, layout_of(name))[1:]) for name in LAYOUTS}


def layout(name: str, other: str):
    """The layout of `other`; that of `name` itself where the dims are not those."""
    return LAYOUTS[other if len(LAYOUTS[other][0]) == len(LAYOUTS[name][0]) else name]


def next_layout(name: str) -> str:
    names = list(LAYOUTS)
    return names[(names.index(name) + 1) % len(names)]


def zeros(name: str) -> torch.Tensor:
    return torch.zeros(LAYOUTS[name][0])


def theirs(values) -> dict[str, torch.Tensor]:
    """The tensors as torch's own DTensors, sharded over four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    tensors = {name: values(name) for name in LAYOUTS}
    return {k: distribute_tensor(x, mesh, [Shard(x.ndim - 1) if x.ndim else Replicate()]) for k, x in tensors.items()}


def wrong(found: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are not what was saved."""
    full = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()
            if not isinstance(x, DTensor) or current_rank() in x.device_mesh}  # fmt: skip
    return [name for name, x in full.items() if not torch.equal(x, number(name))]


def save_and_load(rank: int, path: str) -> list[str]:
    found: list[str] = []

    def check(what: str, loaded: dict, source: str) -> None:
        dcp.load(loaded, checkpoint_id=f"{path}/{source}")
        found.extend(f"{what}: {name}" for name in wrong(loaded))

    ours = all_placed(number)
    dcp.save(ours, checkpoint_id=f"{path}/ours")
    dcp.save(theirs(number), checkpoint_id=f"{path}/theirs")
    pending = dcp.async_save(ours, checkpoint_id=f"{path}/async")
    for x in ours.values():
        x.zero_()  # not what is on its way to the disk
    pending.result()
    check("the same layout", ours, "ours")
    check("another layout", all_placed(zeros, next_layout), "ours")
    check("plain", {name: zeros(name) for name in LAYOUTS}, "ours")
    check("torch's, loaded by us", all_placed(zeros), "theirs")
    check("ours, loaded by torch", theirs(zeros), "ours")
    check("saved in the background", all_placed(zeros, next_layout), "async")
    return found


def test_any_layout_is_saved_and_loaded(gloo4, tmp_path):
    """Loaded in the same and in other layouts, as plain tensors, and by torch's DTensor; and what torch's saved."""
    assert gloo4.run(save_and_load, str(tmp_path)) == [[]] * 4


def views(rank: int, path: str) -> list:
    """A view that had to be copied: what is saved, what it shows after its base was loaded, and loading into it."""
    base = placed(torch.arange(6.0), LINE, [S0])
    view = base[1:]
    base.mul_(2)  # the copy is not up to date when it is saved
    dcp.save({"view": view, "base": base}, checkpoint_id=path)
    saved = {"view": torch.zeros(5)}
    dcp.load(saved, checkpoint_id=path)
    base.zero_()
    dcp.load({"base": base}, checkpoint_id=path)
    with pytest.raises(dcp.api.CheckpointException, match="load into the tensor that it is a view of"):
        dcp.load({"view": view}, checkpoint_id=path)
    return [saved["view"].tolist(), view.full_tensor().tolist()]


def test_views_that_were_copied(gloo4, tmp_path):
    want = [2.0, 4.0, 6.0, 8.0, 10.0]
    assert gloo4.run(views, str(tmp_path)) == [[want, want]] * 4


# ---- errors -----------------------------------------------------------------------------------


def test_a_partial_is_refused():
    """It has no values yet."""
    mesh = DeviceMesh("cpu", [0, 1])
    term = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    for ask in (lambda: create_default_local_save_plan({"x": term}, True), term.__create_chunk_list__):
        with pytest.raises(TypeError, match=r"f32\[2\] \+sum@dim0 is still to be reduced.*redistribute"):
            ask()


def test_one_rank_alone_saves_no_block():
    """Without torch.distributed torch takes each rank for the only one."""

    def rank(_):
        x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [S0])
        return create_default_local_save_plan({"x": x}, True)

    with pytest.raises(RuntimeError, match="only this rank's block would be saved"):
        run_ranks(rank, 4)


def some_ranks_save(rank: int, path: str) -> list[str]:
    """What is said where a rank saves alone, or some ranks do; and what such saves are right for."""
    rows, whole = (distribute_tensor(torch.arange(8.0), SQUARE, places) for places in ([S0, R], [R, R]))
    said = []
    for kind, group in (("alone", None), ("pair", SQUARE.get_group(1)), ("column", SQUARE.get_group(0))):
        at = f"{path}/{kind}{rank if kind == 'alone' else min(torch.distributed.get_process_group_ranks(group))}"
        options = {"no_dist": True} if group is None else {"process_group": group}
        dcp.save({"whole": whole}, checkpoint_id=at, **options)
        try:
            dcp.save({"rows": rows}, checkpoint_id=at, **options)
            loaded = {"rows": torch.zeros(8)}
            dcp.load(loaded, checkpoint_id=at, no_dist=True)
            said.append(f"{kind}: {loaded['rows'].sum().item()}")
        except (RuntimeError, dcp.api.CheckpointException) as error:
            found = re.search(r"the blocks of ranks .*? would not be saved, because only ranks .*? save", str(error))
            said.append(f"{kind}: {found[0] if found else error}")
    return said


def test_blocks_of_ranks_that_do_not_save_are_missed(gloo4, tmp_path):
    """Two ranks of a column have all rows between them; of what is replicated each rank has all."""
    said = gloo4.run(some_ranks_save, str(tmp_path))
    lost = "the blocks of ranks [{}] would not be saved, because only ranks {} save"
    for rank, pair in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        others = "2, 3" if rank < 2 else "0, 1"
        want = [f"alone: {lost.format(others, [rank])}", f"pair: {lost.format(others, pair)}", "column: 28.0"]
        assert said[rank] == want, said[rank]


def test_simulated_ranks_have_no_files():
    with LocalTensorMode(4):
        x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [S0])
        with pytest.raises(RuntimeError, match="on ranks that one process simulates"):
            create_default_local_save_plan({"x": x}, True)
