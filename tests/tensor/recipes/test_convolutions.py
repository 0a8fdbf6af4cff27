"""Convolutions of images that are sharded along height, width or depth: those of one device; only halos are sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.expand import lowered
from spmd.tensor.cache import forget_decisions
from spmd.tensor.eager import dispatch
from spmd.tensor.placement import Shard
from spmd.tensor.redistribute import legal
from spmd.tensor.redistribute.halo import adjoint, halo
from spmd.tensor.spec import parse_spec
from tests.expand.side_by_side import agree as in_programs
from tests.tensor.single import S0, S1, S2, SUM, R, agree_at_once, mesh_of, placed
from tests.ways import WAYS, run

S3 = Shard(3)


def t(*shape: int) -> torch.Tensor:
    """Numbers between -1 and 1, all different."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).sin().view(shape).requires_grad_()




@pytest.fixture
def halos_always(monkeypatch):
    """Of these small images, the rows of a halo may be more than what another choice sends."""
    forget_decisions()
    for reader in (dispatch, lowered):
        monkeypatch.setattr(reader, "is_cheaper_by_rule", lambda *_: False)
    yield
    forget_decisions()


CASES = {
    "1d": (F.conv1d, {"padding": 1}, (2, 3, 8), (4, 3, 3)),
    "1d, uneven and a rank with no result": (F.conv1d, {}, (2, 3, 9), (4, 3, 5)),
    "1d, uneven and a rank with no rows": (F.conv1d, {"padding": 3}, (2, 3, 5), (4, 3, 3)),
    "1d, a kernel of several blocks": (F.conv1d, {"padding": 4}, (1, 2, 8), (2, 2, 9)),
    "1d, more padding than kernel": (F.conv1d, {"padding": 5}, (1, 2, 6), (2, 2, 3)),
    "1d, stride": (F.conv1d, {"stride": 2, "padding": 1}, (2, 3, 16), (4, 3, 3)),
    "1d, stride longer than the kernel": (F.conv1d, {"stride": 3}, (2, 3, 13), (4, 3, 2)),
    "1d, tiles that are no blocks": (F.conv1d, {"stride": 2}, (2, 3, 10), (4, 3, 2)),
    "1d, dilation": (F.conv1d, {"dilation": 3, "padding": 2}, (1, 3, 12), (4, 3, 3)),
    "1d, groups": (F.conv1d, {"groups": 2, "padding": 1}, (2, 4, 8), (6, 2, 3)),
    "1d, many channels come out": (F.conv1d, {"padding": 1, "stride": 2}, (2, 2, 9), (24, 2, 3)),
    "2d, many channels come out": (F.conv2d, {"padding": 2, "dilation": 2}, (1, 2, 5, 7), (20, 2, 3, 3)),
    "2d": (F.conv2d, {"padding": (0, 1)}, (2, 3, 4, 8), (4, 3, 1, 3)),
    "2d, all": (F.conv2d, {"padding": (1, 2), "stride": (1, 2), "dilation": (1, 2)}, (1, 2, 6, 11), (2, 2, 3, 3)),
    "3d": (F.conv3d, {"padding": 1, "stride": (1, 2, 1)}, (1, 2, 4, 5, 6), (2, 2, 3, 3, 2)),
    "transposed 1d": (F.conv_transpose1d, {}, (2, 3, 8), (3, 4, 3)),
    "transposed 1d, stride": (F.conv_transpose1d, {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3, 7),
                              (3, 4, 3)),
    "transposed 1d, gaps": (F.conv_transpose1d, {"stride": 3, "output_padding": 2}, (2, 3, 5), (3, 4, 2)),
    "transposed 1d, a kernel of several blocks": (F.conv_transpose1d, {"dilation": 3}, (1, 2, 5), (2, 2, 4)),
    "transposed 2d": (F.conv_transpose2d, {"stride": 2, "padding": 1}, (1, 3, 5, 6), (3, 2, 4, 3)),
    "transposed 3d, groups": (F.conv_transpose3d, {"groups": 2, "padding": 1}, (1, 4, 2, 3, 5), (4, 2, 3, 3, 3)),
}  # fmt: skip


def operands(name: str) -> tuple:
    """The convolution of a case; its image, weight and bias."""
    fn, options, image, kernel = CASES[name]
    channels = kernel[1] * options.get("groups", 1) if "transposed" in name else kernel[0]
    return partial(fn, **options), t(*image), t(*kernel), t(channels)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("halos_always")
def test_a_convolution_is_the_convolution(name):
    """Forward and backward: the gradients of image, weight and bias."""
    fn, x, w, b = operands(name)
    last = Shard(x.ndim - 1)
    agree_at_once(fn, [x, w, b], [[last], [R], [R]], mesh_shape=(4,))


def test_no_rank_needs_a_row():
    """Where the windows of most results lie on the padding alone, the gradient of the image needs rows of no block."""
    x, w = t(3, 2, 1, 3), t(1, 2, 1, 4)

    def gradients(x, w):
        return torch.autograd.grad(F.conv2d(x, w, None, 2, 3, (1, 2)).sum(), [x, w])

    agree_at_once(gradients, [x, w], [[S2], [R]], mesh_shape=(4,))


@pytest.mark.parametrize("name", ["1d, uneven and a rank with no rows", "2d, all", "transposed 2d", "3d",
                                  "2d, many channels come out"])
@pytest.mark.usefixtures("halos_always")
def test_over_two_axes(name):
    """Two dims of the image, one dim over both axes, a sharded batch, sharded channels, and a sum that is owed."""
    fn, x, w, b = operands(name)
    last, above = Shard(x.ndim - 1), Shard(x.ndim - 2)
    of_image = [[last, last], [S0, last], [last, S0], [SUM, last]] + [[above, last]] * (x.ndim > 3)
    agree_at_once(fn, [x, w, b], *[[each, [R, R], [R, R]] for each in of_image])
    agree_at_once(fn, [x, w, b], [[last, R], [R, S0], [R, S0]], [[last, S1], [R, S1], [R, R]])
    agree_at_once(lambda x, w: fn(x, w), [x, w], [[last, S1], [R, S1]], [[S1, last], [S0, R]])


@pytest.mark.usefixtures("halos_always")
def test_gradients_that_are_not_wanted():
    """Of the first layer of a model, the image has no gradient. A bias may be trained alone."""
    for name in ("1d, stride", "2d, all", "transposed 2d"):
        fn, *tensors = operands(name)
        for wanted in ((False, True, True), (False, True, False), (True, False, False), (False, False, True)):
            given = [x.detach().requires_grad_(yes) for x, yes in zip(tensors, wanted, strict=True)]
            agree_at_once(fn, given, [[Shard(given[0].ndim - 1)], [R], [R]], mesh_shape=(4,))


def sent(fn, *placings, shapes) -> tuple[int, int]:
    """The bytes that the busiest of four ranks sends forward, and forward and backward together."""
    forget_decisions()
    with spmd.LocalTensorMode(4) as mode:
        mesh = mesh_of((4,))
        given = [placed(t(*shape), [p], mesh) for shape, p in zip(shapes, placings, strict=True)]
        out = fn(*given)
        forward = max(mode.report().sent(rank) for rank in range(4))
        torch.autograd.grad(out, given, placed(t(*out.shape).detach(), out.placements, mesh))
        return forward, max(mode.report().sent(rank) for rank in range(4))


IMAGE, KERNEL = (1, 8, 16, 64), (8, 8, 3, 3)
COLUMN = 8 * 16 * 8


@pytest.mark.parametrize("fn, kernel, columns, back", [
    (partial(F.conv2d, padding=1), KERNEL, 2, 2), (partial(F.conv2d, stride=4), (8, 8, 4, 4), 0, 0),
    (partial(F.conv2d, stride=2, padding=1), KERNEL, 1, 0.5),
    (partial(F.conv2d, padding=1), (64, 8, 3, 3), 2, 4),
    (partial(F.conv_transpose2d, stride=2, padding=1), (8, 8, 4, 4), 2, 4),
])  # fmt: skip
def test_only_halos_are_sent(fn, kernel, columns, back):
    """Of an image of 64 columns on 4 ranks, a column each way; backward the gradients of a column.

    Where the gradients have 8 times the channels of the image, the columns of the image, and their gradients back.
    """
    forward, both = sent(fn, S3, R, shapes=(IMAGE, kernel))
    assert forward == columns * COLUMN
    assert both - forward == back * COLUMN


def test_what_is_cheaper_is_done():
    """A kernel as wide as the image needs all of it on each rank: the shards go to the channels instead."""
    wide = sent(lambda x, w: F.conv2d(x, w, padding=(0, 63)), S3, R, shapes=(IMAGE, (8, 8, 1, 127)))
    assert wide[0] == IMAGE[1] * IMAGE[2] * IMAGE[3] * 8 * 3 // 16


def test_explicit_mode_names_what_is_sent_back():
    with spmd.LocalTensorMode(4):
        x = placed(t(*IMAGE), [S3], mesh_of((4,)))
        y = F.max_pool2d(x, 3, 1, 1)
        found = pytest.raises(spmd.ImplicitCommunicationError, match=r"result 0: .*halo_sum\(dp, 3, 1\+1\)")
        with spmd.explicit(), found:
            torch.autograd.grad(y, x, y.detach())


def test_explicit_mode_names_the_halo():
    with spmd.LocalTensorMode(4), spmd.explicit():
        mesh = mesh_of((4,))
        x, w = (placed(t(*shape), [p], mesh) for shape, p in ((IMAGE, S3), (KERNEL, R)))
        with pytest.raises(spmd.ImplicitCommunicationError) as error:
            F.conv2d(x, w, padding=1)
    lines = str(error.value).splitlines()
    assert lines[1] == "    input: f64[1, 8, 16, 64@dp] -> f64[1, 8, 16, 72@dp]: halo(dp, 3, 1+1), 2,048 bytes a rank"
    assert "input.redistribute(placements=[Replicate()])" in lines[2]


# ---- in programs and over a network -----------------------------------------------------------


@pytest.mark.parametrize("name", ["1d, uneven and a rank with no rows", "2d, all", "transposed 2d",
                                  "2d, many channels come out"])
@pytest.mark.usefixtures("halos_always")
def test_programs_give_what_one_device_gives(name):
    fn, x, w, b = operands(name)
    last = Shard(x.ndim - 1)
    in_programs(fn, [x, w, b], [[last, Shard(x.ndim - 2)], [R, R], [R, R]])


def test_programs_show_halos():
    """One halo for each reader: the two convolutions need other rows. The gradient needs a halo, too."""
    ranks = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))

    def both(x, w):
        return F.conv2d(x, w, padding=1) + F.conv2d(x, w, padding=2, dilation=2) + F.conv2d(x, w, padding=1)

    step = spmd.compile(both, ranks, inputs={"x": {"tp": S2}, "w": {"tp": R}})
    program = step.program_for(t(1, 2, 16, 4).detach(), t(2, 2, 3, 3).detach())
    halos = [line.split("#")[0].strip() for line in str(program).splitlines() if "= halo(" in line]
    assert halos == ["halo = halo(arg0_1, tp, 2, 1+1)", "halo_1 = halo(arg0_1, tp, 2, 2+2)"]
    assert [c.kind for c in program.collectives] == ["halo", "halo"]


def test_a_halo_of_other_blocks_is_a_fault():
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    before, elsewhere = parse_spec("f32[2, 8@tp]", mesh), parse_spec("f32[2@tp, 8]", mesh)
    (step,) = halo(before, 1, [(0, 5), (3, 8)])
    assert (str(step), str(step.after), legal.fault(step)) == ("halo(tp, 1, 1+1)", "f32[2, 10@tp]", "")
    assert "blocks of 5 rows" in legal.fault(replace(step, after=parse_spec("f32[2, 8@tp]", mesh)))
    assert "not those of dim 1" in legal.fault(replace(step, before=elsewhere, after=elsewhere))
    assert legal.fault(adjoint(step)) == "" and str(adjoint(step)) == "halo_sum(tp, 1, 1+1)"
    assert "3 intervals" in legal.fault(replace(step, move=replace(step.move, intervals=((0, 5),) * 3)))


def body(x, w, b):
    """A convolution and its gradients on the ranks of this process."""
    mesh = spmd.init_device_mesh("cpu", (4,))
    given = [spmd.distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in ((x, S2), (w, R), (b, R))]
    out = F.conv2d(*given, padding=2, stride=2)
    return [g.full_tensor() for g in torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_same_on_a_network(way, gloo4):
    given = t(1, 2, 9, 3), t(2, 2, 3, 3), t(2)
    want = torch.autograd.grad(F.conv2d(*given, padding=2, stride=2).square().sum(), given)
    for found in run(way, gloo4, body, *(x.detach() for x in given)):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
