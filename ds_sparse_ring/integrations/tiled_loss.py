"""The loss of a causal language model, a few thousand tokens at a time.

At 128K tokens and 152K words the logits of a sequence take 40 GB in bfloat16 and as much again in float32, twice. Here the
last layer and the loss run on tiles of tokens, and again in the backward pass (``torch.utils.checkpoint``), so that one
tile's logits exist at a time. The result is that of the model's own loss: the sum over targets over their number.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from ds_sparse_ring.batch import IGNORE
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.transformers import base_model_of

PLAIN_HEADS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose logits are those of their last layer, unscaled and uncapped."""


def enable_tiled_loss(model: nn.Module, tile_tokens: int) -> None:
    """Compute the loss of sharded batches in tiles from now on; the model's output then holds no logits.

    Args:
        tile_tokens: tokens whose logits exist at once.

    Raises:
        SparseRingError: a model whose logits are not plainly those of its last layer; no token.
    """
    if tile_tokens < 1:
        raise SparseRingError(f"tiled loss: tile_tokens = {tile_tokens}: give at least 1, say 4096, or leave the tiles out")
    base: Any = base_model_of(model)
    if type(base).__name__ not in PLAIN_HEADS:
        raise SparseRingError(
            f"tiled loss: {type(base).__name__} may do more to its logits than its last layer does; it is known for "
            f"{', '.join(PLAIN_HEADS)}. Leave it out for this model"
        )
    base.forward = functools.partial(_forward, base, base.forward, tile_tokens)


def _forward(base: Any, whole: Any, tile_tokens: int, *args: Any, **kwargs: Any) -> Any:
    shift_labels = kwargs.get("shift_labels")
    if shift_labels is None:
        return whole(*args, **kwargs)
    labels, count = shift_labels, kwargs.get("num_items_in_batch")
    kept = {key: x for key, x in kwargs.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}
    hidden = base.get_decoder()(*args, **{**kept, "return_dict": True}).last_hidden_state
    total = tiled_loss_sum(hidden.flatten(0, 1), labels.flatten(), base.get_output_embeddings(), tile_tokens)
    targets = (labels != IGNORE).sum().clamp(min=1) if count is None else count
    return CausalLMOutputWithPast(loss=total / targets)


def tiled_loss_sum(hidden: Tensor, labels: Tensor, head: nn.Module, tile_tokens: int) -> Tensor:
    """Sum of token losses.

    Args:
        hidden: ``[n, width]``; labels: int64 ``[n]``, `IGNORE` where there is no target.
        head: the last layer, ``[tile, width]`` -> logits ``[tile, words]``.

    Returns:
        Scalar in float32.
    """
    parts = zip(hidden.split(tile_tokens), labels.split(tile_tokens), strict=True)
    losses = [checkpoint(_loss_sum, head, x, y, use_reentrant=False) for x, y in parts]
    return torch.stack(losses).sum()


def _loss_sum(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits: Tensor = head(hidden)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
