"""Do train steps as people write them give on a mesh what they give on one device?

    python benchmarks/wild.py                       # all scripts of `wild_scripts.py`, about ten minutes
    python benchmarks/wild.py --part 1/4            # a quarter of them
    python benchmarks/wild.py "gan, spectral norm" pinn

Each script is called six times in float64, on one device and compiled, on four simulated ranks: "dp", data parallel;
"program", on 2x2 with the placements chosen for the program; "zero", parameters in shards. Before each call its
schedule has stepped; before the fourth everything that has a state dict has saved and loaded it; the fifth batch is
short. What is returned, parameters, buffers, gradients and the state of optimisers have to be equal within 1e-9. A step
that draws random numbers runs compiled for one rank, too, as only spmd numbers what is drawn. The table has the
largest difference, relative to the largest number beside it where that is above 1, or the error. Exits 1 if a script
does not run or differs.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from torch import nn
from torch.utils import _pytree as pytree
from wild_scripts import SCRIPTS, SIZES, Script

import spmd
from spmd import DTensor, LocalTensorMode, Shard

WAYS: dict[str, tuple[tuple[int, ...], dict]] = {
    "dp": ((4,), {}),
    "program": ((2, 2), {"choose": "program"}),
    "zero": ((4,), {"fully_shard": "dp"}),
}

Seen = dict[str, torch.Tensor]


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.reconcile().clone() if isinstance(x, spmd.LocalTensor) else x.clone()


def tensors(name: str, found: object) -> Iterator[tuple[str, torch.Tensor]]:
    for i, x in enumerate(pytree.tree_leaves(found)):
        if isinstance(x, (torch.Tensor, int, float)):
            yield f"{name} {i}", whole(x if isinstance(x, torch.Tensor) else torch.tensor(float(x)))


def state(made: tuple) -> Iterator[tuple[str, torch.Tensor]]:
    """What is left behind in models and optimisers."""
    for i, x in enumerate(made):
        if isinstance(x, nn.Module):
            yield from ((f"{i}.{name}", whole(t)) for name, t in x.state_dict().items())
            yield from ((f"{i}.{name}.grad", whole(p.grad)) for name, p in x.named_parameters() if p.grad is not None)
        elif isinstance(x, torch.optim.Optimizer):
            for j, p in enumerate(p for group in x.param_groups for p in group["params"]):
                yield from tensors(f"{i}.state {j}", [x.state[p][key] for key in sorted(x.state.get(p, {}))])


def save_and_load(made: tuple) -> None:
    for x in made:
        if hasattr(x, "load_state_dict"):
            x.load_state_dict(copy.deepcopy(x.state_dict()))


def trained(script: Script, prepare: Callable[[Callable], Callable]) -> Iterator[Seen]:
    """What is seen after each call."""
    torch.manual_seed(0)
    made, step = script.begin(), prepare(script.step)
    g = torch.Generator().manual_seed(1)
    for i, size in enumerate(SIZES):
        if i and script.schedule:
            script.schedule(i, made)
        if i == 3:
            save_and_load(made)
        given = [x for x in made if not isinstance(x, torch.optim.lr_scheduler.LRScheduler)]
        returned = step(*given, *script.batches(size, g))
        yield dict(tensors("returned", returned)) | dict(state(made))


def compiled(script: Script, shape: tuple[int, ...], said: dict) -> Callable[[Callable], Callable]:
    batch = script.batches(2, torch.Generator())
    names = [p.name for p in inspect.signature(script.step).parameters.values()][-len(batch) :]
    over = {name: {"dp": Shard(0)} for name in names if name not in script.replicated}
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    return lambda step: spmd.compile(step, mesh, inputs=over, **said)


def on_ranks(script: Script, shape: tuple[int, ...], said: dict) -> list[Seen]:
    with LocalTensorMode(torch.Size(shape).numel()):
        spmd.manual_seed(7)
        return list(trained(script, compiled(script, shape, said)))


def on_one_device(script: Script) -> list[Seen]:
    return on_ranks(script, (1,), {}) if script.draws else list(trained(script, lambda step: step))


def difference(got: Seen, want: Seen) -> float:
    assert got.keys() == want.keys(), f"seen on one side only: {sorted(got.keys() ^ want.keys())[:6]}"
    worst = 0.0
    for name, x in want.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype, f"{name}: {got[name].dtype} {got[name].shape}"
        if x.numel():
            apart = (got[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1)
            worst = max(worst, apart.item()) if apart == apart else float("nan")
    return worst


def outcome(script: Script, way: str, want: list[Seen], details: bool = False) -> str:
    """The largest difference of all calls as text, or the error."""
    try:
        got = on_ranks(script, *WAYS[way])
        apart = [difference(a, b) for a, b in zip(got, want, strict=True)]
    except Exception as error:
        if details:
            traceback.print_exc()
        return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:300]
    if max(apart) <= script.tolerance:
        return f"{max(apart):.0e}"
    return "differs: " + " ".join(f"{x:.0e}" for x in apart)


def asked() -> tuple[list[str], bool]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="scripts, all by default")
    parser.add_argument("--part", default="1/1", help="which part of how many, such as 2/4")
    parser.add_argument("--details", action="store_true", help="print the tracebacks of errors")
    given = parser.parse_args()
    k, n = map(int, given.part.split("/"))
    return [name for name in SCRIPTS if not given.names or name in given.names][k - 1 :: n], given.details


def main() -> int:
    names, details = asked()
    torch.set_default_dtype(torch.float64)
    rows = []
    for name in names:
        began = time.process_time()
        try:
            want = on_one_device(SCRIPTS[name])
        except Exception as error:
            if details:
                traceback.print_exc()
            found = [f"one device: {type(error).__name__}: {error}".replace("\n", " ")[:300], "", ""]
        else:
            found = [outcome(SCRIPTS[name], way, want, details) for way in WAYS]
        rows.append([name, *found, f"{time.process_time() - began:.0f}"])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(table(["script", *WAYS, "seconds"], rows))
    return int(any(not cell.replace("e-", "").replace("e+", "").isdigit() for row in rows for cell in row[1:4]))


if __name__ == "__main__":
    sys.exit(main())
