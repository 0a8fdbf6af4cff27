"""Optimisers, clipping, scaling and averaging of parameters in many layouts give the values of one device.

Parameters lie on a mesh of four, on a 2 x 2 mesh and on the rows of that mesh, sharded, uneven and replicated; their
gradients lie otherwise, some of them still to be summed.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spmd import DTensor, LocalTensor, LocalTensorMode, _torch, distribute_tensor, init_device_mesh
from spmd.tensor.spec import spec_of
from tests.tensor.single import (
    AVG,
    S0,
    S1,
    SUM,
    R,
    cut,
    every_rank,
    leaf,
    mesh_of,
    on_ranks,
    placed,
    same,
    weights,
    whole,
)

inf = float("inf")
SHAPES = [(8, 6), (5, 3), (4, 4), (7,), (6, 2), (3,), ()]
START = [weights(torch.empty(s, dtype=torch.float64)) + 0.01 * i for i, s in enumerate(SHAPES)]
ALL = range(len(START))
GRADS = [[(x * (k + 1) + i).cos() for i, x in enumerate(START)] for k in range(3)]
ALL_LIE = [("grid", S0, S1), ("grid", R, S0), ("line", S0), ("line", S0), ("grid", S0, S0), ("row", S0), ("line", R)]
GRADS_LIE = [
    ("grid", SUM, S1), ("grid", R, S0), ("line", SUM), ("line", R), ("grid", AVG, S0), ("row", SUM), ("line", SUM)
]  # fmt: skip


def meshes() -> dict:
    grid = mesh_of((2, 2))
    return {"grid": grid, "line": init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), "row": grid["tp"]}


def put(x: torch.Tensor, on: dict, where: str, *placements) -> DTensor:
    """x on one of the meshes. If the mesh is a row of the grid, each row has a copy."""
    if where != "row":
        return placed(x, placements, on[where])
    with _torch.no_modes():
        parts = cut(x, placements, (2,))
        local = {r: parts[(r % 2,)].clone() for r in range(4)}
    return DTensor(LocalTensor(local), spec_of(on["row"], placements, x.shape, x.dtype))


def plain_parameters(which=ALL) -> list[nn.Parameter]:
    params = [nn.Parameter(START[i].clone()) for i in which]
    for p, i in zip(params, which, strict=True):
        p.grad = GRADS[0][i].clone()
    return params


def parameters(on: dict, which=ALL) -> list[nn.Parameter]:
    params = [nn.Parameter(put(START[i], on, *ALL_LIE[i])) for i in which]
    for p, i in zip(params, which, strict=True):
        p.grad = put(GRADS[0][i], on, *GRADS_LIE[i])
    return params


def check(fn: Callable, which=ALL, tolerance: float = 1e-9) -> None:
    """fn(parameters, gradients of later steps) gives the same result, and the same values and gradients after it."""
    plain = plain_parameters(which)
    want = fn(plain, [[g[i].clone() for i in which] for g in GRADS])
    with LocalTensorMode(4):
        on = meshes()
        params = parameters(on, which)
        got = fn(params, [[put(g[i], on, *GRADS_LIE[i]) for i in which] for g in GRADS])
        for p, q, i in zip(params, plain, which, strict=True):
            assert isinstance(p, nn.Parameter) and p.placements == ALL_LIE[i][1:]
            for a, b in ((p, q), (p.grad, q.grad)):
                assert (a is None) == (b is None)
                for x in every_rank(a) if a is not None else []:
                    assert same(x, b.detach(), tolerance), (i, x, b)
        for x in every_rank(got):
            assert same(x, want.detach() if isinstance(want, torch.Tensor) else want, tolerance), (x, want)


# ---- steps ------------------------------------------------------------------------------------

OPTIONS = {
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
WAYS = [(name, way) for name in NAMES for way in ({"foreach": False}, {"foreach": True})]
WAYS += [(name, {"fused": True}) for name in ("Adagrad", "Adam", "AdamW", "SGD")]
WAYS += [("AdamW", {"maximize": True}), ("AdamW", {"lr": torch.tensor(0.02)}), ("SGD", {"lr": torch.tensor(0.1)})]


@pytest.mark.parametrize("name, way", WAYS, ids=[f"{name}-{next(iter(way.items()))}" for name, way in WAYS])
def test_steps_are_those_of_one_device(name, way):
    """Three steps with gradients in the layouts that backward gives them."""
    options = OPTIONS.get(name, {}) | way

    def steps(params, grads):
        optimizer = getattr(torch.optim, name)(params, **options)
        for given in grads:
            for p, g in zip(params, given, strict=True):
                p.grad = g
            optimizer.step()

    check(steps)


def test_the_second_order():
    """LBFGS puts all parameters into one vector: they must be on one mesh, and an error says so."""

    def steps(params, _):
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            value = sum(((p - 1) ** 4).sum() for p in params)
            value.backward()
            return value

        return optimizer.step(loss)

    check(steps, which=(0, 1, 4), tolerance=1e-7)
    with pytest.raises(ValueError, match="operands are on two meshes"):
        check(lambda params, _: torch.cat([p.flatten() for p in params]))


def test_a_step_can_be_differentiated():
    def stepped(params, grads):
        made = [p.clone() for p in params]
        for p, g in zip(made, grads[0], strict=True):
            p.grad = g
        torch.optim.SGD(made, lr=0.1, momentum=0.9, weight_decay=0.5, differentiable=True).step()
        for p in params:
            p.grad = None
        for p in made:
            (p**2).sum().backward()

    with torch.enable_grad():
        check(stepped)


def test_gradients_that_are_dense_are_not_for_sparse_adam():
    with LocalTensorMode(4), pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam(parameters(meshes())).step()


# ---- norms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm_type", [0, 1, 2, 3.5, inf, -inf])
def test_the_norm_is_of_all_gradients(norm_type, foreach):
    """On any meshes, reduced or not; all are clipped by one number."""
    check(lambda params, _: clip_grad_norm_(params, 0.5, norm_type, foreach=foreach))


TOGETHER = [("grid", S0, S1), ("grid", R, S0), ("line", S0), ("row", S0), ("grid", R, R)]


@pytest.mark.parametrize(
    "ask, most",
    [
        (lambda grads: torch._foreach_norm(grads), 4),
        (lambda grads: torch._foreach_norm(grads, 1), 4),
        (lambda grads: torch._foreach_norm(grads, inf), 4),
        (lambda grads: torch._foreach_norm(grads[:5] * 2, dtype=torch.float64), 4),
        (lambda grads: grads[0].norm(), 1),
    ],
    ids="2 1 inf wide one".split(),
)
def test_what_is_owed_alike_is_reduced_together(ask, most):
    """Of fifteen gradients in five layouts, four of them sharded: one collective for each layout."""
    start = [(x + i).float() for i, x in enumerate([weights(torch.empty(8, 4))] * 15)]
    want = ask(start)
    with LocalTensorMode(4) as mode:
        on = meshes()
        grads = [put(x, on, *TOGETHER[i % 5]) for i, x in enumerate(start)]
        got = ask(grads)
        assert len(mode.sent) == 4 * most
        for a, b in zip(got if isinstance(got, tuple | list) else [got], want if most > 1 else [want], strict=True):
            assert all(same(x, b, 1e-6) for x in every_rank(a))


@pytest.mark.parametrize("wrong", [None, 3, 11])
def test_one_infinite_gradient_is_found_for_all_at_once(wrong):
    """On whatever rank it is."""
    with LocalTensorMode(4) as mode:
        on = meshes()
        with _torch.no_modes():
            start = [torch.ones(8, 4) * i for i in range(15)]
            if wrong is not None:
                start[wrong][5, 1] = inf
            found, scale = torch.zeros(()), torch.tensor(0.5)
        grads = [put(x, on, *TOGETHER[i % 5]) for i, x in enumerate(start)]
        found = placed(found, [R, R], on["grid"])
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        assert len(mode.sent) == 4 * 3
        assert every_rank(found) == [float(wrong is not None)] * len(every_rank(found))
        for g, x in zip(grads, start, strict=True):
            assert all(torch.equal(y, x / 2) for y in every_rank(g))


def test_values_and_totals():
    check(lambda params, _: clip_grad_value_(params, 0.3, foreach=True))
    check(lambda params, _: get_total_norm([p.grad for p in params]))


def test_a_norm_that_is_not_finite_is_an_error_on_request():
    def clip(params, _):
        params[0].grad.mul_(inf)
        with pytest.raises(RuntimeError, match="is non-finite"):
            clip_grad_norm_(params, 0.5, error_if_nonfinite=True)

    check(clip)


# ---- scaling, averaging -----------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_skips_steps_that_are_infinite(fused):
    """The second of three: neither parameters nor state change, and the scale falls; the third is clipped by hand."""

    def train(params, _):
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = sum(whole((p**2).sum()) for p in params) * (inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    check(train)


def test_averaged_models_follow():
    def average(params, _):
        model = nn.ParameterList(params)
        plain = AveragedModel(model)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            with torch.no_grad():
                for p in params:
                    p.add_(1.0)
            plain.update_parameters(model)
            ema.update_parameters(model)
        return sum(whole((p.detach() ** 2).sum()) for m in (plain, ema) for p in m.parameters())

    check(average)


def test_a_number_of_another_mesh_is_taken_where_nothing_is_lost():
    """A tensor of one element that is only read. With a gradient, or with dims, an error names both meshes."""
    with LocalTensorMode(4):
        on = meshes()
        big, number = put(START[0], on, "grid", S0, S1), put(START[6], on, "line", SUM)
        for x in every_rank(big * number) + every_rank(number * big):
            assert same(x, START[0] * START[6])
        for wrong in (number.clone().requires_grad_(), put(START[5], on, "line", S0)):
            with pytest.raises(ValueError, match="operands are on two meshes"):
                big[:, :3] * wrong


def test_a_number_that_differs_between_rows_is_no_number():
    """Each row of the grid has its own number: ranks compare it before they use it on the whole grid."""

    def rank(grid):
        x = DTensor.from_local(torch.ones(2, 3), grid, [S0, R])
        alike = DTensor.from_local(torch.tensor(2.0), grid["tp"], [SUM])
        own = DTensor.from_local(torch.tensor(float(grid.get_rank() // 2)), grid["tp"], [R])
        with pytest.raises(ValueError, match="is not the same number on all ranks"):
            x * own
        return (x * alike).full_tensor()

    assert all(torch.equal(x, torch.full((4, 3), 4.0)) for x in on_ranks(rank))


# ---- state ------------------------------------------------------------------------------------


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # weights only, as is torch's default


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_stopped(options):
    """Model and optimiser through torch.save and load_state_dict."""

    def run(params: list, grads: list) -> list:
        optimizer = torch.optim.AdamW(params, lr=0.1, **options)
        for step, given in enumerate(grads):
            for p, g in zip(params, given, strict=True):
                p.grad = g
            optimizer.step()
            if step == 0:
                model = nn.ParameterList(params)
                saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                with torch.no_grad():
                    for p in params:
                        p.zero_()
                model.load_state_dict(saved["model"])
                optimizer = torch.optim.AdamW(params, lr=5.0, **options)
                optimizer.load_state_dict(saved["optimizer"])
        return [whole(p.detach()) for p in params]

    which = (0, 1, 4)
    want = run(plain_parameters(which), [[g[i] for i in which] for g in GRADS])
    blocks = {i: cut(START[i], ALL_LIE[i][1:], (2, 2)) for i in which}

    def rank(mesh):
        params = [nn.Parameter(leaf(blocks[i], ALL_LIE[i][1:], START[i], mesh)) for i in which]
        grads = [[distribute_tensor(g[i], mesh, [S0, R], src_data_rank=None) for i in which] for g in GRADS]
        return run(params, grads)

    for got in on_ranks(rank):
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
