"""What a trace does quickly gives the graph that torch's own modes give: same nodes, same order, same values."""

from unittest import mock

import pytest
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from spmd import Shard, _torch
from spmd._torch.quick_traces import quick_functional_mode, record_quickly
from spmd._torch.size_nodes import elements_of
from spmd.tensor.rules.decompositions import decompositions

aten = torch.ops.aten


def _views_of_written(x, y):
    y = y.clone()
    y[1:3] = 0
    y.mul_(2).transpose(0, 1).add_(1)
    first, second = y.chunk(2)
    return first @ x[:, :1].expand(-1, 8).t(), second


def _written_through_view(x, y):
    z = x.clone()
    z.view(-1)[0].zero_()
    z.t().copy_(y[:, : z.shape[0]])
    return z, z + 1


def _out_and_detach(x, y):
    z = torch.empty_like(x)
    torch.add(x, y[: x.shape[0], : x.shape[1]], out=z)
    return z.detach().mul_(3), z


STEPS = {
    "products": lambda x, y: (x @ y, torch.addmm(y[0], x, y), (x @ y).softmax(-1)),
    "several results": lambda x, y: (*torch.native_layer_norm(x, [x.shape[1]], None, None, 1e-5), *x.topk(2)),
    "lists": lambda x, y: (torch.cat([x.t(), y], 1), torch.stack([x, x])),
    "known constants": lambda x, y: (x * torch.tensor(2.0), torch.tensor([1.0, 2.0]) + 1),
    "indices": lambda x, y: (x[torch.arange(2)], x.masked_fill(x > 0.5, 0.0)),
    "made": lambda x, y: (x.new_zeros(x.shape), torch.arange(x.shape[0]), x.sum((0, 1)), torch.full((2,), 3.0)),
    "dtypes": lambda x, y: (x.to(torch.float64), x.bool(), (x > 0) & (x < 1), x.sum(dtype=torch.float64)),
    "taken apart": lambda x, y: (torch.nn.functional.linear(x, y.t(), y[0]), x.std(), x.mean(), x.flatten()),
    "options": lambda x, y: (torch.add(x, x, alpha=2), torch.clamp(x, min=0.1), torch.addcmul(x, x, x, value=0.5)),
    "views of what is written": _views_of_written,
    "written through a view": _written_through_view,
    "out and detach": _out_and_detach,
}  # fmt: skip


def _graph(step, is_quick):
    def flat(x, y):
        if is_quick:
            record_quickly(_torch.proxy_mode())
        with quick_functional_mode() if is_quick else _torch.FunctionalTensorMode():
            made = step(*_torch.all_to_functional([x, y]))
            return [_torch.from_functional(each) for each in made]

    graph = make_fx(flat, decompositions, tracing_mode="fake")(torch.ones(4, 6), torch.ones(6, 8)).graph
    calls = [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]
    return [(*call, _described(n.meta.get("val"))) for call, n in zip(calls, graph.nodes, strict=True)]


def _described(value):
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    return (value.dtype, str(value.shape), str(value.stride())) if isinstance(value, torch.Tensor) else str(value)


@pytest.mark.parametrize("name", STEPS)
def test_graph_is_that_of_torchs_modes(name):
    assert _graph(STEPS[name], True) == _graph(STEPS[name], False)


def _program(step):
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})
    return str(compiled.program_for(torch.ones(4, 6), torch.ones(6, 8)))


@pytest.mark.parametrize("name", STEPS)
def test_program_with_sizes_that_are_symbols_is_that_of_torchs_modes(name):
    quick = _program(STEPS[name])
    with (
        mock.patch("spmd._torch.sizes.record_quickly"),
        mock.patch("spmd._torch.quick_functional_mode", _torch.FunctionalTensorMode),
    ):
        assert quick == _program(STEPS[name])


def test_usual_ops_are_recorded_without_torchs_questions():
    """Neither of torch's modes is asked: what another version of torch calls otherwise would be slow in silence."""
    asked = AssertionError("asked")
    with (
        mock.patch.object(proxy_tensor, "proxy_call", side_effect=asked),
        mock.patch.object(_torch.FunctionalTensorMode, "__torch_dispatch__", side_effect=asked),
    ):
        nodes = _graph(lambda x, y: (torch.mm(x, y), x.t(), x.clone().add_(1)), True)
        assert [target for op, _, target, *_ in nodes if op == "call_function"] == [
            "aten.mm.default", "aten.t.default", "aten.clone.default", "aten.add.Tensor",
        ]  # fmt: skip
        with pytest.raises(AssertionError, match="asked"):
            _graph(lambda x, y: (x.std(),), True)  # is taken apart


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        raise AssertionError(op)


LAYOUTS = [((4, 6), (6, 1), 0), ((4, 6), (1, 4), 3), ((2, 0), (1, 1), 0), ((), (), 2), ((3,), (0,), 0)]


@pytest.mark.parametrize("shape, stride, offset", LAYOUTS)
def test_elements_of_memory_are_those_that_torch_counts(shape, stride, offset):
    wrapper = torch.Tensor._make_wrapper_subclass(_Wrapper, shape, stride, offset, dtype=torch.float32)
    assert elements_of(shape, stride, offset) * 4 == wrapper.untyped_storage().nbytes()
