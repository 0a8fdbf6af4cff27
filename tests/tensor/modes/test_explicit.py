"""Explicit mode: only communication that was asked for happens, and the error says what to write."""

from __future__ import annotations

import re

import pytest
import torch

import spmd
from spmd import ImplicitCommunicationError, LocalTensorMode, Partial, Replicate, Shard
from spmd.expand.compile import compile as spmd_compile
from spmd.mesh import DeviceMesh
from spmd.sim.threads import ThreadWorld
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from spmd.tensor.modes import explicit
from tests.tensor.modes.deep import in_backward_passes
from tests.tensor.single import S0, S1, SUM, R, cut, leaf, mesh_of, on_ranks, same, whole
from tests.ways import run

aten = torch.ops.aten
F64 = torch.float64

CALLS = {
    "add": (aten.add.Tensor, {"self": (4, 6), "other": (4, 6)}),
    "mul, stretched": (aten.mul.Tensor, {"self": (4, 6), "other": (6,)}),
    "mm": (aten.mm.default, {"self": (4, 6), "mat2": (6, 5)}),
    "exp": (aten.exp.default, {"self": (4, 6)}),
    "softmax": (aten._softmax.default, {"self": (4, 6), "dim": 1, "half_to_float": False}),
    "sum": (aten.sum.dim_IntList, {"self": (4, 6), "dim": [1]}),
    "view": (aten.view.default, {"self": (4, 6), "size": [2, 2, 6]}),
    "svd": (aten._linalg_svd.default, {"A": (4, 6)}),
    "nonzero": (aten.nonzero.default, {"self": (4, 6)}),
    "item": (aten._local_scalar_dense.default, {"self": ()}),
    "equal": (aten.equal.default, {"self": (4, 6), "other": (4, 6)}),
    "add_": (aten.add_.Tensor, {"self": (4, 6), "other": (4, 6)}),
    "exp_": (aten.exp_.default, {"self": (4, 6)}),
    "cumsum_": (aten.cumsum_.default, {"self": (4, 6), "dim": 1}),
    "as_strided": (aten.as_strided.default, {"self": (4, 6), "size": [3, 2], "stride": [6, 1]}),
    "native_layer_norm": (
        aten.native_layer_norm.default,
        {"input": (4, 6), "normalized_shape": [6], "weight": (6,), "bias": (6,), "eps": 1e-5},
    ),
}
PLACED = ([S0, R], [S1, R], [S0, S1], [S1, S0], [R, S0], [SUM, R], [S0, SUM], [R, R])


NEVER = {"sum", "view"}
"""Calls that need no move, whatever the spec of their tensor is."""

WORDS = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}


def given(shapes, placed: int, seed: int) -> dict:
    """The arguments, with random tensors in place of shapes; their placements come from `PLACED`, in turn."""
    out, n = {}, 0
    for name, value in shapes.items():
        if not isinstance(value, tuple):
            out[name] = value
            continue
        x = torch.randn(value, dtype=F64, generator=torch.Generator().manual_seed(seed + n))
        wanted = PLACED[(placed + 3 * n) % len(PLACED)]
        fits = [p if not p.is_shard() or p.dim < x.ndim else Replicate() for p in wanted]
        torch.manual_seed(seed + n)
        out[name] = (x, fits)
        n += 1
    return out


def as_dtensors(args: dict, mesh, parts: dict) -> dict:
    return {k: leaf(parts[k], v[1], v[0], mesh) if isinstance(v, tuple) else v for k, v in args.items()}


def follow(advice: str, args: dict) -> None:
    """Redistribute the arguments as the error says."""
    found = re.search(r"    (\w+): .*\n(?:    .*\n)*Write", advice)
    written = re.search(r"Write (\w+)\.redistribute\(placements=(\[.*\])\)", advice)
    for name, x in args.items():
        if found is None and isinstance(x, DTensor):  # the op is made of other ops
            assert "Redistribute the operands" in advice
            args[name] = x.redistribute()
        elif found is not None and name == found[1]:
            args[name] = x.redistribute(placements=eval(written[2], WORDS) if written else None)


def results(out) -> list[torch.Tensor]:
    return [torch.as_tensor(whole(x)) for x in (out if isinstance(out, tuple) else [out])]


@pytest.mark.parametrize("name", CALLS)
def test_an_op_sends_nothing_or_is_an_error_that_says_what_to_write(name):
    """In first and later calls alike. After the user follows the error, the op runs and sends nothing more."""
    op, shapes = CALLS[name]
    cases = []
    for placed in range(len(PLACED)):
        args = given(shapes, placed, 10 * placed)
        parts = {k: cut(v[0], v[1], (2, 2)) for k, v in args.items() if isinstance(v, tuple)}
        want = op(**{k: v[0].clone() if isinstance(v, tuple) else v for k, v in args.items()})
        cases.append((args, parts, want))
    world, refused = ThreadWorld(4), []

    def rank(number):
        mesh = mesh_of((2, 2))
        for args, parts, want in cases:
            for warm in (False, True):
                if warm:  # the call moved its operands before; now that is an error
                    op(**as_dtensors(args, mesh, parts))
                now = as_dtensors(args, mesh, parts)
                for _ in range(4):
                    before = len(world.calls[number])
                    try:
                        with spmd.explicit():
                            got = op(**now)
                    except ImplicitCommunicationError as error:
                        assert len(world.calls[number]) == before, "sent, and then refused"
                        refused.append(str(error))
                        follow(str(error), now)
                        continue
                    assert len(world.calls[number]) == before, f"{now} was sent in silence"
                    break
                else:
                    raise AssertionError(f"the advice does not lead anywhere: {refused[-1]}")
                if name != "svd":  # which is unique but for signs
                    assert all(same(g, w) for g, w in zip(results(got), results(want), strict=True))
        return True

    assert all(world.run(rank))
    assert refused or name in NEVER


def test_the_text():
    def rank(mesh):
        x, w = (distribute_tensor(torch.ones(4, 6), mesh, p) for p in ([S0, R], [S1, R]))
        with spmd.explicit(), pytest.raises(ImplicitCommunicationError) as caught:
            x + w
        return re.sub(r"at \S+", "at FILE", str(caught.value))

    assert on_ranks(rank)[0] == (
        "aten.add.Tensor at FILE would communicate, and spmd.explicit() is on:\n"
        "    other: f32[4, 6@dp] -> f32[4@dp, 6]: all_to_all(dp, 1, 0), 48 bytes a rank\n"
        "Write other.redistribute(placements=[Shard(0), Replicate()]), or let it pass with spmd.explicit(False)."
    )


def into_a_plain_tensor(x):
    with spmd.implicit_replication():
        return torch.exp(x, out=torch.empty(4, 6))


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x.sum()),
    "format": lambda x: f"{x.sum():.1f}",
    "tolist": lambda x: x.tolist(),
    "masked": lambda x: x[x > 0],
    "allclose": lambda x: torch.allclose(x, x + 1),
    "out=": into_a_plain_tensor,
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_value_is_communication(name):
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R])
        READS[name](x)
        with spmd.explicit(), pytest.raises(ImplicitCommunicationError):
            READS[name](x)
        whole = distribute_tensor(torch.ones(4, 6), mesh, [R, R])
        with spmd.explicit():
            READS[name](whole)
        return True

    assert all(on_ranks(rank))


def test_a_view_that_is_a_copy_is_gathered_anew_only_if_asked():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R])
        part = x[1:]
        with spmd.explicit():
            part + 1
            x.mul_(2)
            with pytest.raises(ImplicitCommunicationError, match="a view of what was written"):
                part + 1
        return whole(part + 1)

    assert all(torch.equal(got, torch.full((3, 6), 3.0)) for got in on_ranks(rank))


def test_a_backward_pass_too():
    """A hook that redistributes the gradient avoids the error."""

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R])
        w = distribute_tensor(torch.ones(6, 3), mesh, [R, R]).requires_grad_()
        back = distribute_tensor(torch.ones(4, 3), mesh, [S1, R])
        with spmd.explicit():
            y = (x @ w).sigmoid()
            with pytest.raises(ImplicitCommunicationError, match=r"in a backward pass: .*register_hook"):
                y.backward(back)
            y = (x @ w).sigmoid()
            y.register_hook(lambda g: g.redistribute(placements=[S0, R]))
            y.backward(back)
        return str(w.grad._spec)

    assert set(on_ranks(rank)) == {"f32[6, 3] +sum@dp"}


def test_gradients_of_what_was_asked_for_are_asked_for():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R]).requires_grad_()
        with spmd.explicit():
            x.redistribute(placements=[S1, R]).full_tensor().sum().backward()
        assert x.grad._spec is x._spec
        local = torch.ones(2, 6, requires_grad=True)
        y = DTensor.from_local(local, mesh, [S0, R])
        with spmd.explicit(), pytest.raises(ImplicitCommunicationError, match="the gradient of from_local"):
            y.backward(distribute_tensor(torch.ones(4, 6), mesh, [S1, R]))
        return True

    assert all(on_ranks(rank))


def trained():
    """A step of data parallel training with explicit reductions, and one without them."""
    mesh = mesh_of((2, 2))
    x = distribute_tensor(torch.arange(24.0).reshape(4, 6) / 24, mesh, [S0, S0])
    w = torch.nn.Parameter(distribute_tensor(torch.ones(6, 3), mesh, [R, R]))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with spmd.explicit():
        (x @ w).square().sum().redistribute(placements=[R, R]).backward()
        try:
            optimizer.step()
        except ImplicitCommunicationError:
            w.grad = w.grad.redistribute(placements=w.placements)
            optimizer.step()
            return w
    raise AssertionError("the optimiser reduced a gradient in silence")


@pytest.mark.parametrize("way", ["simulated", "gloo"])
def test_a_training_step(way, gloo4):
    x, w = torch.arange(24.0).reshape(4, 6) / 24, torch.ones(6, 3, requires_grad=True)
    (x @ w).square().sum().backward()
    for got in run(way, gloo4, trained):
        torch.testing.assert_close(got, w.detach() - 0.1 * w.grad)


def test_it_nests_and_can_be_everywhere():
    def rank(mesh):
        x, w = (distribute_tensor(torch.ones(4, 6), mesh, p) for p in ([S0, R], [S1, R]))
        with pytest.raises(ImplicitCommunicationError):
            x + w
        with spmd.explicit(False):
            x + w
            with spmd.explicit(), pytest.raises(ImplicitCommunicationError):
                x + w
            x + w
        return True

    spmd.set_explicit(True)
    try:
        assert all(on_ranks(rank))
    finally:
        spmd.set_explicit(False)
    assert not explicit.is_on()


def test_a_number_of_another_mesh():
    def rank(mesh):
        x, other = distribute_tensor(torch.ones(4, 6), mesh, [S0, R]), DeviceMesh("cpu", [0, 1, 2, 3])
        total = distribute_tensor(torch.ones(8), other, [S0]).sum()
        assert whole(x * total).sum() == 24 * 8
        with spmd.explicit():
            with pytest.raises(ImplicitCommunicationError, match="all_reduce"):
                x * total
            x * total.redistribute(placements=[R])
        return True

    assert all(on_ranks(rank))


def test_the_first_draw_asks_for_a_seed():
    def rank(mesh):
        spmd.set_rng_state(None)
        with spmd.explicit():
            with pytest.raises(ImplicitCommunicationError, match="manual_seed"):
                spmd.randn(4, device_mesh=mesh)
            spmd.manual_seed(0)
            spmd.randn(4, device_mesh=mesh)
        return True

    assert all(on_ranks(rank))


def test_compiled_steps_say_what_they_send():
    layer = torch.nn.Linear(6, 4, bias=False)
    with LocalTensorMode(4), spmd.explicit():
        quiet = spmd_compile(lambda x: x.exp(), mesh_of((2, 2)), inputs={"x": {"dp": S0}})
        quiet(torch.ones(4, 6))
        loud = spmd_compile(lambda layer, x: layer(x).sum(), mesh_of((2, 2)), inputs={"x": {"dp": S0}})
        with pytest.raises(ImplicitCommunicationError, match=r"would send 1 collectives, 4 bytes"):
            loud(layer, torch.ones(4, 6))


def test_threads_of_autograd_know():
    """Deeply nested backward passes run in a thread of autograd, as those of a GPU do."""
    with spmd.explicit():
        seen = in_backward_passes(lambda left: explicit.is_on())
    assert len(seen) == 71 and all(seen)
    assert not any(in_backward_passes(lambda left: explicit.is_on()))
