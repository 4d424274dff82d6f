"""Texts, and a tokenizer and a tiny model for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from ds_sparse_ring.train import prepare_data
from ds_sparse_ring.train.data import train_tokenizer
from ds_sparse_ring.train.model import build_model, load_config

FRESH = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXTS = [f"def f{i}(x):\n    return x * {i} + {i * i}\n" * (12 + i) for i in range(6)]


def make_corpus(folder: Path) -> Path:
    """Fill a folder: text/, tokenizer and model in model/, rows of 192 tokens in data/."""
    (folder / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "text" / f"{i}.txt").write_text(text)
    tokenizer = train_tokenizer(TEXTS, folder / "model", vocab_size=270)
    config = load_config(None, json.dumps(FRESH), tokenizer, sequence_tokens=192)
    build_model(config, None, dtype=torch.float32).save_pretrained(folder / "model")
    command = f"{folder / 'text'} --tokenizer {folder / 'model'} --output {folder / 'data'} --sequence-tokens 192"
    result = CliRunner().invoke(prepare_data.app, [*command.split(), "--evaluation-sequences", "3"])
    assert result.exit_code == 0, result.output
    return folder
