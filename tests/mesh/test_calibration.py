"""Machines are values, presets have names, and mistakes in files of machines are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.mesh import PRESETS, Compute, Link, Machine, Measured, Way
from spmd.mesh.calibration import load, machine_from_environment, machine_named, save
from spmd.mesh.machine import ALGORITHMS, COLLECTIVES, COPY, LocalOp

LINK = Link(0.5, 100.0)
RING = Way("ring", 6.0, (LINK,))

FILE = {
    "spmd_topology": 1,
    "name": "node 17",
    "nics_per_host": 8,
    "memory": {"hop_us": 3, "gb_per_s": 1000.0},
    "ways": [
        {
            "algorithm": "ring",
            "protocol": "LL",
            "base_us": 6.6,
            "links": [{"hop_us": 0.6, "gb_per_s": 87.7}, {"hop_us": 2.7, "gb_per_s": 19.3}],
        },
    ],
    "measured": [{"collective": "all_reduce", "ranks_per_host": 8, "hosts": 1, "lines": [[25.0, 0], [18, 1e-5]]}],
}


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(FILE))
    machine = Machine(
        "node 17",
        (Way("ring", 6.6, (Link(0.6, 87.7), Link(2.7, 19.3)), "LL"),),
        nics_per_host=8,
        measured=(Measured("all_reduce", 8, 1, ((25.0, 0.0), (18.0, 1e-5))),),
        memory=Link(3, 1000.0),
    )
    assert load(path) == machine_named(str(path)) == machine


@pytest.mark.parametrize("machine", PRESETS.values(), ids=PRESETS)
def test_a_preset_is_the_same_after_a_file(machine: Machine, tmp_path: Path) -> None:
    save(machine, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == machine
    assert machine_named(machine.name) is machine
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


numbers = st.floats(0, 1e6, allow_nan=False)
links = st.builds(Link, numbers, st.floats(1e-6, 1e6))
ways = st.builds(Way, st.sampled_from(ALGORITHMS), numbers, st.tuples(links, links), st.text(max_size=5))
curves = st.builds(
    Measured,
    st.sampled_from((*COLLECTIVES, COPY)),
    st.integers(1, 8),
    st.integers(1, 64),
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3),
    st.integers(1, 8),
    st.floats(0, 1),
)
counts = st.none() | st.integers(1, 16)


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=8),
    st.lists(ways, max_size=3),
    counts,
    counts,
    st.lists(curves, max_size=3, unique_by=lambda curve: curve.group),
    links,
)
def test_any_machine_is_the_same_after_a_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, more: list, nics: int | None, ranks: int | None, found: list,
    memory: Link,
) -> None:
    ring = Way("ring", 1.0, (LINK, LINK))
    compute = Compute(memory.gb_per_s, (("bfloat16", 989e3), ("float32", 67e3)))
    curve = LocalOp("pointwise", "float32", ((memory.hop_us, 0.0), (0.5, 1e-4)))
    ops = (curve, LocalOp("product", "float32", ((0.5, 1e-5),), us_per_byte=memory.hop_us))
    machine = Machine(name, (ring, *more), nics, ranks, tuple(found), memory, compute, ops)
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    save(machine, path)
    assert load(path) == machine and hash(load(path)) == hash(machine)


def test_products_of_an_older_file_have_no_bytes(tmp_path: Path) -> None:
    """It knows operations alone, and prices as it did."""
    path = tmp_path / "machine.json"
    path.write_text(changed(local_ops=[{"kind": "product", "dtype": "float32", "lines": [[4.0, 0.0], [3.0, 2e-5]]}]))
    [op] = load(path).local_ops
    assert op == LocalOp("product", "float32", ((4.0, 0.0), (3.0, 2e-5)))
    assert op.us(1e6, nbytes=1e6) == op.us(1e6) == 23.0


def changed(**more: object) -> str:
    return json.dumps({**FILE, **more})


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "Expecting property name"),
        ("[]", r"the file is \[\]; it must be an object"),
        (changed(spmd_topology=2), "spmd_topology is 2; it must be 1"),
        (changed(nicks_per_host=2), "the machine has 'nicks_per_host', which is unknown; its fields are name, ways"),
        (json.dumps({"spmd_topology": 1, "name": "m"}), "the machine lacks 'ways'"),
        (changed(name=3), "name is 3; it must be a text"),
        (changed(ways={}), "ways is {}; it must be a list"),
        (changed(ways=[3]), r"ways\[0\] is 3; it must be an object with algorithm, base_us, links, protocol"),
        (changed(ways=[{"algorithm": "ring", "base_us": "6", "links": []}]), "base_us is '6'; it must be a number"),
        (changed(ways=[{"algorithm": "star", "base_us": 6, "links": []}]), "no algorithm 'star'; choose one of direct"),
        (changed(ways=[{"algorithm": "ring", "base_us": 6, "links": [{"hop_us": 1}]}]), r"links\[0\] lacks 'gb_per_s'"),
        (changed(nics_per_host=1.5), "nics_per_host is 1.5; it must be an integer"),
        (changed(nics_per_host=True), "nics_per_host is True; it must be an integer"),
        (changed(memory={"gb_per_s": 3}), "memory lacks 'hop_us'"),
        (changed(nics_per_host=0), "nics_per_host and ranks_per_host must be at least 1"),
        (changed(measured=[{**FILE["measured"][0], "lines": [[1]]}]), r"lines\[0\] is \[1\]; it must be \[us"),
        (changed(measured=[{**FILE["measured"][0], "lines": [[1, -1]]}]), "at least 0 and finite"),
        (changed(measured=FILE["measured"] * 2), "is measured twice"),
        (changed(local_ops=[{"kind": "mm", "dtype": "float32", "lines": [[1, 0]]}]), "no kind of local op 'mm'"),
        (
            changed(local_ops=[{"kind": "product", "dtype": "float32", "lines": [[1, 0]], "us_per_byte": -1}]),
            "at least 0 and finite",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_the_environment_names_a_preset_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPMD_TOPOLOGY", raising=False)
    assert machine_from_environment() == PRESETS["textbook"]
    monkeypatch.setenv("SPMD_TOPOLOGY", "hopper")
    assert machine_from_environment() == PRESETS["hopper"]
    save(Machine("mine", (RING,)), tmp_path / "mine.json")
    monkeypatch.setenv("SPMD_TOPOLOGY", str(tmp_path / "mine.json"))
    assert machine_from_environment() == Machine("mine", (RING,))
    monkeypatch.setenv("SPMD_TOPOLOGY", "blackwel")
    with pytest.raises(ValueError, match=r"\$SPMD_TOPOLOGY is 'blackwel', .* Did you mean 'blackwell'"):
        machine_from_environment()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Link(-1, 1), "hop_us must be at least 0"),
        (lambda: Link(float("nan"), 1), "hop_us must be at least 0"),
        (lambda: Way("ring", float("inf"), (LINK,)), "base_us of ring is inf"),
        (lambda: Machine("m", ()), "one way or more"),
        (lambda: Machine("m", (RING, Way("ring", 1, (LINK, LINK)))), "links for the same levels"),
        (lambda: Machine("m", (Way("tree", 1, (LINK,)),)), "has no ring"),
        (lambda: Measured("gather", 1, 1, ((1, 1),)), "no collective 'gather'; choose one of all_gather"),
        (lambda: Measured("all_gather", 0, 1, ((1, 1),)), "must be at least 1"),
        (lambda: Measured("all_gather", 1, 1, ()), "give one line or more"),
    ],
)
def test_a_mistake_is_named(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_presets_are_nccls() -> None:
    """Bandwidths inside a host, in GB/s, of rings under LL, LL128 and Simple."""
    inside = {
        name: [way.links[0].gb_per_s for way in machine.ways if way.algorithm == "ring"]
        for name, machine in PRESETS.items()
    }
    assert inside == {
        "textbook": [87.7],
        "ampere": [87.7, 220.8, 240.0],
        "hopper": [141.0, 341.136, 370.8],
        "blackwell": [282.0, 664.056, 721.8],
    }
    copies = {name: machine.memory and machine.memory.gb_per_s for name, machine in PRESETS.items()}
    assert copies == {"textbook": None, "ampere": 866.6, "hopper": 1423.8, "blackwell": 3400.0}
    rings = (Way("ring", 6.6, (Link(0.6, 87.7), Link(2.7, 19.294))),)
    assert PRESETS["textbook"] == Machine("textbook", rings, compute=PRESETS["ampere"].compute)
