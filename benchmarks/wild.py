"""Do train steps as people write them give on a mesh what they give on one device?

    python benchmarks/wild.py                       # all scripts of `wild_*.py`: half an hour
    python benchmarks/wild.py --part 1/4            # a quarter of them
    python benchmarks/wild.py "gan, spectral norm" pinn --way dp --way zero

Each script is called six times or more in float64, on one device and compiled, on four simulated ranks: "dp", data
parallel; "program", on 2x2 with the placements chosen for the program; "zero", parameters in shards; "zero+tp", on 2x2,
what has two dims and more sharded over tp, too, by rows and by columns in turns. With `--way kept`, which is not among
those by default, the programs of "dp" are saved and loaded, and run from the first call on. Before each call its
schedule has stepped; before the fourth everything that has a state dict has saved and loaded it; the last batch but one
is short. What is returned, parameters, buffers, gradients and the state of optimisers have to be equal within 1e-10. A
step that draws random numbers runs compiled for one rank, too, as only spmd numbers what is drawn. The table has the
largest difference, relative to the largest number beside it where that is above 1, or the error. "captured" has the
numbers of the calls in which the first way captured the step, from 1. "rounding" is how far
the step moves by itself, on one device, if the last bit of every parameter and of every number of a batch may be
another: nobody can be asked for less. Exits 1 if a script does not run or differs.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from torch import nn
from torch.utils import _pytree as pytree
from wild_more import MORE
from wild_own import OWN
from wild_papers import PAPERS
from wild_scripts import SCRIPTS as SMALL
from wild_scripts import Script

import spmd
from spmd import DTensor, LocalTensorMode, Shard
from spmd.expand import compile as compiling

WAYS: dict[str, tuple[tuple[int, ...], dict]] = {
    "dp": ((4,), {}),
    "program": ((2, 2), {"choose": "program"}),
    "zero": ((4,), {"fully_shard": "dp"}),
    "zero+tp": ((2, 2), {"fully_shard": "dp"}),
}
KEPT = "kept"

SHORT_TWICE = (8, 8, 8, 8, 5, 3, 8)
"""Once the number does not divide, once there are fewer examples than ranks."""

SCRIPTS = SMALL | PAPERS | {name: replace(script, sizes=SHORT_TWICE) for name, script in (MORE | OWN).items()}

Seen = dict[str, torch.Tensor]


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.reconcile().clone() if isinstance(x, spmd.LocalTensor) else x.clone()


def tensors(name: str, found: object) -> Iterator[tuple[str, torch.Tensor]]:
    for i, x in enumerate(pytree.tree_leaves(found)):
        if isinstance(x, (torch.Tensor, int, float)):
            yield f"{name} {i}", whole(x if isinstance(x, torch.Tensor) else torch.tensor(float(x)))


def inside(made: tuple) -> list:
    """What a script has made, with what its plain objects hold, such as the nets of an agent."""
    return [x for each in made for x in (vars(each).values() if is_plain(each) else [each])]


def is_plain(x: object) -> bool:
    return hasattr(x, "__dict__") and not hasattr(x, "state_dict")


def state(made: tuple) -> Iterator[tuple[str, torch.Tensor]]:
    """What is left behind in models, optimisers and plain objects."""
    for i, x in enumerate(inside(made)):
        if isinstance(x, nn.Module):
            yield from ((f"{i}.{name}", whole(t)) for name, t in x.state_dict().items())
            yield from ((f"{i}.{name}.grad", whole(p.grad)) for name, p in x.named_parameters() if p.grad is not None)
        elif isinstance(x, torch.optim.Optimizer):
            for j, p in enumerate(p for group in x.param_groups for p in group["params"]):
                yield from tensors(f"{i}.state {j}", [x.state[p][key] for key in sorted(x.state.get(p, {}))])
        else:
            yield from tensors(f"{i}", x.state_dict() if hasattr(x, "state_dict") else x)


def save_and_load(made: tuple) -> None:
    for x in inside(made):
        if hasattr(x, "load_state_dict"):
            x.load_state_dict(copy.deepcopy(x.state_dict()))


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x


def rounded(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a tensor whose numbers differ from the given ones in the last bit, or not."""
    g = torch.Generator().manual_seed(seed)

    def of(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        return x * (1 - torch.finfo(x.dtype).eps * torch.randint(2, x.shape, generator=g))

    return of


def trained(script: Script, prepare: Callable[[Callable], Callable], given_as: Callable = as_given) -> Iterator[Seen]:
    """What is seen after each call. given_as: what is done to parameters before the first call, and to batches."""
    torch.manual_seed(0)
    made, step = script.begin(), prepare(script.step)
    for p in (p for x in inside(made) if isinstance(x, nn.Module) for p in x.parameters()):
        p.data.copy_(given_as(p.data))
    g = torch.Generator().manual_seed(1)
    for i, size in enumerate(script.sizes):
        if i and script.schedule:
            script.schedule(i, made)
        if i == 3:
            save_and_load(made)
        given = [x for x in made if not isinstance(x, torch.optim.lr_scheduler.LRScheduler)]
        returned = step(*given, *map(given_as, script.batches(size, g)))
        yield dict(tensors("returned", returned)) | dict(state(made))


def compiled(script: Script, shape: tuple[int, ...], said: dict) -> Callable[[Callable], Callable]:
    batch = script.batches(2, torch.Generator())
    names = [p.name for p in inspect.signature(script.step).parameters.values() if p.default is p.empty][-len(batch) :]
    over = {name: {"dp": Shard(0)} for name in names if name not in script.replicated}
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    params = by_turns(script) if len(shape) > 1 and "choose" not in said else {}
    return lambda step: spmd.compile(step, mesh, params=params, inputs=over, **said)


def by_turns(script: Script) -> dict[str, dict[str, Shard]]:
    """Rows and columns of what has them, in turns."""
    made = dict(zip(inspect.signature(script.step).parameters, script.begin(), strict=False))
    made |= {f"{arg}.{name}": x for arg, each in made.items() if is_plain(each) for name, x in vars(each).items()}
    models = [(arg, x) for arg, x in made.items() if isinstance(x, nn.Module)]
    names = [f"{arg}.{name}" for arg, model in models for name, p in model.named_parameters() if p.dim() > 1]
    return {name: {"tp": Shard(i % 2)} for i, name in enumerate(names)}


def on_ranks(script: Script, shape: tuple[int, ...], said: dict, captured: list[int] | None = None) -> list[Seen]:
    """captured: gets the numbers of the calls that captured the step."""
    with LocalTensorMode(torch.Size(shape).numel()):
        return run(script, compiled(script, shape, said), captured)


def run(script: Script, prepare: Callable[[Callable], Callable], captured: list[int] | None = None) -> list[Seen]:
    spmd.manual_seed(7)
    seen: list[Seen] = []
    calls: list[int] = [] if captured is None else captured
    real = compiling.capture
    with mock.patch.object(compiling, "capture", lambda *a: calls.append(len(seen) + 1) or real(*a)):
        for each in trained(script, prepare):
            seen.append(each)
    return seen


def with_kept(script: Script) -> list[Seen]:
    """With the programs that another run has saved."""
    steps: list[spmd.CompiledStep] = []
    mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with LocalTensorMode(4), tempfile.TemporaryDirectory() as folder:
        prepare = compiled(script, *WAYS["dp"])
        run(script, lambda step: steps.append(prepare(step)) or steps[0])
        steps[0].save(f"{folder}/step")
        captured: list[int] = []
        seen = run(script, lambda step: spmd.load_step(f"{folder}/step", step, mesh), captured)
    assert not captured, f"captured in the calls {captured}"
    return seen


def on_one_device(script: Script) -> list[Seen]:
    return on_ranks(script, (1,), {}) if script.draws else list(trained(script, lambda step: step))


def moved_by_rounding(script: Script) -> float:
    plain = [list(trained(script, lambda step: step, rounded(seed) if seed else as_given)) for seed in range(4)]
    return max(difference(a, b) for other in plain[1:] for a, b in zip(other, plain[0], strict=True))


def difference(got: Seen, want: Seen) -> float:
    assert got.keys() == want.keys(), f"seen on one side only: {sorted(got.keys() ^ want.keys())[:6]}"
    worst = 0.0
    for name, x in want.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype, f"{name}: {got[name].dtype} {got[name].shape}"
        if x.numel():
            apart = (got[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1)
            worst = max(worst, apart.item()) if apart == apart else float("nan")
    return worst


def outcome(
    script: Script, way: str, want: list[Seen], details: bool = False, captured: list[int] | None = None
) -> str:
    """The largest difference of all calls as text, or the error. captured: gets the calls that captured the step."""
    try:
        got = with_kept(script) if way == KEPT else on_ranks(script, *WAYS[way], captured)
        apart = [difference(a, b) for a, b in zip(got, want, strict=True)]
    except Exception as error:
        if details:
            traceback.print_exc()
        return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:300]
    if max(apart) <= script.tolerance:
        return f"{max(apart):.0e}"
    return "differs: " + " ".join(f"{x:.0e}" for x in apart)


def row(name: str, ways: list[str], details: bool) -> list[str]:
    script, began = SCRIPTS[name], time.process_time()
    try:
        want = on_one_device(script)
        captured: list[list[int]] = [[] for _ in ways]
        found = [outcome(script, way, want, details, calls) for way, calls in zip(ways, captured, strict=True)]
        found += [" ".join(map(str, dict.fromkeys(captured[0]))), f"{moved_by_rounding(script):.0e}"]
    except Exception as error:
        if details:
            traceback.print_exc()
        found = [f"one device: {type(error).__name__}: {error}".replace("\n", " ")[:300], *[""] * (len(ways) + 1)]
    return [name, *found, f"{time.process_time() - began:.0f}"]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="scripts, all by default")
    parser.add_argument("--part", default="1/1", help="which part of how many, such as 2/4")
    parser.add_argument("--way", action="append", choices=[*WAYS, KEPT], help="a way; may be said again")
    parser.add_argument("--details", action="store_true", help="print the tracebacks of errors")
    return parser.parse_args()


def main() -> int:
    given = asked()
    ways, (k, n) = given.way or list(WAYS), map(int, given.part.split("/"))
    torch.set_default_dtype(torch.float64)
    rows = []
    for name in [name for name in SCRIPTS if not given.names or name in given.names][k - 1 :: n]:
        rows.append(row(name, ways, given.details))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(table(["script", *ways, "captured", "rounding", "seconds"], rows))
    return int(not all(is_equal(cell) for cells in rows for cell in cells[1 : 1 + len(ways)]))


def is_equal(cell: str) -> bool:
    return cell.replace("e-", "").replace("e+", "").isdigit()


if __name__ == "__main__":
    sys.exit(main())
