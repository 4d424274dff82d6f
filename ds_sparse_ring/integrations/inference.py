"""Sparse prefill of whole rows on one process, for evaluation and generation with plain ``input_ids``.

The first pass over a prompt attends with the index that the configuration's selector chooses, as training does. What follows,
tokens one by one over the KV cache, is dense: a selection needs a segment of queries. No gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.model_checks import check_arguments, check_model
from ds_sparse_ring.integrations.transformers import attention_layers, base_model_of, sparse_ring_mask
from ds_sparse_ring.runtime import SparseRing

NAME = "sparse_ring_prefill"
"""Name of the attention implementation, and of the keyword argument that carries the prompt."""


class SparsePrefill:
    """A model whose prompts are attended to sparsely; leaving it as a context manager restores what was there before.

    Attributes:
        ring: of this process; ``ring.meter.pop()`` says what the prompts' indices kept.
    """

    def __init__(self, model: nn.Module, config: SparseRingConfig) -> None:
        """Change the model's attention.

        Args:
            config: its selector, segments, probe and backend count; a degree other than 1 is refused.

        Raises:
            SparseRingError: several ranks, or a model or ``dense_layers`` that training would refuse, too.
        """
        self.model: PreTrainedModel = base_model_of(model)
        self.ring = SparseRing(config)
        if self.ring.axes.sequence_size > 1:
            raise SparseRingError(
                f"sparse prefill runs on one process, but {self.ring.axes.sequence_size} ranks share a sequence here: start it "
                "without a launcher, or set sparse_ring.degree to 1"
            )
        check_model(self.model.config, config)
        self.ring.schedule.name_layers(attention_layers(self.model))
        self.ring.evaluating = self.ring.meter.active = True
        AttentionInterface.register(NAME, prefill_attention_forward)
        AttentionMaskInterface.register(NAME, sparse_ring_mask)
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        self._handle = self.model.get_decoder().register_forward_pre_hook(self._bind_prompt, with_kwargs=True)
        self._sequence: Sequence | None = None

    def detach(self) -> None:
        """Give the model its former attention back. Calling it again changes nothing."""
        self._handle.remove()
        if self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(self._before)

    def __enter__(self) -> SparsePrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _bind_prompt(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of the decoder stack: a prompt gets its context, and no mask of tokens x tokens."""
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        cache = kwargs.get("past_key_values")
        if given is None or given.shape[1] < 2 or (cache is not None and cache.get_seq_length()):
            return None
        if torch.is_grad_enabled() and decoder.training:
            raise SparseRingError("sparse prefill is for evaluation: call model.eval(); for training attach the model to a ring")
        _check_whole(kwargs)
        return args, {**kwargs, "attention_mask": None, NAME: self.ring.bind(self._prompt(given.shape[1]))}

    def _prompt(self, tokens: int) -> Sequence:
        if self._sequence is None or self._sequence.tokens != tokens:
            batch = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}
            self._sequence = self.ring.sequence_batch(batch)["sparse_ring"]
        return self._sequence


def _check_whole(kwargs: dict[str, Any]) -> None:
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        raise SparseRingError(
            "sparse prefill takes no padding: give prompts one by one (batch size 1), without an attention_mask"
        )
    if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise SparseRingError("sparse prefill takes one document a row, but position_ids restart: give documents one by one")


def prefill_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparse_ring_prefill: SequenceContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in place of attention: sparse for a prompt, SDPA for what follows.

    Args:
        query, key, value: ``[B, H, n, D]``, ``[B, K, m, D]`` after rotary embedding; rows of a prompt have no padding.

    Returns:
        Output ``[B, n, H, D]`` and no attention weights.
    """
    check_arguments(dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sparse_ring_prefill is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
    tokens = query.shape[2]
    beyond = sparse_ring_prefill.layout.local_tokens - tokens  # whole blocks; what follows the prompt is seen by nobody
    q, k, v = (F.pad(x, (0, 0, 0, beyond)) for x in (query, key, value))
    layer: int = module.layer_idx
    rows = [
        sparse_ring_attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], sparse_ring_prefill, layer=layer, scale=scale)
        for row in range(q.shape[0])
    ]
    return torch.cat(rows)[:, :tokens], None
