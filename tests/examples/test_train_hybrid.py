"""examples/models/train_hybrid.py, on files and models of no size."""

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from examples.models import train_hybrid

TINY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "eos_token_id": 0,
    "pad_token_id": 3,
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(train_hybrid.PYLLAMA / "tokenizer.json"))


def test_files_count_once_and_some_are_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for index in range(600):
        (tmp_path / f"{index}.py").write_text(f"value = {index}\nprint(value)\n")
        (tmp_path / f"copy_{index}.py").write_text(f"value = {index}\nprint(value)\n")
    (tmp_path / "notes.txt").write_text("no source")
    corpus = train_hybrid.read_corpus([tmp_path], tokenizer, length=30)
    read = torch.cat([corpus.training, corpus.held_out])
    assert int((read == train_hybrid.END_OF_FILE).sum()) == 600
    assert 0 < len(corpus.held_out) < len(corpus.training) / 20
    held_out = tokenizer.decode(corpus.held_out.tolist()).splitlines()
    assert not set(held_out[::2]) & set(tokenizer.decode(corpus.training.tolist()).splitlines())


def test_too_little_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(SystemExit, match="and 1025 are needed: add --source"):
        train_hybrid.read_corpus([tmp_path], tokenizer)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [train_hybrid.learning_rate(step / 1000, 2.0) for step in range(1001)]
    peak = rates.index(max(rates))
    assert peak == 20 and rates[peak] == pytest.approx(2.0)
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2)
    assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)


def test_a_model_learns_what_always_follows() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3NextConfig(**train_hybrid.SHAPE | TINY), experts_implementation="eager"
    )
    tokens = torch.arange(2000) % 7 + 4
    before = train_hybrid.held_out_loss(model, tokens, 8, length=32)
    ticks = itertools.count()
    steps = train_hybrid.train(model, tokens, 60, 4, 3e-2, length=32, clock=lambda: next(ticks))
    assert steps == 59
    assert train_hybrid.held_out_loss(model, tokens, 8, length=32) < before / 2
