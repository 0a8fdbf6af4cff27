"""Calibration on real ranks: its measurements, its fit, and that all ranks have the same machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from workers import Pool

import spmd
from spmd.comm import measure
from spmd.comm.measure import Calibration, calibrate
from spmd.mesh import all_gather_cost, all_reduce_cost, copy_cost
from spmd.mesh.calibration import load, save
from spmd.mesh.machine import COLLECTIVES, LOCAL_OPS


def calibrated(rank: int) -> Calibration:
    return calibrate(spmd.init_device_mesh("cpu", (2, 2)), name="here", most_bytes=1 << 10, rounds=2)


def copied_to_host(rank: int) -> list[tuple[int, float]]:
    """As on a device with memory of its own, for which the host's stands in."""
    mesh = spmd.init_device_mesh("cpu", (4,))
    return measure._Timer(mesh, 1 << 18, measure.lower_quartile).host_copies(2, lambda: None)


def refused(rank: int, sizes: tuple[int, ...], backends: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda: backends)
        calibrate(spmd.init_device_mesh("cpu", sizes))


def test_a_mesh_is_calibrated(gloo4: Pool, tmp_path: Path) -> None:
    """All collectives on both kinds of group and copies, five sizes from 1 KiB on; every other size held out."""
    found, *others = gloo4.run(calibrated)
    machine = found.machine
    assert all(other == found for other in others) and machine.name == "here" and machine.levels == 1
    groups = {(curve.collective, curve.ranks_per_host, curve.hosts) for curve in machine.measured}
    assert groups == {("copy", 1, 1), *((collective, n, 1) for collective in COLLECTIVES for n in (2, 4))}

    sizes = [p.nbytes for p in found.points if (p.collective, p.group) == ("all_reduce", (4, 1, 1))]
    assert sizes == [2**k for k in range(10, 15)]
    assert all(point.us > 0 and point.predicted > 0 for point in found.points)
    assert len(found.held_out_errors) == sum(point.held_out for point in found.points) == 2 * len(groups)

    assert [dtype for dtype, _ in machine.compute.gflop_per_s] == ["float32", "bfloat16", "float64"]
    assert {op.kind for op in machine.local_ops} == set(LOCAL_OPS) and all(op.us(0.0) > 0 for op in machine.local_ops)
    assert machine.host is None
    assert machine.compute.gb_per_s == pytest.approx(2 * machine.memory.gb_per_s), "a copy reads and writes"

    save(machine, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == machine
    topology = spmd.init_device_mesh("cpu", (2, 2), topology=machine).topology
    costs = {"all_reduce": (all_reduce_cost, ((0, 1), topology)), "copy": (copy_cost, (topology,))}
    costs["all_gather"] = all_gather_cost, ((0, 1), topology)
    for point in found.points:
        if point.collective in costs and point.group in ((4, 1, 1), (1, 1, 1)):
            cost, rest = costs[point.collective]
            assert cost(point.nbytes, *rest) == pytest.approx(point.predicted)


def test_copies_to_host_memory_are_timed(gloo4: Pool) -> None:
    """From 64 KiB on, both ways, the same on all ranks; on a mesh of CPUs there is none to be timed."""
    found, *others = gloo4.run(copied_to_host)
    assert all(other == found for other in others)
    assert [nbytes for nbytes, _ in found] == [1 << 16, 1 << 18] and all(us > 0 for _, us in found)
    assert measure._link([(1 << 16, 6.0), (1 << 18, 9.0), (1 << 20, 21.0)]).hop_us == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("kind", ["pointwise", "product"])
@pytest.mark.parametrize("us", [[1.0, 4.0, 16.0, 64.0], [9.0, 1.0, 50.0, 20.0, 500.0], [5.0, 5.1, 5.2, 9.0, 30.0]])
def test_no_call_is_quicker_than_the_quickest_timed(kind: str, us: list[float]) -> None:
    """Also where the fit leaves nothing for a call alone, as in times that grow with the bytes or have much noise."""
    found = [(256.0 * 4**at, 64.0 * 4**at, each) for at, each in enumerate(us)]
    op = measure._local_op(kind, "float32", found)
    prices = [op.us(0.0), *[op.us(x, nbytes) for x, nbytes, _ in found]]
    assert prices[0] >= min(us) and prices == sorted(prices)


@pytest.mark.parametrize(
    "sizes, backends, message",
    [((2,), "cpu:gloo", "a mesh of 2 ranks in a job of 4"), ((4,), "cuda:nccl", r'init_process_group\("cpu:gloo,')],
    ids=["a part of the job", "no backend for the CPU"],
)
def test_what_cannot_be_calibrated_is_said(gloo4: Pool, sizes: tuple[int, ...], backends: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gloo4.run(refused, sizes, backends)
