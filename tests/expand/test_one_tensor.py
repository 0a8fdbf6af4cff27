"""What is one tensor on one device is one behind a compiled call: in attributes, buffers, lists and results.

So a later write in place, by the next call or by the user between calls, is seen under all of its names.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Partial, Replicate, Shard
from spmd.expand.compile import CompiledStep
from tests.tensor.single import every_rank

X = torch.linspace(-1, 2, 32, dtype=torch.float64).reshape(8, 4)


def row(value):
    return torch.full((4,), value, dtype=torch.float64)


class Box:
    def __init__(self):
        self.t = row(0.75)


class Net(nn.Module):
    """keep: what becomes of its tensors in a forward; returns what the step returns besides the loss."""

    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.keep = nn.Linear(4, 4).double(), keep
        self.a, self.b, self.l, self.box, self.d = row(1.0), row(2.0), [row(3.0), row(4.0)], Box(), {"x": row(0.5)}
        self.register_buffer("buf", row(0.25))
        self.p = row(7.0)

    def forward(self, x, given=None):
        h = self.up(x) + self.a.tanh() - self.b * self.l[0] + self.box.t * self.d["x"] + self.buf
        return h.square().mean(), self.keep(self, h.detach().mean(0), given)


def train(model, optimizer, x, given=None):
    optimizer.zero_grad()
    loss, more = model(x, given)
    loss.backward()
    optimizer.step()
    return loss.detach(), more


# ---- what a step does with tensors ------------------------------------------------------------


def sets_one_to_another(self, h, given):
    self.b = self.a


def sets_two_to_a_new_one(self, h, given):
    self.a = self.b = h + 1


def sets_two_and_returns_it(self, h, given):
    self.a = self.l[1] = self.a + h
    return self.a


def swaps(self, h, given):
    self.a, self.b = self.b, self.a


def swaps_in_a_list(self, h, given):
    self.l = [self.l[1], self.l[0]]


def shifts(self, h, given):
    """Each tensor moves on to the next name."""
    self.box.t, self.d["x"], self.l[0] = self.d["x"], self.l[0], self.box.t


def sets_one_and_writes_it(self, h, given):
    self.b = self.a
    self.a += h


def writes_and_takes_another(self, h, given):
    """The old tensor is written, and is not `a` any more."""
    self.a += 1
    self.l[0], self.a = self.a, h


def writes_in_an_object(self, h, given):
    self.box.t.add_(self.buf)
    self.d["x"] = self.box.t


def writes_rows(self, h, given):
    self.l[0][1:] = h[1:]
    self.b = self.l[0]


def writes_what_it_does_not_read(self, h, given):
    self.l[1].copy_(h)
    self.buf.mul_(0.5)


def returns_one_twice(self, h, given):
    return [h, {"again": h, "another": h * 1}]


def returns_what_it_holds(self, h, given):
    return self.a, self.l


def returns_what_it_writes(self, h, given):
    self.b.mul_(0.5)
    return self.b, self.b


def returns_a_new_buffer(self, h, given):
    self.buf = self.buf * 0.5
    return self.buf


def keeps_it_and_returns_it_detached(self, h, given):
    self.b = h * 1
    return self.b.detach(), [self.b.detach()]


def returns_another_of_its_memory(self, h, given):
    self.l[1] = self.l[1].detach()
    return self.a.detach(), self.d["x"].view(-1), h, h.detach()


def keeps_the_weight_detached(self, h, given):
    """And reads it behind that alone."""
    self.b = self.b * 1
    self.l[1] = self.up.weight.detach()
    return self.l[1].sum()


def keeps_an_argument(self, h, given):
    self.b, self.l[1] = given[0], given[1]


def writes_in_a_container(self, h, given):
    given[0].add_(h)
    return given[0]


def keeps_a_part_of_what_it_keeps(self, h, given):
    self.a, self.b = h * 1, h * 2
    self.p, self.l[1] = self.a.view(2, 2)[0], self.b[1:]
    self.b[2:].mul_(2)


def returns_a_part_beside_all(self, h, given):
    all_of = h.outer(h)
    return all_of[:, 1:], all_of, all_of[0], all_of.t()[1:3]


def keeps_a_part_of_a_buffer(self, h, given):
    self.buf.mul_(0.5)
    self.p = self.buf[1:]


def keeps_a_row_of_a_weight(self, h, given):
    """And a part of that."""
    self.p = self.up.weight.detach()[0]
    self.l[1] = self.p[2:]


def writes_a_buffer_and_sets_another(self, h, given):
    """The old one is written, whoever holds it."""
    self.buf.add_(h)
    self.buf = self.buf * 0.5
    self.p = self.buf[1:]


def sets_a_buffer_to_what_it_keeps(self, h, given):
    self.register_buffer("buf", h * 1)
    self.p = self.buf.detach()
    return self.buf, self.buf[1:]


def keeps_pieces(self, h, given):
    """Which have no element in common."""
    self.p, self.l[1] = (h * 1).chunk(2)


def returns_a_part_of_what_it_holds(self, h, given):
    return self.a[1:], self.l[0][:2], self.l[0][:2].detach()


KINDS = {
    fn.__name__: fn
    for fn in (
        sets_one_to_another, sets_two_to_a_new_one, sets_two_and_returns_it, swaps, swaps_in_a_list, shifts,
        sets_one_and_writes_it, writes_and_takes_another, writes_in_an_object, writes_rows,
        writes_what_it_does_not_read, returns_one_twice, returns_what_it_holds, returns_what_it_writes,
        keeps_it_and_returns_it_detached, returns_another_of_its_memory, keeps_the_weight_detached, keeps_an_argument,
        writes_in_a_container, keeps_a_part_of_what_it_keeps, returns_a_part_beside_all, keeps_a_part_of_a_buffer,
        keeps_a_row_of_a_weight, keeps_pieces, returns_a_part_of_what_it_holds, returns_a_new_buffer,
        writes_a_buffer_and_sets_another, sets_a_buffer_to_what_it_keeps,
    )
}  # fmt: skip


class Session:
    """A model with its optimiser, and tensors that the user has got hold of."""

    def __init__(self, keep):
        self.model = Net(keep)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.given = [row(5.0), row(6.0)] if keep in (keeps_an_argument, writes_in_a_container) else None
        self.handles: list[torch.Tensor] = []

    def call(self, step, i):
        loss, more = step(self.model, self.optimizer, X + i, self.given)
        returned = spmd._torch.pytree.tree_leaves(more)
        self.handles += [x for x in returned if isinstance(x, torch.Tensor)]
        return loss

    def tensors(self):
        m = self.model
        return [m.a, m.b, m.p, *m.l, m.box.t, m.d["x"], m.buf, *(self.given or ()), *self.handles]


BETWEEN = {
    "nothing": lambda s: None,
    "a write": lambda s: s.model.a.add_(1),
    "a write into the other": lambda s: s.model.b.mul_(0.5),
    "writes into all": lambda s: [x.mul_(0.75) for x in set(s.tensors())],
    "a handle": lambda s: s.handles.extend([s.model.a, s.model.l[0], s.model.box.t, s.model.buf]),
    "one for two": lambda s: setattr(s.model, "b", s.model.a),
    "two for one": lambda s: setattr(s.model, "b", s.model.a * 1),
    "a result": lambda s: [x.sub_(1) for x in s.handles[-1:]],
}


def names_of(tensors):
    """Which of these are one tensor."""
    first = {}
    return [first.setdefault(id(x), i) for i, x in enumerate(tensors)]


def check_equal(ours, alone):
    assert names_of(ours.tensors()) == names_of(alone.tensors())
    for got, want in zip(ours.tensors(), alone.tensors(), strict=True):
        torch.testing.assert_close(every_rank(got)[0], want.detach())


def compiled():
    mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}})


@pytest.mark.parametrize("order", [1, -1], ids=["in turn", "from behind"])
@pytest.mark.parametrize("keep", KINDS.values(), ids=KINDS.keys())
def test_what_is_one_tensor_stays_one(keep, order):
    """Values, and which of the names are of one tensor, after each of several calls and what the user does between."""
    ours, alone = Session(keep), Session(keep)
    with LocalTensorMode(2):
        step = compiled()
        for i, between in enumerate(["nothing", *BETWEEN][::order]):
            want = alone.call(train, i)
            torch.testing.assert_close(every_rank(ours.call(step, i))[0], want)
            check_equal(ours, alone)
            with torch.no_grad():
                BETWEEN[between](alone), BETWEEN[between](ours)
            check_equal(ours, alone)


def test_an_argument_may_be_what_an_attribute_is():
    """From the second call on, the step writes into both."""
    ours, alone = Session(writes_what_is_a_name_of_an_argument), Session(writes_what_is_a_name_of_an_argument)
    with LocalTensorMode(2):
        step = compiled()
        for session in (ours, alone):
            session.given = [row(5.0), row(6.0)]
        for i in range(4):
            torch.testing.assert_close(every_rank(ours.call(step, i))[0], alone.call(train, i))
            check_equal(ours, alone)


def test_a_buffer_that_is_set_is_another_tensor():
    """Whoever holds the old one keeps its numbers, and the buffer is what the step returns."""
    ours, alone = Session(returns_a_new_buffer), Session(returns_a_new_buffer)
    with LocalTensorMode(2):
        step = compiled()
        for i in range(5):
            for session, run in ((alone, train), (ours, step)):
                session.handles.append(session.model.buf)
                session.call(run, i)
                assert session.model.buf is session.handles[-1] is not session.handles[-2]
            for got, want in zip(ours.tensors(), alone.tensors(), strict=True):
                torch.testing.assert_close(every_rank(got)[0], want.detach())


def writes_what_is_a_name_of_an_argument(self, h, given):
    given[0].add_(h)
    self.l[0] = self.b * h
    self.b = given[0]


def reads_a_parameter_of_the_call_before(self, h, given):
    self.a = self.up.bias.detach()


def takes_its_buffer(self, h, given):
    self.b = self.buf


REFUSED = {
    "a parameter": (reads_a_parameter_of_the_call_before, ValueError, r"model\.a shares memory with model\.up\.bias"),
    "a buffer": (takes_its_buffer, RuntimeError, r"sets model\.b to model\.buf, .* set it to a clone\(\)"),
}


@pytest.mark.parametrize("keep, kind, why", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_one_tensor_is_refused_in_words(keep, kind, why):
    session = Session(keep)
    with LocalTensorMode(2):
        step = compiled()
        with pytest.raises(kind, match=why):
            for i in range(3):
                session.call(step, i)


def returns_what_it_keeps(model, x):
    h = model.up(x)
    model.a = h.detach()
    return {"h": h, "again": h}


def test_outputs_place_what_has_several_names():
    """All of them; and they cannot ask for two places, or for terms of a sum that an attribute would keep."""
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))

    def step(**outputs):
        return spmd.compile(returns_what_it_keeps, mesh, inputs={"x": {"dp": Shard(0)}}, outputs=outputs)

    with LocalTensorMode(2):
        model = Net(swaps)
        for _ in range(4):
            placed = step(again={"dp": Shard(1)})(model, X)
            assert placed["h"] is placed["again"] and placed["h"].placements == model.a.placements == (Shard(1),)
        with pytest.raises(ValueError, match=r"h and .*again other placements.* clone\(\)"):
            step(again={"dp": Shard(1)}, h={"dp": Shard(0)})(model, X)
        with pytest.raises(ValueError, match=r"one tensor with model\.a, .* clone\(\)"):
            step(h={"dp": Partial()})(model, X)


def returns_a_view(model, x):
    h = model.up(x)
    return {"h": h, "row": h[0]}


def test_a_view_lies_as_its_base_does():
    """Where outputs asks for another place, it is to be a clone."""
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))

    def step(**outputs):
        return spmd.compile(returns_a_view, mesh, inputs={"x": {"dp": Shard(0)}}, outputs=outputs)

    with LocalTensorMode(2):
        model = Net(swaps)
        found = step(h={"dp": Shard(1)})(model, X)
        found["row"].add_(1)
        assert found["row"].placements == (Shard(0),)
        torch.testing.assert_close(every_rank(found["h"])[0][0], every_rank(found["row"])[0])
        found = spmd.compile(returns_a_view, mesh, outputs={"*": [Replicate()]})(model, X)
        assert found["row"].placements == found["h"].placements == (Replicate(),)
        with pytest.raises(ValueError, match=r"placements to .*row, which is a view of .*h .* clone\(\)"):
            step(row={"dp": Shard(0)})(model, X)


LONG = {
    "writes_and_takes_another": 6, "shifts": 6, "sets_one_and_writes_it": 4, "keeps_an_argument": 4,
    "writes_in_a_container": 4, "writes_a_buffer_and_sets_another": 9,
}  # fmt: skip
"""The calls made the long way, where the names of one tensor, or the plain tensors among them, go on changing."""


@pytest.mark.parametrize("keep", KINDS.values(), ids=KINDS.keys())
def test_calls_that_keep_names_of_one_tensor_are_made_again_at_once(keep):
    session, real = Session(keep), CompiledStep._run_anew
    with LocalTensorMode(2), mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=real) as anew:
        step = compiled()
        for i in range(9):
            session.call(step, i)
    assert anew.call_count <= LONG.get(keep.__name__, 4)


@pytest.mark.parametrize("keep", KINDS.values(), ids=KINDS.keys())
def test_a_saved_step_and_a_cache_folder_know_what_is_one_tensor(keep, tmp_path):
    with LocalTensorMode(2):
        step, first = compiled(), Session(keep)
        for i in range(3):
            first.call(step, i)
        step.save(tmp_path / "step.spmd")
        cached = [spmd.compile(train, step.mesh, inputs={"x": {"dp": Shard(0)}}, cache=tmp_path) for _ in range(2)]
        for again in (spmd.load_step(tmp_path / "step.spmd", train, step.mesh), *cached):
            ours, alone = Session(keep), Session(keep)
            for i in range(2):
                alone.call(train, i), ours.call(again if not i else step, i)
                check_equal(ours, alone)
