"""Which Transformers models and calls may attend on a ring: those whose attention is exactly what the kernels compute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose attention is known to be what the kernels compute; each is trained by a test."""

# Keyword arguments that reach attention and change nothing there: rotary embedding has used the positions, the loss the
# labels.
_HARMLESS = frozenset(
    {
        "cache_position",
        "labels",
        "num_items_in_batch",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)


def check_model(config: PreTrainedConfig, ring_config: SparseRingConfig) -> None:
    """Refuse a model that the kernels would compute wrongly.

    Args:
        config: the model's configuration.
        ring_config: our section; its ``heads_per_pattern`` is checked against the model's heads.

    Raises:
        SparseRingError: naming what was found, where, and the way out.
    """
    kind = config.model_type
    if kind not in MODEL_TYPES:
        raise SparseRingError(
            f'model: model_type "{kind}" is not supported; its attention was never compared with the kernels. '
            f"Use one of {', '.join(MODEL_TYPES)}"
        )
    _check_windows(config)
    for key, what in (("attn_logit_softcapping", "a soft cap on scores"), ("attention_sinks", "attention sinks")):
        if getattr(config, key, None) is not None:
            raise SparseRingError(
                f"model: config.{key} = {getattr(config, key)}: the kernels lack {what}; train this model with its own attention"
            )
    if getattr(config, "attention_dropout", 0):
        raise SparseRingError(
            f"model: config.attention_dropout = {config.attention_dropout}: the kernels have no dropout; set it to 0.0"
        )
    causal = getattr(config, "is_causal", True) is not False
    if not causal or getattr(config, "add_cross_attention", False) or getattr(config, "is_encoder_decoder", False):
        raise SparseRingError(
            "model: only causal self-attention can be sharded; unset is_causal = False, add_cross_attention and "
            "is_encoder_decoder, or keep this model on its own attention"
        )
    _check_rope(config)
    ring_config.check_heads(config.num_attention_heads, config.num_key_value_heads)
    _check_maps(config, ring_config)


def _check_maps(config: PreTrainedConfig, ring_config: SparseRingConfig) -> None:
    """A map of what there is not would never be recorded, without a word."""
    maps = ring_config.maps
    if maps is None:
        return
    counts = {"layers": config.num_hidden_layers, "heads": config.num_attention_heads // ring_config.ulysses_degree}
    for key, count in counts.items():
        beyond = [number for number in getattr(maps, key) or [] if number >= count]
        if beyond:
            raise SparseRingError(f"sparse_ring.maps.{key} = {beyond}: rank 0 has {count} {key}: use 0 to {count - 1}")


def check_adapters(model: Any) -> None:
    """Refuse adapters that put tokens of their own before those of the batch, of which every rank would get some.

    Args:
        model: as it is attached, a PEFT model perhaps.

    Raises:
        SparseRingError: naming the adapter.
    """
    adapters = getattr(model, "peft_config", None)
    for name, adapter in adapters.items() if isinstance(adapters, Mapping) else ():
        if getattr(adapter, "is_prompt_learning", False):
            kind = getattr(adapter.peft_type, "value", adapter.peft_type)
            raise SparseRingError(
                f'model: the adapter "{name}" ({kind}) adds tokens to the sequence, which is cut over ranks before: use '
                "adapters of weights, such as LoRA"
            )


def check_offload(ring_config: SparseRingConfig, *, checkpointed: bool) -> None:
    """Refuse memory outside the device that nothing would be kept in.

    Args:
        checkpointed: whether layers keep their inputs alone.

    Raises:
        SparseRingError: an ``"offload"`` section without checkpointing.
    """
    if ring_config.offload is not None and ring_config.page_tokens is None and not checkpointed:
        raise SparseRingError(
            "sparse_ring.offload is for what checkpointed layers keep, but gradient checkpointing is off: turn it on "
            "(gradient_checkpointing), set layer_chunk_tokens or offload.kv_page_tokens, or leave offload out"
        )


def check_words(highest: int, embedding: Any) -> None:
    """Refuse a batch with words that the model does not have.

    Args:
        highest: `Sequence.highest_word`. embedding: the model's; ZeRO-3 leaves its ``num_embeddings`` alone.

    Raises:
        SparseRingError: naming both numbers.
    """
    words = getattr(embedding, "num_embeddings", None)
    if words is not None and highest >= words:
        raise SparseRingError(
            f"batch: a token or label is {highest}, and the model has {words} words, 0 to {words - 1}: use the tokenizer that "
            "belongs to the model, or model.resize_token_embeddings before it is attached"
        )


def positions_of(config: PreTrainedConfig) -> int | None:
    """Positions that a model's rotary embedding was made for; None if the configuration does not say.

    Some files, Qwen2.5's among them, write a factor of YaRN or of linear scaling beside the length before it.
    """
    positions = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if positions is None or parameters.get("rope_type") not in ("yarn", "linear"):
        return positions
    original = parameters.get("original_max_position_embeddings") or positions
    return max(positions, round(original * (parameters.get("factor") or 1.0)))


def warn_beyond_positions(tokens: int, positions: int) -> None:
    """Warn of a document with positions that the model has never seen, on which the loss is that of another model.

    Args:
        tokens: of the longest document. positions: `positions_of` the model.
    """
    warnings.warn(
        f"rows with {tokens} tokens of one document, but the model was made for {positions} positions (max_position_embeddings): "
        f"set YaRN by --yarn_from {positions} (train/), or by ds_sparse_ring.train.model.set_yarn before the model is made, or "
        "shorten the rows; if rope_theta was raised for this length, raise max_position_embeddings too",
        stacklevel=2,
    )


def _check_windows(config: PreTrainedConfig) -> None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        other = [f"{kind} in layer {i}" for i, kind in enumerate(layer_types) if kind != "full_attention"]
        if other:
            raise SparseRingError(
                f"model: config.layer_types holds {', '.join(other[:3])}{', ...' if len(other) > 3 else ''}, and "
                "the kernels have full attention only: set use_sliding_window = false and layer_types all "
                '"full_attention", '
                "if the model may attend so"
            )
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        raise SparseRingError(
            f"model: config.sliding_window = {config.sliding_window} limits what a query sees, and the kernels have no "
            "window: set sliding_window = null in config.json if the model may attend to everything (Mistral from v0.2)"
        )


def _check_rope(config: PreTrainedConfig) -> None:
    # Both kinds choose frequencies by the highest position that a forward pass sees: ranks of a ring see different
    # ones.
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise SparseRingError(
            f'model: rope_type = "{kind}" takes rotary frequencies from the highest position that a rank sees, so '
            'the ranks would disagree: use "yarn", "llama3", "linear" or "default"'
        )


def check_arguments(dropout: float, kwargs: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of attention that would change the result.

    Raises:
        SparseRingError: naming them.
    """
    if dropout:
        raise SparseRingError(f"attention dropout {dropout} is not supported: set config.attention_dropout = 0.0")
    if kwargs.get("is_causal") is False:
        raise SparseRingError("is_causal = False: attention is causal; leave the argument out")
    known = _HARMLESS | {"is_causal"}
    given = (key for key, value in kwargs.items() if value is not None and value is not False)
    unknown = sorted(set(given) - known)
    if unknown:
        raise SparseRingError(
            f"attention does not know these arguments, which may change the result: {', '.join(unknown)}. Remove them "
            "from the batch or the model's call; windows, soft caps, sinks and attention weights are not supported"
        )
