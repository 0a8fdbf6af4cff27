"""Scripts that were written for torch.distributed run with other import lines, and learn what one device learns.

`python benchmarks/scripts.py` runs them as they are, too, on gloo, and compares what torch's own computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parallel.scripts.common import batches, loss_of, make_model

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = ("tensor_parallel", "fsdp2", "two_d", "checkpoint", "long_context")
IMPORTS = {
    "from torch.distributed.checkpoint.state_dict import": "from spmd.checkpoint import",
    "from torch.distributed.device_mesh import": "from spmd import",
    "from torch.distributed.fsdp import": "from spmd.parallel import",
    "from torch.distributed.tensor.experimental import": "from spmd.parallel import",
    "from torch.distributed.tensor.parallel import": "from spmd.parallel import",
    "from torch.distributed.tensor import": "from spmd import",
}
"""All that changes: the beginnings of lines."""


def moved(name: str) -> Callable[[str], list[float]]:
    """The main function of a script whose import lines are changed."""
    text = (FOLDER / f"{name}.py").read_text()
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        for old, new in IMPORTS.items():
            if line.startswith(old):
                lines[i] = line.replace(old, new)
    assert lines != text.splitlines(keepends=True)
    return loaded("".join(lines), name)


def loaded(text: str, name: str) -> Callable[[str], list[float]]:
    found: dict = {}
    exec(compile(text, str(FOLDER / f"{name}.py"), "exec"), found)
    return found["main"]


def alone(clip: float) -> list[float]:
    """The losses of one device."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches():
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_rank(rank: int, folder: str) -> dict[str, list[float]]:
    return {name: moved(name)(f"{folder}/{name}") for name in SCRIPTS}


def test_they_run_by_their_import_lines_alone(gloo4, tmp_path):
    whole, clipped = alone(math.inf), alone(0.5)
    for losses in gloo4.run(on_rank, str(tmp_path)):
        for name in SCRIPTS:
            assert losses[name] == pytest.approx(clipped if name == "fsdp2" else whole, rel=1e-10), name


def test_nothing_of_torchs_dtensor_is_left():
    """What stays of torch.distributed: the process group's own functions, and the files of checkpoints."""
    stays = {"torch.distributed", "torch.distributed.checkpoint"}
    for name, old in itertools.product(SCRIPTS, ("import torch.distributed", "from torch.distributed")):
        for line in (FOLDER / f"{name}.py").read_text().splitlines():
            if line.startswith(old) and not any(line.startswith(start) for start in IMPORTS):
                assert line.split()[1] in stays
