"""What is one object or one memory on one device is one behind a compiled call: random steps, and some by hand."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

import spmd
from spmd.expand.compile import CompiledStep
from tests.expand.random_aliases import Aliases, Net, seen

SEEDS = range(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_one_in_a_random_step_is_one(seed, tmp_path):
    """Values, which of all names are one object, and which tensors show one memory."""
    aliases = Aliases.of(seed)
    found = seen(aliases, tmp_path)
    assert not found.difference, f"{found.difference}\n{aliases}"


def by_hand(*lines, result="()", between=((), (), (), ())):
    return Aliases(lines, result, between, share=False, gives_own=False, batches=(4, 4, 4, 4), mode="plain")


CASES = {
    "a list for two": by_hand("model.k = model.l"),
    "a list for two, and written": by_hand(
        "model.k = model.l", "model.k[0] = h", between=(("model.l[1] = model.a",),) * 4
    ),
    "a new list": by_hand("model.k = [h, h * 2]", result="model.k"),
    "a new list for two": by_hand("model.k = model.l = [model.a, h]", result="[model.k, model.l]"),
    "the old list, changed": by_hand(
        "old = model.k", "model.k = [h, old[1]]", "old[0] = model.a", result="(old, model.k)"
    ),
    "swapped lists": by_hand("model.k, model.l = model.l, model.k", result="{0: model.k}"),
    "a copy": by_hand("model.k = list(model.k)", "model.d = dict(model.d)"),
    "a list in a dict and by itself": by_hand('model.d["y"] = model.k', "model.k.reverse()", result="model.d"),
    "one list twice in another": by_hand("model.nested = [model.k] * 2", "model.k[1] = h"),
    "a tuple": by_hand("model.pair = (h, model.k)", 'model.d = {"x": h, "y": model.pair[1]}', result="model.pair"),
    "a named tuple": by_hand("model.named = Pair(model.a, model.l)", result="[model.named, model.named]"),
    "a queue": by_hand("model.q.append(h)", "model.q.popleft()", result="(model.q, model.q[1])"),
    "an ordered dict": by_hand("model.o['x'] = h", "model.o['y'] = model.k", result="model.o"),
    "an object": by_hand("model.box.t = h", "model.box.l = model.l", result="(model.box, Box(h, model.box.l))"),
    "another object": by_hand("model.box = Box(model.a, model.box.l)", result="model.box"),
    "of an object around the step": by_hand("held.l = model.k", "held.t = model.k[0] = h", result="held.l"),
    "an argument": by_hand("given[0] = h", "model.k = given", "given.reverse()"),
    "an argument that is an attribute": replace(by_hand("given[0] = h", result="model.l"), gives_own=True),
    "views of views": by_hand(
        "model.m = model.table.t()", "model.a = model.m[1]", result="[model.m.t()[2][:], model.a[:]]"
    ),
    "two views of one part": by_hand(
        'model.d["y"][:] = [model.m.diagonal(), model.m.diagonal()]', result="(model.m.view(-1)[4:8], model.d)"
    ),
    "two views of one part, in a list that is returned": by_hand(
        "model.l[:] = [model.n.t()[2], model.n.t()[2]]", result="(model.l[::-1], )"
    ),
    "parts of a value that nobody keeps": by_hand(
        "model.k = [y[1], y.t()[1]]", "model.a = h[:]", result="(y.view(-1)[:4], y.detach()[:, 1], model.k[0])"
    ),
    "a list that is returned twice, and a view of what it has": by_hand(
        "model.d.update(x=model.k[0][:])", result="[model.k] * 2"
    ),
    "a view of all": by_hand("model.box.t = held.l[1][:]", result="[model.box.t, model.b]"),
    "a row of a weight, kept and returned": by_hand(
        "model.box.t = model.up.weight.detach()[0]", "model.k = [model.box.t, model.b]", result="[model.k[0]]"
    ),
    "views of batches": replace(
        by_hand("model.s = y", "model.a = y[1:][0]", result="y[0]"), batches=(4, 6, 2, 4)
    ),
}
"""Lists, dicts, tuples and objects that a step shares, sets, swaps and returns."""


@pytest.mark.parametrize("mode", ["plain", "loaded", "inference"])
@pytest.mark.parametrize("name", CASES)
def test_a_container_that_is_one_is_one(name, mode, tmp_path):
    found = seen(replace(CASES[name], mode=mode), tmp_path)
    assert not found.difference and not found.refused, found


def shares_a_plain_list(model, x):
    model.names = model.parts["names"]
    return model.up(x)


def writes_a_plain_list(model, x):
    model.parts["names"].append("c") if len(model.parts["names"]) < 3 else None
    return model.up(x)


def writes_its_other_name(model, x):
    model.names.append("c") if len(model.names) < 3 else None
    return model.up(x)


@pytest.mark.parametrize("step", [shares_a_plain_list, writes_a_plain_list, writes_its_other_name])
def test_a_list_that_is_in_attributes_with_tensors_and_without_is_refused(step):
    """A capture has a copy of the one and not of the other."""
    model = Net(share=False)
    model.parts = {"x": model.a, "names": ["a", "b"]}
    model.names = ["a"] if step is shares_a_plain_list else model.parts["names"]
    compiled = spmd.compile(step, spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))
    with pytest.raises(RuntimeError, match=r"a list .*without tensors.*\n  at .*test_alias_fuzz\.py"):
        compiled(model, model.m)
    assert model.parts["names"] == ["a", "b"]


LONG = {"views of batches": 7, "parts of a value that nobody keeps": 7, "a row of a weight, kept and returned": 7}
"""The calls made the long way: a row of what is sharded is a copy that follows it, and is asked about each time."""


@pytest.mark.parametrize("name", CASES)
def test_calls_that_set_containers_are_made_again_at_once(name, tmp_path):
    case = replace(CASES[name], batches=(4,) * 7, between=((),) * 7)
    real = CompiledStep._run_anew
    with mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=real) as anew:
        found = seen(case, tmp_path)
    assert not found.difference and anew.call_count <= LONG.get(name, 4)
