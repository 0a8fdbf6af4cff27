"""Walks over modules give what torch's give."""

import pytest
from torch import nn

from spmd.expand.modules import buffers_of, modules_of, named_buffers, named_modules, named_parameters, parameters_of


class Own(nn.Module):
    """A module that shows its parameters under names of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield f"{prefix}.shown", self.inner


def shared() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    root = nn.ModuleDict({"one": block, "two": nn.ModuleList([block, nn.Linear(2, 2)])})
    root["two"][1].weight = block[0].weight
    return root


def with_gaps() -> nn.Module:
    root = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    root.register_module("nothing", None)
    root.register_buffer("none", None)
    return root


MODELS = {
    "alone": lambda: nn.Linear(2, 2), "shared": shared, "gaps": with_gaps,
    "walks its own way": lambda: nn.Sequential(nn.Linear(2, 2), Own()),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_walk_is_that_of_torch(model):
    root = model()

    def ids(found):
        return [(path, id(x)) for path, x in found]

    assert ids(named_modules(root)) == ids(root.named_modules())
    assert ids(named_parameters(root)) == ids(root.named_parameters(remove_duplicate=False))
    assert ids(named_buffers(root)) == ids(root.named_buffers(remove_duplicate=False))
    alone = [(modules_of, root.modules()), (parameters_of, root.parameters()), (buffers_of, root.buffers())]
    for mine, theirs in alone:
        assert list(map(id, mine(root))) == list(map(id, theirs))
