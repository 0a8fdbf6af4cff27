"""The metadata of results is found once for all placements."""

from unittest import mock

import pytest
import torch

from spmd.mesh import init_device_mesh
from spmd.tensor.rules import meta
from spmd.tensor.spec import Spec, parse_spec

aten = torch.ops.aten
MESH = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
IMAGES = ["f32[4, 3, 8, 8]", "f32[4@dp, 3, 8, 8]", "f32[4, 3, 8, 8@dp]", "f32[4, 3, 8, 8] +sum@dp"]


def test_placements_do_not_matter():
    """A first call on other placements runs no op without data again."""
    meta.metas.clear()
    with mock.patch.object(meta, "_out_metas", wraps=meta._out_metas) as found:
        for text in IMAGES:
            out = meta.out_metas(aten.avg_pool2d.default, (parse_spec(text, MESH), [2, 2]), {}, torch.device("cpu"))
            assert out[0].shape == (4, 3, 4, 4)
    assert found.call_count == 1


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "static", "default dtype"])
def test_all_else_does(change):
    x = Spec.of(MESH, (4, 4), torch.int64)
    y = {
        "shape": Spec.of(MESH, (4, 5), torch.int64), "stride": Spec.of(MESH, (4, 4), torch.int64, stride=(1, 4)),
        "dtype": Spec.of(MESH, (4, 4), torch.int32),
    }.get(change, x)  # fmt: skip
    cpu, op = torch.device("cpu"), aten.cumsum.default
    before = torch.get_default_dtype()
    first = meta.out_metas(op, (x, 0), {}, cpu)
    assert meta.out_metas(op, (x, 0), {}, cpu) is first
    try:
        torch.set_default_dtype(torch.float64 if change == "default dtype" else before)
        again = meta.out_metas(op, (y, 1 if change == "static" else 0), {}, cpu)
    finally:
        torch.set_default_dtype(before)
    assert again is not first and again[0].shape == y.shape
