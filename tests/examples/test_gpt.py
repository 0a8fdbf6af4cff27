"""The example that the demo trains: plain PyTorch on one device, and reproducible text."""

from fnmatch import fnmatch
from itertools import islice

import pytest
import torch

from examples.gpt import GPT, GPTConfig, train_step
from examples.text import batches, load_text

SMALL = dict(n_layer=2, n_head=2, n_embd=16, block_size=8)


def trained(steps, **config):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, **config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = batches(load_text(), batch=8, block=8, seed=0)
    return model, [train_step(model, optimizer, *batch).item() for batch in islice(data, steps)]


@pytest.mark.parametrize("tied", [True, False])
def test_it_learns(tied):
    """Fifty small steps leave the loss of a guess (5.5, the log of 256) well behind; a tied weight stays one."""
    model, losses = trained(50, tied=tied)
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert losses[-1] < 3.9
    assert (model.head.weight is model.tok_emb.weight) == tied


@pytest.mark.parametrize("bias", [True, False])
def test_its_parts_have_the_names_that_patterns_match(bias):
    """The head has no bias; the other linears and norms have one if the config says so."""
    names = [name for name, _ in GPT(GPTConfig(**SMALL, tied=False, bias=bias)).named_parameters()]
    for part, count in {"attn.[qkv]": 3, "attn.out": 1, "mlp.up": 1, "mlp.down": 1, "ln[12]": 2}.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            assert sum(fnmatch(name, f"blocks.*.{part}.{kind}") for name in names) == 2 * count
    assert "tok_emb.weight" in names and "pos_emb.weight" in names and "head.weight" in names
    assert any(name.endswith("bias") for name in names) == bias
    assert "head.bias" not in names


def test_a_byte_does_not_see_what_follows():
    """Attention is causal: logits depend on the bytes so far alone."""
    model, _ = trained(1)
    tokens = torch.arange(8)[None]
    later = tokens.clone()
    later[0, 5:] = 99
    assert torch.equal(model(tokens)[0, :5], model(later)[0, :5])


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="A width of 129 fits"):
        GPTConfig(n_head=3, n_embd=128)


def test_batches_are_the_same_each_time():
    """The seed alone decides; targets are the next bytes; tokens come from the text."""
    text = load_text()
    assert text.dtype == torch.uint8 and len(text) > 100_000
    one, two, other = (next(batches(text, 4, 16, seed)) for seed in (1, 1, 2))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])
    assert one[0].dtype == torch.int64 and one[0].shape == one[1].shape == (4, 16)
    assert torch.equal(one[0][:, 1:], one[1][:, :-1])


def test_an_epoch_shows_each_window_once():
    """Thirteen bytes are three windows of four and a last target: one batch of three, each time in another order."""
    data = torch.arange(13, dtype=torch.uint8)
    for tokens, targets in islice(batches(data, batch=3, block=4), 3):
        assert tokens[:, 0].sort().values.tolist() == [0, 4, 8]
        assert torch.equal(targets, tokens + 1)


@pytest.mark.parametrize("size, fits", [(12, False), (13, True)])
def test_a_text_must_fill_one_batch(size, fits):
    """The error comes at once, not with the first batch, and says what is needed."""
    data = torch.zeros(size, dtype=torch.uint8)
    if fits:
        batches(data, batch=3, block=4)
    else:
        with pytest.raises(ValueError, match=r"12 bytes, .* needs 3 \* 4 \+ 1 = 13. Give a longer text"):
            batches(data, batch=3, block=4)


def test_a_text_must_be_there(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is empty"):
        load_text(tmp_path / "empty")
    with pytest.raises(ValueError, match="No such file"):
        load_text(tmp_path / "missing")
    with pytest.raises(ValueError, match="Is a directory"):
        load_text(tmp_path)
