"""Specs and their blocks: the boundaries of torch.chunk, one notation, one object for equal content."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.comm.chunk import aligned, block, blocks, divisors, smallest_unit
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor import spec as spec_module
from spmd.tensor.placement import Partial, Replicate, Shard
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import DTYPES, Spec, parse_spec, spec_of, strides_like

MESH = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("dp", "tp", "pp"))

sizes = st.integers(0, 60)
units = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
grids = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
many = settings(max_examples=300, deadline=None, derandomize=True)


# ---- blocks -----------------------------------------------------------------------------------


def chunked(x: torch.Tensor, ns: tuple[int, ...]) -> list[torch.Tensor]:
    """Nested torch.chunk; the chunks that torch leaves out are empty."""
    if not ns:
        return [x]
    parts = list(x.chunk(ns[0])) if len(x) else []
    parts += [x[:0]] * (ns[0] - len(parts))
    return [piece for part in parts for piece in chunked(part, ns[1:])]


@many
@given(sizes, units, grids)
def test_blocks_are_nested_chunks_of_units(count, unit, ns):
    """As torch.chunk divides groups of rows that stay together, one axis after the other."""
    rows = torch.arange(count * unit).view(count, unit)
    want = [part.flatten().tolist() for part in chunked(rows, ns)]
    got = [list(range(start, start + length)) for start, length in blocks(count * unit, unit, ns)]
    assert got == want


@many
@given(sizes, units, grids)
def test_blocks_follow_each_other_and_cover_the_dim(count, unit, ns):
    """Each block begins where the one before it ends. `block` returns one of them."""
    found = blocks(count * unit, unit, ns)
    assert [start for start, _ in found] == [0, *accumulate(length for _, length in found)][:-1]
    assert sum(length for _, length in found) == count * unit
    assert found == [block(count * unit, unit, ns, at) for at in product(*map(range, ns))]


@many
@given(sizes, units, grids)
def test_the_canonical_unit_depends_on_the_blocks_alone(count, unit, ns):
    """The unit is the smallest one with the same blocks. So two specs with the same blocks are one object."""
    size = count * unit
    found = smallest_unit(size, unit, ns)
    alike = [u for u in range(1, size + 1) if size % u == 0 and blocks(size, u, ns) == blocks(size, unit, ns)]
    assert found == (min(alike) if alike else 1)
    assert smallest_unit(size, found, ns) == found


@many
@given(sizes, units, units, grids)
def test_aligned_says_whether_blocks_begin_at_multiples(count, unit, to, ns):
    assert aligned(count * unit, unit, ns, to) == all(s % to == 0 for s, _ in blocks(count * unit, unit, ns))


def test_divisors_of_a_large_number_are_found_at_once():
    """Flattening a large tensor gives large units."""
    assert divisors(1) == [1] and divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert len(divisors(2**20 * 3**5)) == 126


@pytest.mark.parametrize(
    "shape, placements, want",
    [
        ((5, 4), [Shard(0), Shard(0)], [1, 1, 1, 1, 1, 0]),  # 3 and 2 rows, then 1, 1, 1 and 1, 1, 0
        ((4, 5), [Shard(1), Shard(1)], [1, 1, 1, 1, 1, 0]),
        ((8, 7), [Replicate(), Shard(1)], [3, 3, 1, 3, 3, 1]),
        ((20, 4), [Shard(0, unit=5), Shard(0, unit=5)], [5, 5, 0, 5, 5, 0]),
    ],
    ids=str,
)
def test_local_shapes_are_nested_and_not_flat(shape, placements, want):
    """Five rows on 2 x 3 ranks are not a chunk over six."""
    spec = spec_of(MESH, [*placements, Replicate()], shape)
    dim = next(p.dim for p in placements if isinstance(p, Shard))
    assert [spec.local_shape(at)[dim] for at in MESH.coordinates()] == want


# ---- one object -------------------------------------------------------------------------------


@st.composite
def specs(draw) -> Spec:
    """Any spec on the mesh: axes on dims in any order, units, partials, dtypes."""
    ndim = draw(st.integers(0, 3))
    fates = [draw(st.sampled_from(["r", "p", *range(ndim)])) for _ in range(MESH.ndim)]
    order = draw(st.permutations(range(MESH.ndim)))
    dims = [tuple(a for a in order if fates[a] == d) for d in range(ndim)]
    cut = [draw(units) for _ in range(ndim)]
    shape = [draw(st.integers(0, 9)) * unit for unit in cut]
    kinds = draw(st.sampled_from([["sum"], ["sum", "avg"], ["max"], ["min"], ["product"]]))
    partial = [(a, kinds[a % len(kinds)]) for a in range(MESH.ndim) if fates[a] == "p"]
    allowed = [dtype for dtype in DTYPES if dtype.is_floating_point]
    return Spec.of(MESH, shape, draw(st.sampled_from(allowed)), dims=dims, units=cut, partial=partial)


@many
@given(specs())
def test_a_spec_reads_back_as_itself(spec):
    """The notation has all of a contiguous spec, and equal specs are one object."""
    assert parse_spec(str(spec), MESH) is spec


@many
@given(specs())
def test_a_pickled_spec_is_the_same_object(spec):
    assert pickle.loads(pickle.dumps(spec)) is spec


@many
@given(specs())
def test_placements_spell_a_spec_whose_axes_are_in_mesh_order(spec):
    """From placements to specs and back. Placements cannot express the order of several axes on one dim."""
    again = spec_of(MESH, spec.placements, spec.shape, spec.dtype)
    in_order = all(list(axes) == sorted(axes) for axes in spec.dims)
    assert (again is spec) == in_order
    assert [set(axes) for axes in again.dims] == [set(axes) for axes in spec.dims] and again.partial == spec.partial


@many
@given(specs())
def test_blocks_of_all_ranks_make_the_tensor(spec):
    """The number of ranks that have an element is the number that replicate it or have a term of it."""
    held = torch.zeros(spec.shape, dtype=torch.int64)
    for at in MESH.coordinates():
        part = held
        for dim in range(spec.ndim):
            part = part.narrow(dim, *spec.block(dim, at))
        assert tuple(part.shape) == spec.local_shape(at)
        part += 1
    copies = MESH.size() // prod(MESH.shape[a] for axes in spec.dims for a in axes)
    assert (held == copies).all()


@many
@given(specs())
def test_there_is_a_plan_to_and_from_every_spec(spec):
    """It holds for any units and any order of axes."""
    whole = spec.with_layout()
    assert plan(spec, whole).dst is whole and plan(whole, spec).dst is spec


def test_specs_made_in_threads_are_one():
    """Specs are interned also when ranks are threads."""
    for size in range(40):
        made = run_ranks(lambda rank, size=size: Spec.of(MESH, (size, 7), torch.float32, dims=((0,), ())), 4)
        assert len({id(s) for s in made}) == 1
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: Spec.of(MESH, (1000 + i % 3,), torch.float32), range(200)))
    assert len({id(s) for s in made}) == 3


def test_equal_meshes_give_one_spec():
    """Meshes with equal content give the same spec."""
    other = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("dp", "tp", "pp"))
    assert other is not MESH and parse_spec("f32[8@dp]", other) is parse_spec("f32[8@dp]", MESH)


def test_specs_that_nobody_holds_are_forgotten():
    """Interned specs are freed when nothing refers to them."""
    gc.collect()
    before = len(spec_module._interned)
    kept = [Spec.of(MESH, (size, 12345), torch.float32) for size in range(50)]
    assert len(spec_module._interned) == before + len(kept)
    del kept
    gc.collect()
    assert len(spec_module._interned) <= before


def test_axes_of_one_rank_leave_no_trace():
    """A dim that is sharded over one rank is replicated."""
    assert parse_spec("f32[8@pp] +sum@dp", MESH) is parse_spec("f32[8] +sum@dp", MESH)


# ---- strides ----------------------------------------------------------------------------------


@many
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_a_block_lies_in_memory_as_its_tensor_does(shape, rng):
    """The same order of dims, without gaps: the strides of torch's `empty_like` that preserves strides."""
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    want = torch.empty_like(x).stride()
    got = strides_like(x.shape, x.stride())
    assert [s for s, n in zip(got, x.shape, strict=True) if n > 1] == [
        s for s, n in zip(want, x.shape, strict=True) if n > 1
    ]  # the stride of a dim of size 1 has no meaning


def test_what_is_moved_is_contiguous_and_what_stays_keeps_its_strides():
    turned = Spec.of(MESH, (4, 6), torch.float32, stride=(1, 4), dims=((0,), ()))
    assert turned.moved_to(((0,), ())) is turned
    assert turned.moved_to().stride == (6, 1) and turned.same_layout(parse_spec("f32[4@dp, 6]", MESH))


# ---- errors -----------------------------------------------------------------------------------

NO_SPECS = {
    "f32(8)": "is no spec; one reads like",
    "x32[8]": "is no spec",
    "f32[8@ep]": "no axis 'ep'",
    "f32[8@dp, 8@dp]": "axis dp is used twice",
    "f32[8@dp] +sum@dp": "axis dp is used twice",
    "f32[9@dp/2]": "9 does not divide into units of 2",
    "f32[8] +mean@dp": "mean is no reduce kind",
    "f32[8] +sum@dp +max@tp": "sum and max in one spec",
    "i64[8] +avg@dp": "no average of i64",
    "b8[8] +sum@dp": "no sum of b8",
    "c64[8] +max@dp": "no maximum of c64",
}


@pytest.mark.parametrize("text", NO_SPECS)
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(ValueError, match=NO_SPECS[text]):
        parse_spec(text, MESH)


BAD_PLACEMENTS = {
    "2 placements .* for a mesh of 3 axes": [Shard(0), Replicate()],
    "Shard.2. on dp: the tensor has 2 dims; allowed dims are -2 to 1": [Shard(2), Replicate(), Replicate()],
    "placement on tp is 0; use Shard": [Replicate(), 0, Replicate()],
    "two axes shard dim 0 in units of 2 and 4": [Shard(0, unit=2), Shard(0, unit=4), Replicate()],
}


@pytest.mark.parametrize("text", BAD_PLACEMENTS)
def test_placements_that_do_not_fit_are_refused(text):
    with pytest.raises((ValueError, TypeError), match=text):
        spec_of(MESH, BAD_PLACEMENTS[text], (8, 4))


def test_negative_dims_count_from_the_end():
    assert spec_of(MESH, [Shard(-1), Partial(), Replicate()], (8, 4)) is parse_spec("f32[8, 4@dp] +sum@tp", MESH)


def test_a_mesh_without_names_is_numbered():
    """Axes are called dim0, dim1, ..., when printed and when parsed."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    assert str(spec_of(mesh, [Shard(0), Partial()], (8,))) == "f32[8@dim0] +sum@dim1"
