"""What is done to torch's default generator is done to the random numbers of DTensors, on all kinds of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ways import WAYS, run

import spmd
from spmd import LocalTensorMode, Shard
from spmd.mesh import current_rank, init_device_mesh
from spmd.mesh.rank import own_rank_state, rank_state
from spmd.sim import per_rank, run_ranks
from spmd.tensor.recipes import stream


def draw(n: int = 6) -> torch.Tensor:
    return spmd.rand(n, device_mesh=init_device_mesh("cpu", (4,)), placements=[Shard(0)]).full_tensor()


def whole(x: torch.Tensor) -> list:
    return x.reconcile().tolist() if hasattr(x, "reconcile") else x.tolist()


def seeded_and_set_back() -> dict:
    """Draws by name; equal names but for the last letter are equal draws, others are not."""
    out = {}
    torch.manual_seed(3)
    out["3 0a"] = draw()
    out["3 1a"] = draw()
    torch.manual_seed(3)
    torch.rand(700)  # plain numbers make no difference
    out["3 0b"] = draw()
    state = torch.get_rng_state()
    out["3 1b"] = draw()
    with torch.random.fork_rng(devices=[]):
        out["3 2a"] = draw()
        torch.manual_seed(4)
        out["4 0a"] = draw()
        spmd.manual_seed(2**40)
        out["wide 0a"] = draw()
        wide = torch.get_rng_state()
        out["wide 1a"] = draw()
    out["3 2b"] = F.dropout(draw(), 0.0)
    torch.set_rng_state(state)
    out["3 1c"] = draw()
    torch.set_rng_state(wide)
    torch.rand(5)
    out["wide 1b"] = draw()
    out["state"] = spmd.get_rng_state()
    torch.manual_seed(-3)
    out["none"] = spmd.get_rng_state()
    out["-3 0a"] = draw()
    torch.manual_seed(3)
    out["3 0c"] = draw()
    return {name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in out.items()}


@pytest.mark.parametrize("way", WAYS)
def test_torchs_seed_and_state_are_the_streams(way, gloo4):
    spmd.manual_seed(9)
    found = run(way, gloo4, seeded_and_set_back)
    assert found == [found[0]] * 4
    assert found[0].pop("none") is None and found[0].pop("state") == {"seed": 2**40, "drawn": 2}
    by_place: dict[str, list] = {}
    for name, x in found[0].items():
        assert by_place.setdefault(name[:-1], x) == x, name
    assert len({tuple(x) for x in by_place.values()}) == len(by_place) == 7


def test_a_state_of_another_process_is_continued(gloo4):
    torch.manual_seed(5)
    with own_rank_state():
        run_ranks(lambda rank: (draw(), rank_state()), 4)
        with LocalTensorMode(4):
            draw()
            state = torch.get_rng_state()
            want = whole(draw())
    assert gloo4.run(continued, state) == [want] * 4


def continued(rank: int, state: torch.Tensor) -> list:
    torch.set_rng_state(state)
    return draw().tolist()


def seeded_by_rank() -> list:
    torch.manual_seed(20 + current_rank())
    return draw().tolist(), spmd.get_rng_state()


@pytest.mark.parametrize("way", WAYS[1:])
def test_ranks_that_seed_differently_take_the_first_ones_seed(way, gloo4):
    found = run(way, gloo4, seeded_by_rank)
    assert found == [found[0]] * 4 and found[0][1] == {"seed": 20, "drawn": 1}


def set_back_by_one() -> str:
    torch.manual_seed(1)
    draw()
    state = torch.get_rng_state()
    draw()
    torch.set_rng_state(state)
    if current_rank() == 2:
        torch.manual_seed(1)
    try:
        draw()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("way", WAYS[1:])
def test_ranks_that_part_are_told(way, gloo4):
    for said in run(way, gloo4, set_back_by_one):
        assert "rank 0 has gone back to draw 1 of seed 1, but rank 2 a new seed of torch, 1. Call torch.manual" in said


def test_a_seed_on_one_rank_alone_is_an_error():
    def part(rank):
        torch.manual_seed(1)
        draw()
        if rank == 2:
            torch.manual_seed(1)
        draw()

    with pytest.raises(RuntimeError, match=r"rank 2 (calls|waits in) gather_objects"):
        run_ranks(part, 4)


def test_plain_numbers_of_simulated_ranks():
    """Seeds and states count for all ranks; a state brings back what each rank had, where they have parted."""
    g = torch.Generator()

    @per_rank
    def part():
        return torch.rand(current_rank())

    with LocalTensorMode(3):
        for seeded, generator in ((torch.manual_seed, None), (g.manual_seed, g)):
            seeded(0)
            a = torch.rand(3, generator=generator).reconcile()
            seeded(0)
            assert torch.equal(torch.rand(3, generator=generator).reconcile(), a)
        torch.manual_seed(1)
        part()
        state = torch.get_rng_state()
        spmd.manual_seed(2)
        draws = [torch.rand(2) for _ in range(2)]
        assert not torch.equal(draws[0].local[0], draws[0].local[1])
        torch.set_rng_state(state)
        again = [torch.rand(2) for _ in range(2)]
        assert all(torch.equal(x.local[r], y.local[r]) for x, y in zip(draws, again, strict=True) for r in range(3))
        torch.manual_seed(1)
        torch.rand(2).reconcile()


def test_the_seed_is_marked_in_its_upper_half_alone():
    """Its lower half is what torch draws from, so that seeding with it gives the same plain numbers."""
    torch.manual_seed(11)
    with LocalTensorMode(4):
        draw()
    assert torch.initial_seed() % 2**32 == 11
    torch.manual_seed(torch.initial_seed())
    marked = torch.rand(5)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(5), marked)


def test_many_draws_of_a_seed_have_a_mark():
    for place in ((0, 0), (2**32 - 1, 2**30 - 1), (5, 2**33 + 1), (2**63, 0)):
        at = stream.Stream(*place)
        assert stream._place(stream._mark(at)) == at
    assert [stream._place(seed % 2**64) for seed in (0, 11, 2**53, -1, -12345)] == [None] * 5
