"""What does the first call of a compiled step cost, beside a bare trace of the same step on one device?

    python benchmarks/expand.py                        # a GPT with AdamW of 12 and of 48 layers, some minutes
    python benchmarks/expand.py --layers 12            # one depth
    python benchmarks/expand.py --models gpt2 llama    # stock models of transformers, 12 and 22 layers
    python benchmarks/expand.py --ranks 2x4 2x2048     # the parts after the capture, on meshes of these shapes
    python benchmarks/expand.py --text                 # is a program's text the same on ranks and in processes?
    python benchmarks/expand.py --short                # 4 layers, for CI

Each row takes turns, `--rounds` times, between

    first call      all that spmd does until the program that is used for good is bound to a rank: state, capture,
                    expansion, passes, verification, binding. Nothing is run, and no state is placed
    make_fx         torch's make_fx alone, on fake tensors, of the same step, with the optimiser's state there
    aot_eager       the first call of torch.compile(step, backend="aot_eager"), which runs the step, too

The table has the least seconds of the process (CPU time, which other programs disturb less) and the ratio. Exits 1 if a
second call of the step would need another program.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import operator
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from _table import table
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from spmd import Shard
from spmd.comm import transport
from spmd.expand import compile as compiling
from spmd.expand.code import code_for
from spmd.expand.state import State

WIDTH, HEADS, WORDS, BATCH, TIME = 256, 8, 256, 8, 32
GPT_PLAN = {
    "*.attn.[qkv].weight": {"tp": Shard(0)}, "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)}, "*.mlp.up.*": {"tp": Shard(0)}, "*.mlp.down.weight": {"tp": Shard(1)},
}  # fmt: skip
INPUTS = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}


def gpt(layers: int) -> nn.Module:
    return GPT(GPTConfig(n_layer=layers, n_head=HEADS, n_embd=WIDTH, vocab=WORDS, block_size=TIME))


class Logits(nn.Module):
    """A model of transformers that gives its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def gpt2(layers: int) -> nn.Module:
    import transformers

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 64, "n_layer": layers, "n_head": 4, "vocab_size": WORDS, "n_positions": TIME}
    return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout)))


def llama(layers: int) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=TIME)
    return Logits(transformers.LlamaForCausalLM(config))


MODELS = {"gpt": (gpt, (12, 48), GPT_PLAN), "gpt2": (gpt2, (12,), {}), "llama": (llama, (22,), {})}


@dataclass
class Case:
    """A step on a model of so many layers, and a mesh that needs no process group."""

    name: str
    layers: int
    mesh: spmd.DeviceMesh

    def arguments(self) -> tuple:
        torch.manual_seed(0)
        model = MODELS[self.name][0](self.layers)
        tokens = torch.randint(WORDS, (BATCH, TIME))
        return model, torch.optim.AdamW(model.parameters()), tokens, tokens

    def program(self) -> spmd.Program:
        return self.step().program_for(*self.arguments())

    def step(self) -> spmd.CompiledStep:
        return spmd.compile(train_step, self.mesh, params=MODELS[self.name][2], inputs=INPUTS)

    def first_call(self) -> float:
        step, given = self.step(), self.arguments()
        return seconds(lambda: bound(step.program_for(*given)))

    def after_capture(self) -> float:
        """Of the first call, what follows the capture."""
        step, given = self.step(), self.arguments()
        Captures.took = 0.0
        return seconds(lambda: bound(step.program_for(*given))) - Captures.took

    def make_fx(self) -> float:
        model, optimizer, tokens, _ = self.arguments()
        make_state(model, optimizer)
        state = State.of({"model": model, "optimizer": optimizer})
        slots = state.tensors()

        def flat(values: list, tokens: torch.Tensor) -> list:
            new = dict(zip(slots, values, strict=True))
            kinds = {slot: nn.Parameter(x) if slot.kind == "parameter" else x for slot, x in new.items()}
            with state.swap(kinds, {}):
                loss = train_step(model, optimizer, tokens, tokens)
                return [loss, *state.tensors().values()]

        values = [x.detach() for x in slots.values()]
        return seconds(lambda: make_fx(flat, tracing_mode="fake")(values, tokens))

    def aot_eager(self) -> float:
        given = self.arguments()
        torch.compiler.reset()
        return seconds(lambda: torch.compile(train_step, backend="aot_eager")(*given))

    def makes_one_program(self) -> bool:
        """Whether the program of a second step is the program of the first."""
        given = self.arguments()
        first = str(self.step().program_for(*given))
        make_state(*given[:2])
        return first == str(self.step().program_for(*given))


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The state of the optimiser as after a step; no gradients are left."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def bound(program: spmd.Program) -> None:
    code_for(program, (0,) * program.mesh.ndim, transport())


def seconds(run: Callable[[], object]) -> float:
    gc.collect()
    before = time.process_time()
    run()
    return time.process_time() - before


def mesh_of(shape: str) -> spmd.DeviceMesh:
    """A mesh of a shape such as "2x4"; a single number is of all ranks, two of them along dp."""
    dp, tp = map(int, shape.split("x")) if "x" in shape else (2, int(shape) // 2)
    return spmd.DeviceMesh("cpu", torch.arange(dp * tp).reshape(dp, tp), mesh_dim_names=("dp", "tp"))


# ---- tables -----------------------------------------------------------------------------------

WAYS = {"first call": Case.first_call, "make_fx": Case.make_fx, "aot_eager": Case.aot_eager}


def beside_make_fx(cases: list[Case], rounds: int, ways: list[str]) -> tuple[str, bool]:
    """The table of the first call beside its peers, and whether each step makes one program."""
    least = {}
    for _ in range(rounds):
        for case in cases:
            for way in ways:
                took = WAYS[way](case)
                least[case.name, case.layers, way] = min(took, least.get((case.name, case.layers, way), took))
    rows, good = [], True
    for case in cases:
        mine, *others = (least[case.name, case.layers, way] for way in ways)
        one = case.makes_one_program()
        good &= one
        row = [f"{case.name}, {case.layers} layers", f"{mine:.2f} s"]
        row += [cell for other in others for cell in (f"{other:.2f} s", f"{mine / other:.2f}")]
        rows.append([*row, "one" if one else "two"])
    header = ["step", "first call", *(cell for way in ways[1:] for cell in (way, "ratio")), "programs"]
    return table(header, rows), good


def by_ranks(meshes: list[str], layers: int, rounds: int) -> str:
    """The table of what follows the capture, on meshes of several shapes: expansion, passes and binding.

    The first round of a mesh plans all its moves, as a new process does; what is known then is kept.
    """
    took: dict[str, list[float]] = {mesh: [] for mesh in meshes}
    for _ in range(rounds):
        for mesh in meshes:
            took[mesh].append(Case("gpt", layers, mesh_of(mesh)).after_capture())
    ways: tuple[Callable[[list[float]], float], ...] = (operator.itemgetter(0), min)
    rows = []
    for mesh in meshes:
        pairs = [(way(took[mesh]), way(took[meshes[0]])) for way in ways]
        rows.append([mesh, *[cell for mine, base in pairs for cell in (f"{mine:.2f} s", f"{mine / base:.2f}")]])
    return table(["mesh", "first round", "ratio", "least", "ratio"], rows)


SEEDS, PROCESSES = (0, 1, 77), 2


def text_of(rank: int, layers: int) -> str:
    """A digest of the program of a step as this rank writes it, and how many nodes the program has."""
    program = Case("gpt", layers, mesh_of("2x2")).program()
    return f"{hashlib.sha256(str(program).encode()).hexdigest()[:16]}, {len(program.graph.nodes):,} nodes"


def by_process(layers: int) -> tuple[str, bool]:
    """The table of the program's text on four gloo ranks, for each of three hash seeds in two processes."""
    command = [sys.executable, __file__, "--text-here", "--layers", str(layers)]
    rows = []
    for seed, _ in itertools.product(SEEDS, range(PROCESSES)):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        rows.append([str(seed), *json.loads(ran.stdout.splitlines()[-1])])
    texts = {text for _, *of_ranks in rows for text in of_ranks}
    return table(["hash seed", *[f"rank {rank}" for rank in range(4)]], rows, left=5), len(texts) == 1


def texts_here(layers: int) -> list[str]:
    """The digests of four ranks that are started from this process."""
    from workers import Pool  # starts processes

    pool = Pool(4)
    try:
        return pool.run(text_of, layers, timeout=600)
    finally:
        pool.close()


class Captures:
    """Measures the captures of compiled steps. took: the seconds of the last one."""

    took = 0.0

    @classmethod
    def watch(cls) -> None:
        real = compiling.capture

        def measured(*args, **kwargs):
            before = time.process_time()
            found = real(*args, **kwargs)
            cls.took = time.process_time() - before
            return found

        compiling.capture = measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["gpt"])
    parser.add_argument("--layers", nargs="*", type=int, help="by default those of the model")
    parser.add_argument("--ranks", nargs="*", help="compare meshes of so many ranks, or such shapes, instead")
    parser.add_argument("--text", action="store_true", help="compare the program's text instead")
    parser.add_argument("--text-here", action="store_true", help="be one of the processes that are compared")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-aot", action="store_true", help="leave out aot_eager, which takes longest")
    parser.add_argument("--short", action="store_true", help="4 layers, without aot_eager")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.text_here:
        print(json.dumps(texts_here((args.layers or [2])[0])))
        return 0
    if args.text:
        text, good = by_process((args.layers or [2])[0])
        print(text)
        return 0 if good else 1
    if args.ranks:
        Captures.watch()
        Case("gpt", 1, mesh_of("2x3")).first_call()  # not one of those that are compared
        print(by_ranks(args.ranks, (args.layers or [12])[0], args.rounds))
        return 0
    ways = [way for way in WAYS if way != "aot_eager" or not (args.no_aot or args.short)]
    cases = [
        Case(name, n, mesh_of("2x4")) for name in args.models
        for n in ([4] if args.short else args.layers or MODELS[name][1])
    ]  # fmt: skip
    for way in ways:  # what is imported and decided at the first time of all
        WAYS[way](Case(args.models[0], 1, mesh_of("2x4")))
    text, good = beside_make_fx(cases, args.rounds, ways)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
