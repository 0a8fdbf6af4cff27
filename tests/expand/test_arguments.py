"""What a step sees of its arguments, does to them and gives back of them, besides their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import DTensor, LocalTensor, LocalTensorMode, Shard, init_device_mesh


def shown(x: Any) -> Any:
    """A value with its types, and the numbers of tensors."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
        x = x.reconcile() if isinstance(x, LocalTensor) else x
    if isinstance(x, torch.Tensor):
        return "tensor", x.tolist()
    if isinstance(x, dict):
        return {key: shown(part) for key, part in x.items()}
    return (type(x).__name__, [shown(part) for part in x]) if isinstance(x, (list, tuple)) else (type(x).__name__, x)


def results(step: Callable, calls: list[tuple]) -> list:
    """What calls give, or the errors that they raise."""
    found = []
    for given in calls:
        try:
            found.append(shown(step(*given)))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def on_ranks(fn: Callable, calls: list[tuple], **how: Any) -> list:
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        return results(spmd.compile(fn, mesh, **how), calls)


X = torch.arange(8.0)
SAME, OTHER = (X, X), (X, X + 1)


class Holder(nn.Module):
    def __init__(self, **attributes: Any):
        super().__init__()
        self.register_buffer("b", X.clone())
        vars(self).update(attributes)


class Pair:
    def __init__(self, a: Any, b: Any):
        self.a, self.b = a, b


def keeps(m, x):
    y = x * (2 if getattr(m, "t", None) is x else 3)
    m.t = x
    return y


ONE: dict[str, tuple[Callable, list[tuple]]] = {
    "is": (lambda x, y: x * (2 if x is y else 3), [SAME, SAME, OTHER, OTHER, OTHER, SAME, SAME]),
    "in a list": (
        lambda x, z: x * (2 if any(x is y for y in z) else 3), [(X, [X + 1, X]), (X, [X, X + 1]), (X, [X + 1])]
    ),
    "in an object": (lambda o: o.a * (2 if o.a is o.b else 3), [(Pair(X, X),), (Pair(X, X + 1),), (Pair(X, X),)]),
    "id": (lambda x, y: x * (2 if id(x) == id(y) else 3), [SAME, OTHER, SAME]),
    "a set": (lambda x, y: x * len({x, y}), [SAME, OTHER, SAME]),
    "a key": (lambda x, y: x * {x: 2}.get(y, 3), [SAME, OTHER, SAME]),
    "an attribute": (
        lambda m, x: x * (2 if m.t is x else 3), [(m := Holder(t=X), X), (m, X), (m, X + 1), (m, X), (m, X)]
    ),
    "a buffer": (lambda m, x: x * (2 if m.b is x else 3), [(m := Holder(), m.b), (m, X), (m, m.b), (m, m.b), (m, X)]),
    "what is kept": (keeps, [(m := Holder(), X), (m, X), (m, X + 1), (m, X), (m, X)]),
    "a write": (lambda z: (z[0].add_(1), z[1] * 2)[1], [([y := X.clone(), y],), ([y, y],), ([y, X.clone()],)]),
}  # fmt: skip


@pytest.mark.parametrize("fn, calls", ONE.values(), ids=ONE)
@pytest.mark.parametrize("placed", [False, True], ids=["replicated", "sharded"])
def test_one_tensor_is_one_in_the_step(fn: Callable, calls: list[tuple], placed: bool) -> None:
    def fresh() -> list[tuple]:
        made: dict[int, Any] = {}
        return [tuple(copied(x, made) for x in given) for given in calls]

    names = {"in a list": "x", "in an object": "o.*", "a write": "z.*"}
    how = {"inputs": {next((n for k, n in names.items() if ONE[k][0] is fn), "x"): {"dp": Shard(0)}}} if placed else {}
    assert on_ranks(fn, fresh(), **how) == results(fn, fresh())


def copied(x: Any, made: dict[int, Any]) -> Any:
    """A copy, in which what was one object is one."""
    if id(x) not in made:
        if isinstance(x, torch.Tensor):
            made[id(x)] = x, x.clone()
        elif isinstance(x, list):
            made[id(x)] = x, [copied(part, made) for part in x]
        elif isinstance(x, Pair):
            made[id(x)] = x, Pair(copied(x.a, made), copied(x.b, made))
        else:
            new = Holder()
            new.b = copied(x.b, made)
            vars(new).update({name: copied(part, made) for name, part in vars(x).items() if name == "t"})
            made[id(x)] = x, new
    return made[id(x)][1]


def test_a_call_with_one_tensor_twice_is_made_again_at_once() -> None:
    def twice(x, y):
        return x * (2 if x is y else 3)

    with LocalTensorMode(2):
        step = spmd.compile(twice, init_device_mesh("cpu", (2,)))
        for _ in range(3):
            step(X, X)
        repeat = step._repeats[0]
        assert repeat.ready((OTHER[1], OTHER[1]), {}) is not None
        assert repeat.ready(OTHER, {}) is None


# ---- what users have set on arguments ---------------------------------------------------------


def tagged(**attributes: Any) -> torch.Tensor:
    x = torch.ones(8)
    vars(x).update(attributes)
    return x


TAGS = {
    "a number": (lambda x: x * x.k, [(tagged(k=n),) for n in (1, 2, 2, 2, 3)]),
    "whether there is one": (
        lambda x: x * (2 if hasattr(x, "k") else 3), [(tagged(**each),) for each in ({"k": 1}, {}, {}, {}, {"k": 1})]
    ),
    "whether it is a parameter": (
        lambda x: x * (2 if isinstance(x, nn.Parameter) else 3),
        [(X,), (nn.Parameter(X.clone(), requires_grad=False),), (X,), (X,)],
    ),
    "in a list": (lambda z: z[0] * len(z[0].names), [([tagged(names=["a"] * n)],) for n in (1, 2, 2, 2, 1)]),
    "of an attribute": (
        lambda m, x: x * m.t.k, [(m := Holder(t=tagged(k=2)), X), (m, X), (m, X), (Holder(t=tagged(k=3)), X)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("fn, calls", TAGS.values(), ids=TAGS)
def test_attributes_of_arguments_are_read(fn: Callable, calls: list[tuple]) -> None:
    assert on_ranks(fn, calls) == results(fn, calls)


def sets_a_tag(x):
    x.tag = 3
    return x + 1


def counts_in_a_tag(x):
    x.n = getattr(x, "n", 0) + 1
    return x * x.n


def deletes_a_tag(x):
    del x.k
    return x + 1


def tags_an_attribute(m, x):
    m.t.k = 3
    return x * m.t


def wants_a_gradient(x):
    x.requires_grad_()
    (x * x).sum().backward()
    return x.grad


def wants_one_in_a_list(z):
    z[0].requires_grad = True
    return z[0] * 2


def sets_a_gradient(x):
    x.grad = x * 2
    return x + 1


LOST = {
    "a tag": (sets_a_tag, (X,), "sets the attribute tag of the argument x"),
    "a count": (counts_in_a_tag, (X,), "sets the attribute n of the argument x"),
    "no tag": (deletes_a_tag, (tagged(k=1),), "sets the attribute k of the argument x"),
    "a tag of an attribute": (tags_an_attribute, (Holder(t=torch.ones(8)), X), "sets the attribute k of .* m.t"),
    "a gradient": (wants_a_gradient, (X,), r"lets its argument x require a gradient, .* x.detach\(\)"),
    "in a list": (wants_one_in_a_list, ([X],), "lets its argument z.0 require a gradient"),
    "a gradient that is set": (sets_a_gradient, (X,), "or sets one"),
}  # fmt: skip


@pytest.mark.parametrize("fn, given, said", LOST.values(), ids=LOST)
def test_what_would_not_stay_in_an_argument_is_refused(fn: Callable, given: tuple, said: str) -> None:
    with LocalTensorMode(2), pytest.raises(RuntimeError, match=said):
        spmd.compile(fn, init_device_mesh("cpu", (2,)))(*copied_all(given))


def copied_all(given: tuple) -> tuple:
    return tuple(tagged(**vars(x)) if isinstance(x, torch.Tensor) else x for x in given)


def requires_for_a_while(x):
    x.requires_grad_()
    (g,) = torch.autograd.grad((x * x).sum(), x)
    x.requires_grad_(False)
    return g


def test_an_argument_may_require_a_gradient_for_a_while() -> None:
    calls = [(torch.ones(4),)] * 3
    assert on_ranks(requires_for_a_while, calls) == results(requires_for_a_while, calls)


# ---- sizes ------------------------------------------------------------------------------------


class TakesSizes(nn.Module):
    def forward(self, x, size):
        return x * size.numel() if isinstance(size, torch.Size) else x * 0


BLOCKS = nn.Sequential(TakesSizes(), TakesSizes(), TakesSizes(), TakesSizes())


def gives_sizes_to_blocks(x):
    for block in BLOCKS:
        x = block(x, x.shape)
    return x


SIZES: dict[str, Callable] = {
    "shape": lambda x: x.shape,
    "size()": lambda x: x.size(),
    "a part": lambda x: x.shape[:-1],
    "a sum": lambda x: x.shape + (1,),
    "a new one": lambda x: torch.Size([x.shape[0], 3]),
    "beside tensors": lambda x: {"x": x * 2, "sizes": [x.shape, tuple(x.shape)]},
    "of a constant": lambda x: BUFFER.shape,
    "given to modules": gives_sizes_to_blocks,
}  # fmt: skip

BUFFER = torch.ones(3, 2)


@pytest.mark.parametrize("fn", SIZES.values(), ids=SIZES)
def test_sizes_are_given_back_as_sizes(fn: Callable) -> None:
    calls = [(torch.ones(n, 2),) for n in (4, 4, 4, 8, 8, 8)]
    assert on_ranks(fn, calls, inputs={"x": {"dp": Shard(0)}}) == results(fn, calls)


def test_sizes_are_taken_as_sizes() -> None:
    def fn(x, size):
        return x * (size.numel() if isinstance(size, torch.Size) else 0), size

    calls = [(X, torch.Size([n, 2])) for n in (1, 1, 1, 3)]
    assert on_ranks(fn, calls) == results(fn, calls)


def test_kept_programs_give_sizes(tmp_path) -> None:
    def fn(x):
        return {"x": x * 2, "sizes": [x.shape, tuple(x.shape)]}

    calls = [(torch.ones(4, 2),), (torch.ones(8, 2),)]
    for _ in range(2):
        assert on_ranks(fn, calls, cache=tmp_path) == results(fn, calls)


def test_a_cache_folder_knows_what_is_one_tensor(tmp_path) -> None:
    def fn(x, y):
        return x * (2 if x is y else 3)

    for calls in ([SAME], [OTHER], [SAME, OTHER], [OTHER, SAME]):
        assert on_ranks(fn, calls, cache=tmp_path) == results(fn, calls)


def test_a_cache_folder_knows_the_attributes_of_arguments(tmp_path) -> None:
    def fn(x):
        return x * getattr(x, "k", 5)

    for calls in ([(tagged(k=1),)], [(tagged(k=2),)], [(tagged(),)], [(tagged(k=1),)]):
        assert on_ranks(fn, calls, cache=tmp_path) == results(fn, calls)
