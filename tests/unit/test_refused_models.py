"""What users get wrong about models and tokenizers, and in calling them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig, LlamaForSequenceClassification, MistralConfig, Qwen2Config

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.integrations.chunked_layers import enable_chunked_layers
from ds_sparse_ring.integrations.model_checks import check_model
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss
from ds_sparse_ring.integrations.transformers import adopt_gradient_checkpointing, attach
from ds_sparse_ring.job import load_shape
from ds_sparse_ring.train.model import load_config, load_tokenizer
from tests.unit.parity_model import Row, make_batch, tiny_model, word_tokenizer

from .refusals import Wrong, ring, train, written


def of_kind(kind: type, **values: Any) -> Callable[[Path], Any]:
    config = kind(**{"num_attention_heads": 4, "num_key_value_heads": 2, **values})
    return lambda _: check_model(config, SparseRingConfig())


FRESH: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def fresh(values: Any, **options: Any) -> Callable[[Path], Any]:
    text = values if isinstance(values, str) else json.dumps(values)
    return lambda _: load_config(None, text, word_tokenizer(), **{"sequence_tokens": 64, **options})


def saved(text: str, read: Callable[[str], Any] = load_shape) -> Callable[[Path], Any]:
    return lambda path: read(str(written(path, text, "config.json").parent))


def as_model(folder: str) -> Any:
    return load_config(folder, None, word_tokenizer(), sequence_tokens=64)


def half_a_tokenizer(path: Path) -> Any:
    written(path, '{"tokenizer_class": "PreTrainedTokenizerFast"}', "tokenizer_config.json")
    return load_tokenizer(str(path), None)


def with_prompt_tuning(_: Path) -> None:
    peft = pytest.importorskip("peft")
    attach(peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)), ring())


def with_two_rings(_: Path) -> None:
    model = tiny_model()
    attach(model, ring())
    attach(model, ring())


def with_a_classifier(_: Path) -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    attach(LlamaForSequenceClassification(config), ring())


def with_reentrant_checkpointing(_: Path) -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    adopt_gradient_checkpointing(model)


def with_plain_checkpointing(_: Path) -> None:
    owner, model = ring(), tiny_model().train()
    attach(model, owner)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**owner.sequence_batch(make_batch([Row((70,))], 1)))


def train_unsharded(_: Path) -> Any:
    model = tiny_model().train()
    attach(model, ring())
    return model(input_ids=torch.ones(1, 8, dtype=torch.int64))


MODELS = [
    Wrong("an architecture that was never compared", of_kind(GemmaConfig), "model_type", '"gemma"', "Use one of llama"),
    Wrong(
        "a sliding window",
        of_kind(MistralConfig, sliding_window=4096), "config.sliding_window", "4096", "set sliding_window = null",
    ),
    Wrong(
        "a window in some layers",
        of_kind(Qwen2Config, use_sliding_window=True, max_window_layers=1),
        "config.layer_types", "sliding", "set use_sliding_window",
    ),
    Wrong(
        "dropout in attention",
        of_kind(LlamaConfig, attention_dropout=0.1), "config.attention_dropout", "0.1", "set it to 0.0",
    ),
    Wrong("a soft cap", of_kind(LlamaConfig, attn_logit_softcapping=30.0), "attn_logit_softcapping", "30.0", "its own attention"),
    Wrong("a model that looks ahead", of_kind(LlamaConfig, is_causal=False), "model", "is_causal = False", "unset"),
    Wrong("frequencies by length", of_kind(LlamaConfig, rope_parameters=DYNAMIC), "rope_type", '"dynamic"', 'use "yarn"'),
    Wrong("no model of Transformers", lambda _: attach(nn.Linear(2, 2), ring()), "model", "Linear", "from_pretrained"),
    Wrong("a classifier", with_a_classifier, "model", "LlamaForSequenceClassification", "AutoModelForCausalLM"),
    Wrong("adapters that add tokens", with_prompt_tuning, 'adapter "default"', "PROMPT_TUNING", "such as LoRA"),
    Wrong("a second ring", with_two_rings, "the model", "attached to another ring", "detach() that attachment first"),
    Wrong("logits of no token", lambda _: enable_tiled_loss(tiny_model(), 0), "tiled loss", "tile_tokens = 0", "give at least 1"),
    Wrong(
        "chunks of no token",
        lambda _: enable_chunked_layers(tiny_model(), 0), "chunked layers", "chunk_tokens = 0", "give at least 1",
    ),
    Wrong(
        "chunks of no layer",
        lambda _: enable_chunked_layers(nn.Linear(2, 2), 8), "chunked layers", "Linear", "leave layer_chunk_tokens out",
    ),
    Wrong("reentrant checkpointing", with_reentrant_checkpointing, "gradient checkpointing", "use_reentrant=True", "pass"),
    Wrong("checkpointing of another kind", with_plain_checkpointing, "gradient checkpointing", "without our context_fn", "call"),
    Wrong("a model that nobody knows", lambda _: load_shape("gpt-5"), "model", "'gpt-5'", "a folder with config.json"),
    Wrong(
        "a configuration without sizes",
        saved('{"hidden_size": 8, "num_attention_heads": 2}'), "config.json", "intermediate_size is missing", "Add them there",
    ),
    Wrong("a size in words", saved('{"hidden_size": "wide"}'), "config.json", 'hidden_size = "wide"', "Llama's config.json"),
    Wrong("no head at all", saved('{"num_attention_heads": 0}'), "config.json", "num_attention_heads = 0", "Add them there"),
    Wrong("sizes of no JSON", saved("{"), "config.json", "is no JSON", "the folder of a saved model"),
    Wrong("sizes in a list", saved("[]"), "config.json", "holds list", "the folder of a saved model"),
    Wrong(
        "neither model nor sizes",
        lambda _: load_config(None, None, word_tokenizer(), sequence_tokens=64), "--model", "None", "give either",
    ),
    Wrong("sizes in a file that is not there", fresh("no.json"), "--fresh_config", "no.json", "the path of a file"),
    Wrong("sizes in single quotes", fresh("{'model_type': 'llama'}"), "--fresh_config", "is no JSON", "in double quotes"),
    Wrong("sizes without an object", fresh("[]"), "--fresh_config", "holds list", "between braces"),
    Wrong("sizes without an architecture", fresh({"hidden_size": 8}), "--fresh_config", "model_type", 'for example "llama"'),
    Wrong("an unknown architecture", fresh({"model_type": "lama"}), "--fresh_config", '"lama"', "use one of llama"),
    Wrong(
        "a width in quotes",
        fresh({**FRESH, "hidden_size": "32"}), "--fresh_config", "hidden_size", "Give sizes as in the config.json",
    ),
    Wrong("heads that do not divide the width", fresh({**FRESH, "hidden_size": 31}), "--fresh_config", "31", "Give sizes as in"),
    Wrong(
        "fewer words than the tokenizer",
        fresh({**FRESH, "vocab_size": 9}), "vocabulary", "of 9, the tokenizer of 64", "give --tokenizer",
    ),
    Wrong("nothing to stretch", fresh(FRESH, yarn_from=64), "YaRN", "64 tokens to 64", "give --yarn_from fewer"),
    Wrong("a folder without a model", lambda path: as_model(str(path)), "--model", "has no config.json", "give a folder"),
    Wrong(
        "a folder with half a model",
        saved('{"model_type": "llama", ', as_model), "config.json", "Transformers refuses", "Save the model again",
    ),
    Wrong(
        "a model of the hub",
        lambda _: load_tokenizer(None, "Qwen/Qwen2.5-3B"), "--model Qwen/Qwen2.5-3B", "no such folder here", "hf download Qwen/",
    ),
    Wrong(
        "a model of the hub beside a tokenizer",
        lambda path: load_tokenizer(str(path), "Qwen/Qwen2.5-3B"), "--model Qwen/", "names of the", "download it",
    ),
    Wrong("a tokenizer of the hub", lambda _: load_tokenizer("gpt2", None), "--tokenizer gpt2", "no such folder", "download it"),
    Wrong("no tokenizer", lambda path: load_tokenizer(None, str(path)), "no tokenizer in", "test_", "give --tokenizer a folder"),
    Wrong("no data", lambda _: load_tokenizer(None, None, "data"), "no tokenizer in", "data/tokenizer", "give --tokenizer"),
    Wrong("half a tokenizer", half_a_tokenizer, "tokenizer", "cannot load", "Save it again"),
    Wrong("a KV cache", lambda _: train(ring(), use_cache=True), "sharded sequence", "KV cache", "without use_cache"),
    Wrong("the last logits", lambda _: train(ring(), logits_to_keep=1), "logits_to_keep", "of a rank's part", "leave it out"),
    Wrong(
        "chosen logits",
        lambda _: train(ring(), logits_to_keep=torch.tensor([3])), "logits_to_keep", "of a rank's part", "leave it out",
    ),
    Wrong(
        "a mask again",
        lambda _: train(ring(), attention_mask=torch.ones(1, 128)), "sharded sequence", "attention_mask", "sequence_batch",
    ),
    Wrong(
        "an entry of another kind",
        lambda _: train(ring(), sparse_ring={}), "sparse_ring entry", "is a dict", "call the model with the batch",
    ),
    Wrong("attention weights", lambda _: train(ring(), output_attentions=True), "attention", "output_attentions", "Remove them"),
    Wrong("whole rows in training", train_unsharded, "batch", "without a sparse_ring entry", "wrap the data collator"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [pytest.param(wrong, id=wrong.name) for wrong in MODELS])
def test_a_message_says_what_where_and_the_way_out(wrong: Wrong, tmp_path: Path) -> None:
    wrong.check(tmp_path)


def test_the_table_is_long_and_no_case_stands_twice() -> None:
    assert len({case.name for case in MODELS}) == len(MODELS) >= 20
