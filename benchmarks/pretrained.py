"""What a rank needs to read a folder of safetensors into a sharded model.

    python benchmarks/pretrained.py                  # two minutes, most of it to import transformers
    python benchmarks/pretrained.py --width 2048 --layers 4

A Llama is written by transformers in several files. Then four gloo ranks, in processes of their own, make it on the
meta device, place it by `plan_for`, and read it by `spmd.checkpoint.load_pretrained`. The table has, of the rank with
the most, in MB: the peak of the memory that is its own (anonymous), less what it had after the same with a small model;
the pages of the files that it had at once; and seconds. The loss is compared with that of one process. Exits 1 where a
rank has more than its share of the parameters, the largest block once more and 16 MB, or losses are further apart than
1e-4.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from _table import table

import spmd
from spmd.checkpoint import load_pretrained
from spmd.parallel import plan_for

RANKS = 4
SMALL = argparse.Namespace(width=64, layers=1, vocab=64)
MESHES = {"tp": {"tp": 4}, "fully sharded": {"dp": 4}, "both": {"dp": 2, "tp": 2}}


class Watch(threading.Thread):
    """Looks at this process' own memory and at its pages of files, in MB, some hundred times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.most, self.ended = _now(), [0.0, 0.0], False
        self.start()

    def run(self) -> None:
        while not self.ended:
            self.most = [max(a, b - c) for a, b, c in zip(self.most, _now(), self.before, strict=True)]
            time.sleep(0.002)

    def end(self) -> list[float]:
        self.ended = True
        self.join()
        return self.most


def _now() -> list[float]:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")]


def config_of(args: argparse.Namespace) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=args.vocab,
    )  # fmt: skip


def written(folder: str, args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(args))
    model.save_pretrained(folder, max_shard_size="50MB")
    return model


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        ids = torch.arange(32).reshape(2, 16)
        return model.eval()(ids, labels=ids).loss.item()


def read(folder: str, axes: dict[str, int], args: argparse.Namespace) -> torch.nn.Module:
    mesh = spmd.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config_of(args))
    model = plan_for(model, mesh).apply(model, init=False)
    load_pretrained(model, folder)
    return model


def on_rank(rank: int, port: int, folder: str, axes, args: argparse.Namespace, answers) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss_of(read(f"{folder}/small", axes, SMALL))
    watch, start = Watch(), time.perf_counter()
    model = read(f"{folder}/large", axes, args)
    seconds, most = time.perf_counter() - start, watch.end()
    found = torch.tensor([*most, seconds, loss_of(model)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        answers.put(found.tolist())
    dist.barrier()
    dist.destroy_process_group()


def run(folder: str, axes, args: argparse.Namespace) -> list[float]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # memory that is freed goes back to the system
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(on_rank, (port, folder, axes, args, answers), RANKS)
    return answers.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "width": 512, "vocab": 16000}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        written(f"{folder}/small", SMALL)
        model = written(f"{folder}/large", args)
        sizes, loss = [p.nbytes / 2**20 for p in model.parameters()], loss_of(model)
        files = len(list(Path(folder, "large").glob("*.safetensors")))
        found = {name: run(folder, axes, args) for name, axes in MESHES.items()}
    most = sum(sizes) / RANKS + max(sizes) / RANKS + 16
    apart = {name: abs(x[3] - loss) / loss for name, x in found.items()}
    rows = [[name, *(f"{x:.1f}" for x in each[:3]), f"{apart[name]:.0e}"] for name, each in found.items()]
    print(table(["by", "own MB", "pages of files MB", "s", "losses apart"], rows))
    print(f"\n{sum(sizes):.0f} MB in {files} files, the largest tensor {max(sizes):.0f}; a rank may have {most:.0f} MB")
    return int(not all(found[name][0] <= most and apart[name] < 1e-4 for name in MESHES))


if __name__ == "__main__":
    sys.exit(main())
