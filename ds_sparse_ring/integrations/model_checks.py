"""Which Transformers models and calls may attend on a ring: those whose attention is exactly what the kernels compute."""

from __future__ import annotations

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
            f"Supported: {', '.join(MODEL_TYPES)}"
        )
    _check_windows(config)
    for key, what in (("attn_logit_softcapping", "a soft cap on scores"), ("attention_sinks", "attention sinks")):
        if getattr(config, key, None) is not None:
            raise SparseRingError(f"model: config.{key} = {getattr(config, key)}: the kernels lack {what}")
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
        raise SparseRingError("is_causal = False: only causal attention is supported")
    known = _HARMLESS | {"is_causal"}
    given = (key for key, value in kwargs.items() if value is not None and value is not False)
    unknown = sorted(set(given) - known)
    if unknown:
        raise SparseRingError(
            f"attention does not know these arguments, which may change the result: {', '.join(unknown)}. Remove them "
            "from the batch or the model's call; windows, soft caps, sinks and attention weights are not supported"
        )
