"""AsyncTensor: metadata is known at once, the first use waits, and afterwards it is a tensor like any other."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from workers import Pool

from spmd.comm import (
    AsyncTensor,
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    transport,
    wait,
)
from spmd.mesh import init_device_mesh
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Shard

X = torch.arange(6.0).reshape(2, 3)


class Counted:
    """Waits for nothing and counts how often it was asked to."""

    def __init__(self) -> None:
        self.waits = 0

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        self.waits += 1
        return sent.clone()


def on_its_way(x: torch.Tensor = X) -> tuple[AsyncTensor, Counted]:
    count = Counted()
    return AsyncTensor(x, x.shape, x.dtype, count), count


# ---- metadata ---------------------------------------------------------------------------------

METADATA: dict[str, tuple[Callable, object]] = {
    "shape": (lambda y: y.shape, (2, 3)),
    "size of a dim": (lambda y: y.size(-1), 3),
    "len": (len, 2),
    "ndim": (lambda y: y.ndim, 2),
    "numel": (lambda y: y.numel(), 6),
    "dtype": (lambda y: y.dtype, torch.float32),
    "device": (lambda y: y.device, torch.device("cpu")),
    "stride": (lambda y: y.stride(), (3, 1)),
    "is_contiguous": (lambda y: y.is_contiguous(), True),
    "itemsize": (lambda y: y.itemsize, 4),
    "is_leaf": (lambda y: y.is_leaf, True),
    "requires_grad": (lambda y: y.requires_grad, False),
    "is a tensor": (lambda y: isinstance(y, torch.Tensor), True),
    "is_floating_point": (lambda y: y.is_floating_point(), True),
    "repr": (repr, "AsyncTensor(on its way, shape=(2, 3), dtype=torch.float32)"),
}


@pytest.mark.parametrize("case", list(METADATA))
def test_metadata_is_read_without_waiting(case: str) -> None:
    read, expected = METADATA[case]
    y, count = on_its_way()
    assert read(y) == expected
    assert count.waits == 0 and not y.completed


# ---- uses -------------------------------------------------------------------------------------


def stepped(optimizer: type, **kwargs: bool) -> Callable:
    def step(y: torch.Tensor) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(2, 3))
        p.grad = y
        optimizer([p], lr=0.1, **kwargs).step()
        return p.detach()

    return step


def saved(y: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"y": y}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["y"]


def kept_for_backward(y: torch.Tensor) -> torch.Tensor:
    w = torch.ones(2, 3, requires_grad=True)
    (w * y).sum().backward()
    return w.grad


def clipped(y: torch.Tensor) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = y
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    return wait(p.grad)


def cleared(y: torch.Tensor) -> torch.Tensor:
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = y
    torch.optim.SGD([p]).zero_grad(set_to_none=False)
    return wait(p.grad)


def in_inference(y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return y * 2


def in_module(y: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Module()
    module.register_buffer("b", y)
    return module.to(torch.float64).state_dict()["b"]


def in_dtensor(y: torch.Tensor) -> torch.Tensor:
    d = DTensor.from_local(y, init_device_mesh("cpu", (1,)), [Shard(0)])
    return (d + 1).to_local()


USES: dict[str, Callable] = {
    "add": lambda y: y + 1,
    "add from the right": lambda y: X + y,
    "matmul": lambda y: X @ y.T,
    "index by mask": lambda y: y[y > 2],
    "iterate": lambda y: torch.stack(list(y)),
    "sum to item": lambda y: y.sum().item(),
    "item": lambda y: y[0, 1].item(),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.numpy().tolist(),
    "format": lambda y: f"{y.sum():.1f}",
    "bool": lambda y: bool((y >= 0).all()),
    "contains": lambda y: 3.0 in y,
    "equal": lambda y: torch.equal(y, X),
    "equal from the right": lambda y: torch.equal(X, y),
    "allclose": lambda y: torch.allclose(y, X),
    "cat": lambda y: torch.cat([X, y]),
    "stack twice": lambda y: torch.stack([y, y]),
    "where": lambda y: torch.where(y > 2, y, -y),
    "einsum": lambda y: torch.einsum("ij,kj->ik", y, y),
    "linear": lambda y: torch.nn.functional.linear(y, y),
    "foreach": lambda y: torch._foreach_mul([y, y], 2.0)[1],
    "clone": lambda y: y.clone(),
    "detach": lambda y: y.detach(),
    "to another dtype": lambda y: y.to(torch.float64),
    "to the same dtype": lambda y: y.to(torch.float32) + 0,
    "copied into": lambda y: torch.zeros(2, 3).copy_(y),
    "set into": lambda y: torch.zeros(4, 3).index_copy_(0, torch.tensor([1, 2]), y),
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "save": saved,
    "dlpack": torch.utils.dlpack.from_dlpack,
    "data": lambda y: y.data,
    "vmap": lambda y: torch.vmap(lambda a: a * 2)(y),
    "grad of a function": lambda y: torch.func.grad(lambda a: (a * a).sum())(y),
    "kept for the backward": kept_for_backward,
    "sgd": stepped(torch.optim.SGD, foreach=False),
    "sgd of lists": stepped(torch.optim.SGD, foreach=True),
    "adam": stepped(torch.optim.Adam, foreach=False),
    "adam of lists": stepped(torch.optim.Adam, foreach=True),
    "fused adamw": stepped(torch.optim.AdamW, fused=True),
    "clip_grad_norm_": clipped,
    "zero_grad": cleared,
    "inference mode": in_inference,
    "module": in_module,
    "local of a DTensor": in_dtensor,
}


@pytest.mark.parametrize("case", list(USES))
def test_a_use_waits_once_and_gives_what_the_plain_tensor_gives(case: str) -> None:
    y, count = on_its_way()
    found, expected = USES[case](y), USES[case](X.clone())
    assert type(found) is type(expected)
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert count.waits == 1 and y.completed
    USES[case](y)
    assert wait(y) is wait(y) and type(wait(y)) is torch.Tensor
    assert count.waits == 1


VIEWS: dict[str, Callable] = {
    "index": lambda y: y[1],
    "view": lambda y: y.view(3, 2),
    "reshape": lambda y: y.reshape(-1),
    "slice": lambda y: y[1:, 1:],
    "slice of a view": lambda y: y.T[1:].unsqueeze(0),
    "one of several": lambda y: y.unbind(1)[1],
    "a part": lambda y: y.chunk(3, dim=1)[2].expand(2, 4),
}


@pytest.mark.parametrize("case", list(VIEWS))
def test_a_view_stays_in_flight(case: str) -> None:
    """Its shape is known at once; to use it waits, once for all; a write to one is a write to all."""
    y, count = on_its_way()
    view, want = VIEWS[case](y), VIEWS[case](X)
    assert type(view) is AsyncTensor and count.waits == 0 and not view.completed
    metadata = lambda x: (x.shape, x.stride(), x.storage_offset(), x.dtype)  # noqa: E731
    assert metadata(view) == metadata(want)
    assert torch.equal(view + 0, want) and torch.equal(wait(view), want) and count.waits == 1 and y.completed
    y.zero_()
    assert not view.any() and count.waits == 1
    assert type(VIEWS[case](y)) is torch.Tensor


def test_a_write_to_a_view_in_flight_is_a_write_to_the_whole() -> None:
    y, count = on_its_way()
    y[1].mul_(2)
    assert torch.equal(y, X * torch.tensor([[1.0], [2.0]])) and count.waits == 1


def test_a_view_in_flight_has_a_gradient() -> None:
    y, count = on_its_way()
    view = y.requires_grad_().view(6)[2:]
    assert count.waits == 0
    (view * 3).sum().backward()
    assert torch.equal(y.grad, torch.tensor([[0.0, 0.0, 3.0], [3.0, 3.0, 3.0]]))


def test_a_printed_tensor_that_has_arrived_shows_its_values() -> None:
    y, _ = on_its_way()
    wait(y)
    assert repr(y) == f"AsyncTensor({X!r})"


# ---- writes -----------------------------------------------------------------------------------


def foreach_doubled(y: torch.Tensor) -> None:
    torch._foreach_mul_([y], 2.0)


WRITES: dict[str, Callable] = {
    "add_": lambda y: y.add_(1),
    "setitem": lambda y: y.__setitem__(0, 7.0),
    "copy_": lambda y: y.copy_(X + 5),
    "zero_ of a view": lambda y: y.view(6)[:2].zero_(),
    "out": lambda y: torch.add(X, X, out=y),
    "foreach": foreach_doubled,
    "twice": lambda y: y.mul_(2).add_(1),
}


@pytest.mark.parametrize("case", list(WRITES))
def test_writes_stay(case: str) -> None:
    y, count = on_its_way()
    plain = X.clone()
    WRITES[case](y)
    WRITES[case](plain)
    assert torch.equal(y, plain) and torch.equal(wait(y), plain)
    assert count.waits == 1


@pytest.mark.parametrize("case", ["add_", "out"])
def test_a_write_gives_the_tensor_itself(case: str) -> None:
    y, _ = on_its_way()
    assert WRITES[case](y) is y


@pytest.mark.parametrize("case", ["t_", "resize_", "data"])
def test_what_would_make_another_tensor_of_it_is_refused(case: str) -> None:
    y, _ = on_its_way()
    change = {"t_": lambda: y.t_(), "resize_": lambda: y.resize_(6), "data": lambda: setattr(y, "data", X + 1)}
    with pytest.raises(RuntimeError, match=r"spmd.comm.wait\(x\) first"):
        change[case]()
    assert torch.equal(y, X)


def test_wait_gives_other_tensors_as_they_are() -> None:
    p = torch.nn.Parameter(X.clone())
    assert wait(X) is X and wait(p) is p


def test_a_leaf_takes_gradients() -> None:
    y, _ = on_its_way()
    (y.requires_grad_() * 3).sum().backward()
    assert torch.equal(y.grad, torch.full((2, 3), 3.0))


# ---- on real ranks ----------------------------------------------------------------------------


def in_autograd(rank: int) -> dict[str, object]:
    x = (X + rank).requires_grad_()
    y = all_reduce(x, "sum", [0, 1, 2, 3])
    with torch.no_grad():
        _ = y * 1  # waits without a gradient, which must not cost the gradient
    y.add_(1)
    z = wait(y) * y
    [g] = torch.autograd.grad(z.sum(), x)
    with torch.no_grad():
        without = all_reduce(x, "sum", [0, 1, 2, 3])
    p = torch.nn.Parameter(torch.ones(2))
    p.register_hook(lambda grad: all_reduce(grad, "avg", [0, 1, 2, 3]))
    q = torch.nn.Parameter(torch.ones(2))
    q.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", all_reduce(q.grad, "avg", [0, 1, 2, 3])))
    for _ in range(2):
        ((p + q) * rank).sum().backward()
    total = X * 4 + 6 + 1
    return {
        "value": torch.equal(z, total * total),
        "gradient": torch.equal(g, 4 * 2 * total),
        "no_grad": not without.requires_grad and not (without * 2).requires_grad,
        "hook": p.grad.tolist() == [3.0, 3.0],
        "hook after": wait(q.grad).tolist() == [3.0, 3.0],
    }


def test_gradients_flow_through_and_hooks_may_give_one(gloo4: Pool) -> None:
    for found in gloo4.run(in_autograd):
        assert [what for what, holds in found.items() if not holds] == []


def chained(rank: int) -> list:
    x = torch.full((2,), float(rank))
    y = all_gather_tensor(all_reduce(x, "sum", [0, 1, 2, 3]), 0, [[0, 1], [2, 3]])
    both = all_reduce_coalesced([y, all_reduce(x, "max", [0, 1, 2, 3])], "sum", [0, 1, 2, 3])
    with torch.inference_mode():
        z = all_reduce(x, "sum", [0, 1, 2, 3])
        doubled = z * 2
    return [[*both[0].tolist(), *both[1].tolist()], doubled.tolist()]


def test_one_may_go_into_the_next_collective(gloo4: Pool) -> None:
    assert gloo4.run(chained) == [[[24.0] * 4 + [12.0] * 2, [12.0, 12.0]]] * 4


def dropped(rank: int) -> float:
    """Ten results are never waited for; the eleventh is still right."""
    sent = [all_reduce(torch.ones(1000), "sum", [0, 1, 2, 3])._sent for _ in range(10)]
    gc.collect()
    found = wait(all_reduce(torch.ones(1), "sum", [0, 1, 2, 3])).item()
    for x in sent:
        transport().wait_tensor(x)  # leave no work in flight to later tests
    return found


def test_a_dropped_one_holds_nobody_up(gloo4: Pool) -> None:
    assert gloo4.run(dropped) == [4.0] * 4


RANKS = [0, 1, 2, 3]
READERS: dict[str, Callable] = {
    "all_gather_tensor": lambda x: all_gather_tensor(x, 1, RANKS),
    "all_to_all_single": lambda x: all_to_all_single(x, None, None, RANKS),
    "permute_tensor": lambda x: permute_tensor(x, [1, 2, 3, 0], RANKS),
    "reduce_scatter_tensor": lambda x: reduce_scatter_tensor(x, "sum", 0, RANKS),
    "all_gather_into_tensor_coalesced": lambda x: all_gather_into_tensor_coalesced([x], RANKS)[0],
}
COPIERS: dict[str, Callable] = {
    "all_reduce": lambda x: all_reduce(x, "sum", RANKS),
    "all_reduce_coalesced": lambda x: all_reduce_coalesced([x], "sum", RANKS)[0],
    "broadcast": lambda x: broadcast(x, 0, RANKS),
    "all_gather_tensor of its own copy": lambda x: all_gather_tensor(x.t(), 0, RANKS),
}


def written_meanwhile(rank: int) -> dict[str, object]:
    """Collectives whose input is overwritten before the wait give the right numbers or an error."""
    found: dict[str, object] = {}
    for name, send in {**READERS, **COPIERS}.items():
        x = torch.arange(12.0).reshape(4, 3) + rank
        right = wait(send(x)).clone()
        y = send(x)
        x[0].fill_(-1000.0)
        try:
            found[name] = torch.equal(wait(y), right)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_a_write_into_what_is_still_read_is_an_error(gloo4: Pool) -> None:
    for found in gloo4.run(written_meanwhile):
        assert all("was written to while it was on its way" in str(found[name]) for name in READERS)
        assert [found[name] for name in COPIERS] == [True] * len(COPIERS)
