"""DTensors that are pickled and copied: a block goes back to its rank or is refused, and views stay views."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from ways import WAYS, run, same

from spmd import DTensor, LocalTensor, LocalTensorMode, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.mesh import DeviceMesh, as_rank, current_rank
from spmd.sim import localize
from spmd.tensor.spec import spec_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]])


def saved_and_loaded(x: Any, **options) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


# ---- whose block it is ------------------------------------------------------------------------

FITS = {
    "sharded": ((5, 4), SQUARE, [S0, S0], {0: "0", 1: "1", 2: "2", 3: "3"}),
    "replicated": ((2, 2), SQUARE, [R, R], {0: "0123", 1: "0123", 2: "0123", 3: "0123"}),
    "replicated on one axis": ((4, 2), SQUARE, [R, S1], {0: "02", 1: "13", 2: "02", 3: "13"}),
    "terms of a sum": ((2, 2), SQUARE, [Partial(), R], {0: "01", 1: "01", 2: "23", 3: "23"}),
    "empty blocks at other places": ((3, 2), DeviceMesh("cpu", [0, 1, 2, 3]), [S0], {0: "0", 3: "3"}),
    "of some ranks": ((2, 2), DeviceMesh("cpu", [0, 1]), [S0], {0: "0", 1: "1", 2: "23", 3: "23"}),
}
"""By name: a layout, and the ranks that may load what a rank has saved."""


@pytest.mark.parametrize("name", FITS)
def test_a_block_is_loaded_on_ranks_that_have_it(name):
    """Elsewhere it is an error, where it would be taken for the rank's own."""
    shape, mesh, placements, fits = FITS[name]
    for by, ranks in fits.items():
        with as_rank(by, 4):
            local = torch.full(spec_of(mesh, placements, shape).local_shape_here(), float(by))
            data = pickle.dumps(DTensor(local, spec_of(mesh, placements, shape)))
        for here in range(4):
            with as_rank(here, 4):
                if str(here) in ranks:
                    assert torch.equal(pickle.loads(data)._local_tensor, local)
                else:
                    with pytest.raises(ValueError, match=f"rank {by} has saved .*rank {here}, which loads it, has"):
                        pickle.loads(data)


@pytest.mark.parametrize("local", [torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_block_that_contradicts_its_spec_is_refused(local):
    wrong = DTensor(local, spec_of(SQUARE, [S0, R], (4, 4)))
    for load in (pickled, saved_and_loaded):
        with pytest.raises(ValueError, match=r"rank 0 has a block \[2, 4\] of it.*contradicts the spec"):
            load(wrong)


def sent_to_all(rank: int, path: str) -> list:
    """What the ranks get of each other's blocks, and of files that each and one of them saved."""
    mesh = init_device_mesh("cpu", (4,))
    x, whole = distribute_tensor(torch.arange(6.0), mesh, [S0]), distribute_tensor(torch.arange(3.0), mesh)
    torch.save({"x": x, "whole": whole}, f"{path}/{rank}.pt")
    found = []
    for ask in (
        lambda: dist.all_gather_object([None] * 4, x),
        lambda: torch.load(f"{path}/{rank}.pt")["x"].full_tensor().tolist(),
        lambda: torch.load(f"{path}/{(rank + 1) % 4}.pt"),
    ):
        try:
            found.append(ask())
        except ValueError as error:
            found.append(str(error)[:23])
    dist.barrier()
    if rank == 0:
        torch.save(whole, f"{path}/whole.pt")
    dist.barrier()
    return [*found, torch.load(f"{path}/whole.pt").full_tensor().tolist()]


def test_blocks_do_not_change_ranks(gloo4, tmp_path):
    refused = "loading f32[6@dim0]: ra"
    want = [refused, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], refused, [0.0, 1.0, 2.0]]
    assert gloo4.run(sent_to_all, str(tmp_path)) == [want] * 4


# ---- views ------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "torch.save": saved_and_loaded}


def base_and_views(placements: list, name: str) -> list:
    """Copies of a tensor and of views of it, after writes into one of them and then into another."""
    base = distribute_tensor(torch.arange(8.0).reshape(4, 2), SQUARE, placements)
    view = base[1:]
    given = [view[:, 0], base, view]
    base.mul_(2)  # a view that was copied is not up to date now
    column, base_too, view_too = COPIES[name](given)
    view_too.add_(100)
    base_too[2].zero_()
    column.neg_()
    return [x.full_tensor() for x in (column, base_too, view_too, *given)]


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_views_are_views_of_the_copies(way, gloo4):
    """Of blocks, and of what had to be gathered first; the originals stay as they were."""
    for placements in ([R, R], [S1, R], [S0, R], [S0, S0], [S0, S1]):
        for name in COPIES:
            base = torch.arange(8.0).reshape(4, 2) * 2
            view, kept = base[1:], base.clone()
            view.add_(100)
            base[2].zero_()
            view[:, 0].neg_()
            want = [view[:, 0], base, view, kept[1:, 0], kept, kept[1:]]
            for found in run(way, gloo4, base_and_views, placements, name):
                assert same(found, want), (placements, name)


def test_a_view_alone_is_copied_with_what_it_shows():
    """Its base is not in the file, and nothing is sent to save it."""

    def body(copied):
        base = distribute_tensor(torch.arange(6.0), DeviceMesh("cpu", [0, 1]), [S0])
        view = base[1:]
        base.add_(1)
        again = copied(view)
        base.zero_()
        again.mul_(2)
        return again.full_tensor(), base.full_tensor()

    for copied in (copy.deepcopy, saved_and_loaded, pickled):
        with LocalTensorMode(2):
            found, base = body(copied)
        assert found.reconcile().tolist() == [4.0, 6.0, 8.0, 10.0, 12.0] and not base.reconcile().any()


# ---- plain tensors and modules on simulated ranks ---------------------------------------------

OUTSIDE = nn.Linear(3, 2)


def things() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (4,))
    return {
        "made outside": OUTSIDE.weight.detach(),
        "made inside": torch.arange(4.0) + mesh.get_local_rank(),
        "0-dim": torch.tensor(3),
        "module made outside": OUTSIDE,
        "module made inside": localize(nn.Linear(3, 2)),
        "distributed": distribute_tensor(torch.arange(6.0), mesh, [S0]),
        "parameter": nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [S0])),
        "dict": {"a": torch.ones(2), "b": [1, torch.zeros(1)]},
    }


def numbers_of(x: Any) -> Any:
    if isinstance(x, nn.Module):
        return {name: numbers_of(p) for name, p in x.named_parameters()}
    if isinstance(x, dict):
        return {name: numbers_of(y) for name, y in x.items()}
    x = x._local_tensor if isinstance(x, DTensor) else x
    return [each.tolist() for each in (x.local[r] if type(x) is LocalTensor else x for r in range(4))] if isinstance(
        x, torch.Tensor) else x  # fmt: skip


@pytest.mark.parametrize("load", [copy.deepcopy, pickled, saved_and_loaded], ids=["deepcopy", "pickle", "torch.save"])
def test_anything_is_copied_and_loaded_on_simulated_ranks(load):
    """Equal, of the same kind, and apart from the original; what is loaded is each rank's own."""
    with LocalTensorMode(4):
        for name, x in things().items():
            options = {"weights_only": False} if isinstance(x, nn.Module) and load is saved_and_loaded else {}
            y = load(x, **options)
            assert numbers_of(y) == numbers_of(x), name
            before = numbers_of(x)
            for p in y.parameters() if isinstance(y, nn.Module) else [y] if isinstance(y, torch.Tensor) else []:
                assert isinstance(p, nn.Parameter) == (isinstance(x, nn.Module) or name == "parameter")
                assert p.requires_grad == isinstance(p, nn.Parameter)
                p.detach().zero_()
                if load is not copy.deepcopy and not isinstance(p, DTensor):
                    p.detach().add_(current_rank())
            assert numbers_of(x) == before, name


def test_ranks_differ_in_what_they_have_loaded():
    """A tensor that is loaded inside is each rank's own; tensors that shared memory in the file still do."""
    x = torch.arange(4.0)
    file = io.BytesIO()
    torch.save([x, x[1:]], file)
    file.seek(0)
    with LocalTensorMode(2):
        whole, part = torch.load(file)
        part.add_(init_device_mesh("cpu", (2,)).get_local_rank())
        assert {rank: each.tolist() for rank, each in whole.local.items()} == {0: [0, 1, 2, 3], 1: [0, 2, 3, 4]}
        both = copy.deepcopy([whole, part])
        both[1].zero_()
        assert whole.local[1].tolist() == [0, 2, 3, 4] and both[0].local[1].tolist() == [0, 0, 0, 0]


def test_old_files_are_refused_on_simulated_ranks():
    """In them tensors come before their numbers; a copy for each rank would be made of nothing."""
    file = io.BytesIO()
    torch.save(torch.arange(4.0), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with LocalTensorMode(2), pytest.raises(RuntimeError, match="format before torch"):
        torch.load(file)


def test_a_copy_keeps_what_the_user_has_set():
    """Attributes of a LocalTensor, and gradients, but as with torch not those of a parameter."""
    x = nn.Parameter(LocalTensor({0: torch.ones(2), 1: torch.zeros(2)}))
    leaf = LocalTensor({0: torch.ones(2), 1: torch.zeros(2)}).requires_grad_()
    for each in (x, leaf):
        each.note, each.grad = "a", torch.zeros(2)
    for y in (copy.deepcopy(x), pickled(x)):
        assert isinstance(y, nn.Parameter) and y.note == "a"
    assert copy.deepcopy(leaf).grad is not None and copy.deepcopy(leaf).grad is not leaf.grad
    assert copy.deepcopy(x).grad is copy.deepcopy(nn.Parameter(torch.ones(2))).grad is None
