"""Costs between all specs of a tensor at once are those of the plans."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from spmd import Partial, Replicate, Shard, init_device_mesh
from spmd.mesh import MeshTopoInfo
from spmd.tensor.redistribute.distances import distances
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import spec_of

LETTERS = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize("machine", ["textbook", "hopper"])
@pytest.mark.parametrize("shape", [(8, 64), (6, 10)])
@pytest.mark.parametrize("sizes", [(4,), (2, 4), (1, 2)])
def test_distances_are_the_costs_of_plans(sizes, shape, machine):
    """For even and uneven shards. A plan may be cheaper by a strided detour, which `distances` leaves out."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=machine))
    specs = list(dict.fromkeys(spec_of(mesh, p, shape, torch.float32)
                               for p in itertools.product(LETTERS, repeat=mesh.ndim)))  # fmt: skip
    found = distances(specs)
    pairs = list(itertools.product(range(len(specs)), repeat=2))
    for i, j in random.Random(0).sample(pairs, min(40, len(pairs))):
        found_us, us = found[i, j], plan(specs[i], specs[j]).modelled_us
        assert found_us >= us - 1e-4 * us - 1e-4
        assert found_us <= us * 1.3 + 1e-4
