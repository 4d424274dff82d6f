"""Tiny models, batches and the one-process reference that whole-model parity is judged by.

The reference knows nothing of rings: documents go through the unmodified Transformers model one by one (full index),
or the whole stream does with a dense softmax under the mask that the index defines (sparse index).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ds_sparse_ring.batch import IGNORE
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.index import mask
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from tests.common import rank_device

VOCABULARY = 64

CHECKPOINTING = "gradient_checkpointing" if Version(transformers.__version__) < Version("5.24") else "activation_checkpointing"
"""Name of the Trainer's argument in this version of Transformers."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # far from uniform attention, so that an index leaves something out
    "pad_token_id": 0,
}
_MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8)),
}
MODELS = tuple(_MODELS)
_MODELS["llama of one KV head"] = lambda: LlamaForCausalLM(LlamaConfig(**_SIZES | {"num_key_value_heads": 1}))
_MODELS["llama of 5 layers"] = lambda: LlamaForCausalLM(LlamaConfig(**_SIZES | {"num_hidden_layers": 5}))

SELECTORS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "price": {"kind": "price", "price": 6e-3},
    "every_query": {"kind": "every_query", "price": 0.3, "window_blocks": 1},
}


def tiny_model(kind: str = "llama") -> PreTrainedModel:
    """A model with the same weights whenever it is made."""
    torch.manual_seed(0)
    return _MODELS[kind]()


def section(selector: str = "full", **values: Any) -> dict[str, Any]:
    """A ``"sparse_ring"`` section with segments short enough for tests."""
    window = {} if "window_blocks" in SELECTORS[selector] else {"local_blocks": 1}
    return {"selector": SELECTORS[selector], "segment_tokens": 128, **window, **values}


@dataclass(frozen=True)
class Row:
    """A row of documents with padding around them. ``labelled`` is the share of tokens, from the start, with labels."""

    documents: tuple[int, ...]
    left: int = 0
    right: int = 0
    labelled: float = 1.0


def make_batch(rows: list[Row], seed: int) -> dict[str, Tensor]:
    """A batch as collators make it: input_ids, attention_mask, position_ids, labels ``[B, S]``."""
    generator = torch.Generator().manual_seed(seed)
    width = max(row.left + sum(row.documents) + row.right for row in rows)
    shape = (len(rows), width)
    batch = {
        "input_ids": torch.randint(1, VOCABULARY, shape, generator=generator),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE),
    }
    for r, row in enumerate(rows):
        begin = row.left
        batch["attention_mask"][r, begin : begin + sum(row.documents)] = 1
        labelled_end = begin + round(sum(row.documents) * row.labelled)
        for length in row.documents:
            batch["position_ids"][r, begin : begin + length] = torch.arange(length)
            begin += length
        keep = torch.rand(width, generator=generator) < 0.8  # holes: the count of targets is no function of lengths
        keep[: row.left] = False
        keep[labelled_end:] = False
        batch["labels"][r, keep] = batch["input_ids"][r, keep]
    return batch


def on_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with its tensors on the rank's device."""
    return {key: x.to(rank_device()) if isinstance(x, Tensor) else x for key, x in batch.items()}


def document_slices(rows: list[Row]) -> list[tuple[int, slice]]:
    """Row and token range of each document."""
    slices = []
    for r, row in enumerate(rows):
        begin = row.left
        for length in row.documents:
            slices.append((r, slice(begin, begin + length)))
            begin += length
    return slices


@dataclass
class Reference:
    """What one process gets: the mean loss over all targets, its gradients and their norm."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def norm(self) -> float:
        """2-norm over all parameters."""
        return float(torch.stack([g.double().norm() for g in self.gradients.values()]).norm())


def reference(kind: str, batches: list[tuple[list[Row], int]], ring: SparseRing | None = None) -> Reference:
    """Loss and gradients over ``batches`` (rows and seed) on one process.

    Args:
        ring: a ring of one rank whose selector chooses the index; without it, attention is full and Transformers' own.
    """
    model = tiny_model(kind).to(rank_device())
    loss = torch.zeros((), device=rank_device())
    count = 0
    for rows, seed in batches:
        batch = make_batch(rows, seed)
        for loss_sum, targets in _losses(model, rows, batch, ring):
            loss = loss + loss_sum
            count += targets
    loss = loss / max(count, 1)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(float(loss.detach()), gradients)


def _losses(
    model: PreTrainedModel, rows: list[Row], batch: dict[str, Tensor], ring: SparseRing | None
) -> Iterator[tuple[Tensor, int]]:
    if ring is None:
        batch = on_rank(batch)
        for r, tokens in document_slices(rows):
            logits = model(batch["input_ids"][r : r + 1, tokens]).logits[0, :-1]
            labels = batch["labels"][r, tokens][1:]
            yield cross_entropy(logits, labels, reduction="sum"), int((labels != IGNORE).sum())
        return
    with masked_dense(model, ring):
        stream = on_rank(ring.sequence_batch(batch))
        labels = stream.pop("labels")[0]
        stream.pop("shift_labels")
        logits = model(**stream).logits[0]
        yield cross_entropy(logits, labels, reduction="sum"), int((labels != IGNORE).sum())


@contextmanager
def masked_dense(model: PreTrainedModel, ring: SparseRing) -> Iterator[None]:
    """The model with a dense softmax under the mask of the index that the ring's selector chooses."""
    AttentionInterface.register("masked_dense_reference", _masked_dense_forward)
    with attach(model, ring):
        model.set_attn_implementation("masked_dense_reference")
        yield


def _masked_dense_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, sparse_ring: Any, **_: Any
) -> tuple[Tensor, None]:
    index = select_index(query[0].detach(), key[0].detach(), sparse_ring, scale=scaling)
    tokens = torch.arange(query.shape[2], device=query.device)
    masks = torch.stack([mask(index, head, tokens, tokens) for head in range(query.shape[1])])
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    weights = scores.masked_fill(~masks, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


def single_ring(selector: str, **values: Any) -> SparseRing:
    """A ring of this rank alone; every rank of the world calls it."""
    ring = SparseRing(SparseRingConfig(**section(selector, degree=1, **values)))
    ring.meter.active = False
    return ring


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the numbers of a tiny model's vocabulary."""
    vocabulary = {"<pad>": 0, **{str(i): i for i in range(1, VOCABULARY)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="1")), pad_token="<pad>")
