"""A model whose parameters may be DTensors, written as a folder of safetensors that stock transformers reads.

One tensor after the other is gathered, by all ranks. Of each file one rank keeps the tensors, in turn, writes them, and
forgets them: a rank never has more than one file, one tensor, and its own blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmd.checkpoint.read_pretrained import INDEX, WEIGHTS, safetensors
from spmd.comm import transport, wait
from spmd.mesh import DeviceMesh, current_rank, world_size
from spmd.mesh.rank import rank_simulator
from spmd.sim import LocalTensor
from spmd.tensor.eager.dtensor import DTensor

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
OLD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@torch.no_grad()
def save_pretrained(
    model: nn.Module, folder: str | Path, *, max_shard_size: int | str = "5GB", mesh: DeviceMesh | None = None
) -> None:
    """Write a model as a folder of safetensors, with its configuration if it has one, as transformers does.

    max_shard_size: bytes that a file may have, as a number or as "5GB"; a larger tensor has a file of its own. It is
    also what a rank needs, besides its blocks and one whole tensor. mesh: the ranks that call it; by default all ranks.
    They have the folder in common, and it is complete when they return. Tied tensors are written once, under the name
    that transformers keeps; files of an earlier save are removed.

    Raises ValueError for a size that is none, and for a DTensor that is still to be reduced.

    >>> import tempfile
    >>> from spmd.checkpoint import load_pretrained
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(nn.Linear(2, 2), folder, max_shard_size=16)
    >>> print(*sorted(path.name for path in Path(folder).iterdir()))
    model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json
    """
    folder, tensors = Path(folder), _kept(model)
    files = _named(_split(tensors, _bytes_said(max_shard_size)))
    ranks = list(range(world_size())) if mesh is None else list(mesh.ranks)
    everyone = DeviceMesh("cpu", ranks) if mesh is None else mesh
    is_simulated = rank_simulator() is not None  # then one process writes for all ranks
    is_first = is_simulated or current_rank() == ranks[0]
    if is_first:
        _cleared(folder)
    transport().gather_objects(None, everyone)
    for i, (file, names) in enumerate(files.items()):
        is_mine = is_simulated or current_rank() == ranks[i % len(ranks)]
        _write(folder / file, {name: tensors[name] for name in names}, is_mine)
    if is_first:
        _write_about(model, folder, files, tensors)
    transport().gather_objects(None, everyone)


# ---- what goes where ----------------------------------------------------------------------------


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the state dict, each under one name."""
    tied, ignored = getattr(model, "_tied_weights_keys", None) or (), getattr(model, "_keys_to_ignore_on_save", None)
    names: dict[int, list[str]] = {}
    tensors = {k: x for k, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    for name, x in tensors.items():
        if name in (ignored or ()):
            continue
        if isinstance(x, DTensor) and x._spec.partial:
            raise ValueError(f"save_pretrained: {name} is {x._spec}, which is still to be reduced; redistribute it")
        names.setdefault(id(x), []).append(name)
    chosen = (next((n for n in same if not any(re.search(t, n) for t in tied)), same[0]) for same in names.values())
    return {name: tensors[name] for name in chosen}


def _bytes_said(size: int | str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip().upper())
    if not found or float(found[1]) <= 0:
        raise ValueError(f"save_pretrained: max_shard_size is {size!r}; give bytes, or a text such as '5GB' or '500MB'")
    return int(float(found[1]) * UNITS.get(found[2], 1))


def _split(tensors: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    """Names in files of at most so many bytes, in order."""
    files: list[list[str]] = []
    left = 0
    for name, x in tensors.items():
        if not files or x.nbytes > left:
            files.append([])
            left = most
        files[-1].append(name)
        left -= x.nbytes
    return files


def _named(files: Sequence[list[str]]) -> dict[str, list[str]]:
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


# ---- files --------------------------------------------------------------------------------------


def _cleared(folder: Path) -> None:
    """The folder, without files of an earlier save."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if OLD.fullmatch(path.name):
            path.unlink()


def _write(path: Path, tensors: Mapping[str, torch.Tensor], is_mine: bool) -> None:
    """Gather the tensors of a file, and write it, if it is this rank's."""
    kept = {}
    for name, x in tensors.items():
        whole = _whole(x)
        if is_mine:
            kept[name] = whole
        del whole
    if is_mine:
        safetensors("torch").save_file(kept, path, metadata={"format": "pt"})


def _whole(x: torch.Tensor) -> torch.Tensor:
    """All of it, in memory of its own."""
    full = wait(x.detach().full_tensor()) if isinstance(x, DTensor) else x.detach()
    full = full.reconcile() if isinstance(full, LocalTensor) else full
    full = full.cpu().contiguous()
    return full if full.untyped_storage().nbytes() == full.nbytes else full.clone()


def _write_about(model: nn.Module, folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Any]) -> None:
    """The index, and the configuration."""
    if len(files) > 1:
        about = {"total_size": sum(x.nbytes for x in tensors.values())}
        where = {name: file for file, names in files.items() for name in names}
        (folder / INDEX).write_text(json.dumps({"metadata": about, "weight_map": where}, indent=2, sort_keys=True))
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    if hasattr(generation, "save_pretrained") and model.can_generate():
        generation.save_pretrained(folder)
