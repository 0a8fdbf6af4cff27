"""Do stock models train compiled, unpatched, with the numbers of one device?

    python benchmarks/models.py                      # all models, all plans, float64, simulated ranks
    python benchmarks/models.py --only llama vit     # some
    python benchmarks/models.py --short              # a few, for CI

Each model is one of `transformers`, in a small configuration with random weights. A plain train step - forward, loss,
backward, SGD with momentum - is compiled on four simulated ranks

    dp      the batch sharded, parameters replicated
    rows    the batch sharded, every parameter and its optimiser state Shard(0)
    fsdp    the batch sharded, every parameter stored in shards and gathered to compute with
    tp      the model's own `base_model_tp_plan`, where it has one, on 2 x 2

and run twice. Models are in float64, though many compute their norms and losses in float32 whatever they are given;
mixtures of experts, whose grouped products know no float64, are in float32. Losses and all parameters are compared with
the same steps on one device. The table has the largest relative difference of a loss and of a parameter, the seconds of
the first call, and the error where there is one.
Exits 1 if a model differs or fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _table import table
from torch import nn

import spmd
from spmd import Shard

BATCH, TIME, WORDS = 4, 12, 96


@dataclass(frozen=True)
class Stock:
    """A model class of transformers with a small configuration, and what it is called with."""

    model: str
    config: str
    settings: dict
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float64

    def tolerance(self) -> float:
        return 2e-6 if self.dtype == torch.float64 else 1e-4


def ids(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape, generator=g)


def language(g: torch.Generator) -> dict[str, torch.Tensor]:
    words = ids(g, BATCH, TIME)
    return {"input_ids": words, "labels": words.clone()}


def masked(g: torch.Generator) -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, TIME, dtype=torch.int64)
    mask[1, -3:] = 0
    return language(g) | {"attention_mask": mask}


def sequence_to_sequence(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(g, BATCH, TIME), "labels": ids(g, BATCH, TIME - 4)}


def images(size: int, classes: int = 5, channels: int = 3) -> Callable:
    def batch(g: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = torch.randn(BATCH, channels, size, size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(classes, (BATCH,), generator=g)}

    return batch


def sound(name: str, *shape: int, classes: int = 5) -> Callable:
    def batch(g: torch.Generator) -> dict[str, torch.Tensor]:
        return {name: torch.randn(BATCH, *shape, generator=g), "labels": torch.randint(classes, (BATCH,), generator=g)}

    return batch


def spoken(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 40, generator=g), "labels": ids(g, BATCH, 6)}


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": WORDS}  # fmt: skip
DECODER = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0}
BERT = SMALL | {"max_position_embeddings": 64}
EXPERTS = DECODER | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4, "num_labels": 5}

STOCK = {
    # text, decoders
    "gpt2": Stock("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}, language),
    "gpt_neo": Stock("GPTNeoForCausalLM", "GPTNeoConfig", {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8}, language),
    "gpt_neox": Stock("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT, language),
    "opt": Stock("OPTForCausalLM", "OPTConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": WORDS,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}, language),
    "bloom": Stock("BloomForCausalLM", "BloomConfig", {
        "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "hidden_dropout": 0.0}, language),
    "llama": Stock("LlamaForCausalLM", "LlamaConfig", DECODER, masked),
    "mistral": Stock("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 8}, language),
    "qwen2": Stock("Qwen2ForCausalLM", "Qwen2Config", DECODER, language),
    "qwen3": Stock("Qwen3ForCausalLM", "Qwen3Config", DECODER, language),
    "gemma": Stock("GemmaForCausalLM", "GemmaConfig", DECODER, language),
    "gemma2": Stock("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"sliding_window": 8}, language),
    "phi": Stock("PhiForCausalLM", "PhiConfig", DECODER | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, language),
    "phi3": Stock("Phi3ForCausalLM", "Phi3Config", DECODER | {"bos_token_id": 1, "eos_token_id": 2}, language),
    "olmo": Stock("OlmoForCausalLM", "OlmoConfig", DECODER, language),
    "stablelm": Stock("StableLmForCausalLM", "StableLmConfig", DECODER, language),
    "falcon": Stock("FalconForCausalLM", "FalconConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}, language),
    "mixtral": Stock("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4}, language,
                     torch.float32),
    "qwen2_moe": Stock("Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 32}, language,
        torch.float32),
    # text, encoders and encoder-decoders
    "bert": Stock("BertForMaskedLM", "BertConfig", BERT | NO_DROPOUT, masked),
    "roberta": Stock("RobertaForMaskedLM", "RobertaConfig", BERT | NO_DROPOUT, masked),
    "distilbert": Stock("DistilBertForMaskedLM", "DistilBertConfig", {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": WORDS, "max_position_embeddings": 64,
        "dropout": 0.0, "attention_dropout": 0.0}, masked),
    "electra": Stock("ElectraForMaskedLM", "ElectraConfig", BERT | NO_DROPOUT | {"embedding_size": 32}, masked),
    "albert": Stock("AlbertForMaskedLM", "AlbertConfig", BERT | NO_DROPOUT | {"embedding_size": 16}, masked),
    "deberta": Stock("DebertaV2ForMaskedLM", "DebertaV2Config", BERT | NO_DROPOUT, masked),
    "t5": Stock("T5ForConditionalGeneration", "T5Config", {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS,
        "dropout_rate": 0.0, "decoder_start_token_id": 0}, sequence_to_sequence),
    "bart": Stock("BartForConditionalGeneration", "BartConfig", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": WORDS,
        "max_position_embeddings": 64, "dropout": 0.0}, sequence_to_sequence),
    # images
    "vit": Stock("ViTForImageClassification", "ViTConfig", VIT, images(16)),
    "deit": Stock("DeiTForImageClassification", "DeiTConfig", VIT, images(16)),
    "beit": Stock("BeitForImageClassification", "BeitConfig", VIT | {"drop_path_rate": 0.0}, images(16)),
    "dinov2": Stock("Dinov2ForImageClassification", "Dinov2Config", VIT, images(16)),
    "swin": Stock("SwinForImageClassification", "SwinConfig", {
        "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": 5, "drop_path_rate": 0.0}, images(16)),
    "convnext": Stock("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_labels": 5, "image_size": 32}, images(32)),
    "resnet": Stock("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        images(16)),
    "mobilenet_v2": Stock("MobileNetV2ForImageClassification", "MobileNetV2Config", {
        "image_size": 32, "depth_multiplier": 0.25, "num_labels": 5, "classifier_dropout_prob": 0.0}, images(32)),
    "regnet": Stock("RegNetForImageClassification", "RegNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "num_labels": 5},
        images(16)),
    # sound
    "whisper": Stock("WhisperForConditionalGeneration", "WhisperConfig", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": WORDS,
        "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0}, spoken),
    "wav2vec2": Stock("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SMALL | NO_DROPOUT | {
        "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_labels": 5, "hidden_dropout": 0.0,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
        "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0},
        sound("input_values", 400)),
    "hubert": Stock("HubertForSequenceClassification", "HubertConfig", SMALL | NO_DROPOUT | {
        "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_labels": 5, "hidden_dropout": 0.0,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
        "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0},
        sound("input_values", 400)),
    "ast": Stock("ASTForAudioClassification", "ASTConfig", VIT | {
        "max_length": 16, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}, sound("input_values", 16, 16)),
}  # fmt: skip
SHORT = ("gpt2", "llama", "mixtral", "bert", "t5", "vit", "resnet", "whisper")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A plain step, as for one device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(stock: Stock) -> nn.Module:
    """The model, with the same random weights each time."""
    torch.manual_seed(0)
    config = getattr(transformers, stock.config)(**stock.settings)
    return getattr(transformers, stock.model)(config).to(stock.dtype).train()


def batches(stock: Stock) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    two = [stock.batch(g) for _ in range(2)]
    return [{k: x.to(stock.dtype) if x.is_floating_point() else x for k, x in batch.items()} for batch in two]


def tensor_parallel(model: nn.Module) -> dict[str, dict] | None:
    """The model's own plan as placements of parameters; None where it has none."""
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        return None
    base = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    found: dict[str, dict] = {}
    for name, _ in model.named_parameters():
        style = next((s for p, s in plan.items() if fnmatch.fnmatch(name, f"{base}{p}*")), None)
        if style == "colwise":
            found[name] = {"tp": Shard(0)}
        elif style == "rowwise" and name.endswith("weight"):
            found[name] = {"tp": Shard(1)}
    return found or None


def plans(model: nn.Module) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], dict]]:
    """For each plan the mesh, its axes, and what the compiler is told of parameters."""
    line = (4,), ("dp",)
    found = {"dp": (*line, {}), "fsdp": (*line, {"fully_shard": "dp"})}
    found |= {"rows": (*line, {"params": {"*": {"dp": Shard(0)}}})}
    own = tensor_parallel(model)
    return found if own is None else found | {"tp": ((2, 2), ("dp", "tp"), {"params": own})}


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if b.numel() else 0.0


def run(stock: Stock, shape: tuple[int, ...], axes: tuple[str, ...], said: dict) -> tuple[float, float, float]:
    """How far losses and parameters are from one device, and the seconds of the first call."""
    alone, given = made(stock), batches(stock)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    want = [train_step(alone, optimizer, batch) for batch in given]
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=axes)
        step = spmd.compile(train_step, mesh, **said, inputs={"batch.*": {"dp": Shard(0)}})
        model = made(stock)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        began = time.perf_counter()
        first = step(model, optimizer, given[0])
        seconds = time.perf_counter() - began
        losses = [first, step(model, optimizer, given[1])]
        loss = max(_apart(_whole(x), y) for x, y in zip(losses, want, strict=True))
        theirs = dict(alone.named_parameters())
        parameter = max(_apart(_whole(p), theirs[name]) for name, p in model.named_parameters())
    return loss, parameter, seconds


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor().reconcile()


def row(name: str, verbose: bool) -> tuple[list[list[str]], bool]:
    rows, good = [], True
    for plan, (shape, axes, said) in plans(made(STOCK[name])).items():
        try:
            loss, parameter, seconds = run(STOCK[name], shape, axes, said)
            fine = max(loss, parameter) < STOCK[name].tolerance()
            cells = [f"{loss:.0e}", f"{parameter:.0e}", f"{seconds:.1f}", "" if fine else "DIFFERS"]
        except Exception as error:
            if verbose:
                traceback.print_exc()
            fine, text = False, re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
            cells = ["", "", "", text.replace("|", "/")[:160]]
        good &= fine
        rows.append([name, plan, *cells])
        print(*rows[-1], sep="  ", flush=True)
    return rows, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STOCK, help="these models")
    parser.add_argument("--short", action="store_true", help="a few models")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    rows, good = [], True
    for name in args.only or (SHORT if args.short else STOCK):
        found, fine = row(name, args.verbose)
        rows += found
        good &= fine
    print(table(["model", "plan", "loss", "parameter", "first call, s", "error"], rows, left=2))
    right = sum(not r[-1] for r in rows)
    print(f"\n{right} of {len(rows)} right; torch {torch.__version__}, transformers {transformers.__version__}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
