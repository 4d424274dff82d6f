"""Attention of unmodified Transformers models on a sharded sequence.

Three seams that Transformers documents carry everything:

* ``AttentionInterface`` holds `sparse_ring_attention_forward` under the name ``"sparse_ring"``, and
  ``AttentionMaskInterface`` a mask function that builds nothing for a sharded sequence;
* keyword arguments of a model's forward reach attention unchanged, also through gradient checkpointing and ZeRO-3. The
  batch carries a ``sparse_ring`` entry (integers only: where every token of the shard belongs);
* a forward pre-hook on the decoder stack, put there by `attach`, binds that entry to this job's groups, plans and
  kernels. The stack is hooked, not the model: PEFT calls ``forward`` of the model below it, past the model's own hooks.

Nothing is kept in this module: two models of one process may belong to two rings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.chunked_layers import disable_chunked_layers, enable_chunked_layers, is_chunked
from ds_sparse_ring.integrations.memory import kept_by_layers
from ds_sparse_ring.integrations.model_checks import (
    check_adapters,
    check_arguments,
    check_model,
    check_offload,
    check_words,
    positions_of,
    warn_beyond_positions,
)
from ds_sparse_ring.slots import checkpoint_context_fn

if TYPE_CHECKING:
    from ds_sparse_ring.config import SparseRingConfig
    from ds_sparse_ring.runtime import SparseRing

NAME = "sparse_ring"
"""Name of the attention implementation, and of the keyword argument that carries the sequence."""


def register() -> None:
    """Make ``attn_implementation="sparse_ring"`` known to Transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, sparse_ring_attention_forward)
    AttentionMaskInterface.register(NAME, sparse_ring_mask)


class Attachment:
    """A model attached to a ring. `detach` (or leaving it as a context manager) restores what was there before."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, ring: SparseRing, before: str, called: nn.Module) -> None:
        self.model = model
        self.ring = ring
        self.before = before
        self._handles = [decoder.register_forward_pre_hook(_BindSequence(self), with_kwargs=True)]
        for module in {model, called}:  # PEFT calls the model below it past the model's own hooks
            self._handles.append(module.register_forward_pre_hook(_refuse_cut_logits, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks and give the model its former attention and layers back. Calling it again changes nothing."""
        for handle in self._handles:
            handle.remove()
        disable_chunked_layers(self.model)
        if self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(self.before)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _refuse_cut_logits(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the model that is called."""
    kept = kwargs.get("logits_to_keep")
    if kwargs.get(NAME) is not None and kept is not None and not (isinstance(kept, int) and kept == 0):
        raise SparseRingError(
            "logits_to_keep counts the tokens of a rank's part, and its last ones are not those of the sequence: leave it out, "
            "and take what you need of the logits by the batch's position_ids"
        )


class _BindSequence:
    """Forward pre-hook of a decoder stack: turns the batch's sequence into the context that attention takes."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _BindSequence:
        return self  # a copied model belongs to the same ring; process groups cannot be copied

    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        sequence = kwargs.get(NAME)
        if sequence is None:
            _check_whole_rows(kwargs)
            return None
        _check_sharded(kwargs)
        if not isinstance(sequence, Sequence):
            raise SparseRingError(
                f"the sparse_ring entry is a {type(sequence).__name__}: call the model with the batch that "
                "SparseRing.sequence_batch returns, unchanged"
            )
        ring = self.attachment.ring
        layers = kept_by_layers(decoder, ring)
        check_words(sequence.highest_word, self.attachment.model.get_input_embeddings())
        self._check_positions(sequence)
        if decoder.training and torch.is_grad_enabled():
            _check_checkpointing(decoder)
            _check_options(decoder, ring.config)
            check_offload(ring.config, checkpointed=layers is not None)
        return args, {**kwargs, NAME: ring.bind(sequence, layers=layers), "use_cache": False}

    def _check_positions(self, sequence: Sequence) -> None:
        """Warn once, on rank 0. No refusal: there are other ways to make a model fit for longer documents."""
        if self.warned:
            return
        positions = positions_of(self.attachment.model.config)
        if positions is not None and sequence.longest_document > positions:
            self.warned = True
            if self.attachment.ring.axes.rank == 0:
                warn_beyond_positions(sequence.longest_document, positions)


def _check_sharded(kwargs: Mapping[str, Any]) -> None:
    if any(kwargs.get(key) is not None for key in ("cache", "past_key_values")) or kwargs.get("use_cache"):
        raise SparseRingError(
            "a sharded sequence has no KV cache: call the model without use_cache and past_key_values, or generate "
            "from plain input_ids without the sparse_ring entry"
        )
    if kwargs.get("attention_mask") is not None:
        raise SparseRingError(
            "a sharded sequence takes no attention_mask: give the mask to SparseRing.sequence_batch, which removes "
            "padding, and call the model with the batch it returns"
        )


def _check_whole_rows(kwargs: Mapping[str, Any]) -> None:
    """Packed rows need a mask between documents; the mask function sees a shard's striped positions the same way."""
    positions = kwargs.get("position_ids")
    cached = any(kwargs.get(key) is not None for key in ("cache", "past_key_values"))
    if positions is None or kwargs.get("attention_mask") is not None or cached or positions.shape[-1] < 2:
        return
    if bool((positions.diff(dim=-1) != 1).any()):
        raise SparseRingError(
            "position_ids restart within a row, but the batch has no sparse_ring entry, so its documents would see "
            "each other: make the batch with SparseRing.sequence_batch (or collator), or detach the model first"
        )


def _check_checkpointing(decoder: nn.Module) -> None:
    for module in decoder.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = module._gradient_checkpointing_func
            if getattr(function, "keywords", {}).get("context_fn") is not checkpoint_context_fn:
                raise SparseRingError(
                    "gradient checkpointing is on without our context_fn, so the backward pass would select and "
                    "attend again: call ds_sparse_ring.integrations.transformers.enable_gradient_checkpointing(model)"
                )


def _check_options(decoder: nn.Module, config: SparseRingConfig) -> None:
    """Refuse options of Transformers' checkpointing where the section says what layers keep, and where."""
    if config.offload is None and config.layer_chunk_tokens is None:
        return
    layers: list[Any] = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len({layer.gradient_checkpointing for layer in layers}) > 1:
        raise SparseRingError(
            "gradient checkpointing: every_n_layers has no effect on layers in chunks, and sparse_ring.offload counts on all "
            "layers to be checkpointed: leave it out; layers in chunks keep fewer inputs by sparse_ring.layer_inputs_every"
        )
    for function in (layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing):
        if (*function.args, function.func)[0] is not checkpoint:  # what `adopt_gradient_checkpointing` has wrapped
            raise SparseRingError(
                "gradient checkpointing: offload of Transformers has no effect on layers in chunks, and takes inputs away from "
                "sparse_ring.offload: leave it out, and set sparse_ring.offload.host_gib"
            )


def attach(model: nn.Module, ring: SparseRing) -> Attachment:
    """Let ``model`` attend on ``ring``; before or after ``deepspeed.initialize``, with ``"layer_chunk_tokens"`` before it.

    Args:
        model: a causal ``PreTrainedModel``, or a PEFT model around one.

    Returns:
        The attachment; the one that is there already if the model is attached to this ring.

    Raises:
        SparseRingError: a model that `check_model` refuses, is no Transformers model, or is attached to another ring; a
            layer in ``dense_layers`` that it has not.
    """
    base = base_model_of(model)
    decoder = base.get_decoder()
    before = None
    for key, hook in list(decoder._forward_pre_hooks.items()):
        if isinstance(hook, _BindSequence) and hook.attachment.model is not base:
            # copy.deepcopy took the hook along: the copy gets an attachment of its own
            before = hook.attachment.before
            del decoder._forward_pre_hooks[key], decoder._forward_pre_hooks_with_kwargs[key]
        elif isinstance(hook, _BindSequence):
            if hook.attachment.ring is not ring:
                raise SparseRingError("the model is attached to another ring: detach() that attachment first")
            return hook.attachment
    check_model(base.config, ring.config)
    for part in (model, getattr(model, "module", None), base):
        check_adapters(part)
    if type(base).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise SparseRingError(
            f"model: {type(base).__name__} is no causal language model, and labels are cut and shifted for next-token "
            "prediction: load it with AutoModelForCausalLM"
        )
    for name, module in decoder.named_modules():
        if getattr(module, "sinks", None) is not None or getattr(module, "is_causal", True) is False:
            raise SparseRingError(
                f"model: {name} has attention sinks or is not causal, which the kernels lack; train this model with its "
                "own attention"
            )
    ring.schedule.name_layers(attention_layers(base))
    register()
    attachment = Attachment(base, decoder, ring, before or base.config._attn_implementation, model)
    base.set_attn_implementation(NAME)
    if base.config._attn_implementation != NAME:
        attachment.detach()
        raise SparseRingError(
            f"model: {type(base).__name__} does not take its attention from Transformers' AttentionInterface: use the class that "
            "Transformers has for this architecture"
        )
    ring.note_layers(base.config.num_hidden_layers)
    if ring.config.layer_chunk_tokens is not None:
        try:
            enable_chunked_layers(base, ring.config.layer_chunk_tokens)
        except SparseRingError:
            attachment.detach()
            raise
    return attachment


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """The Transformers model inside a PEFT wrapper or a DeepSpeed engine.

    Raises:
        SparseRingError: if there is none.
    """
    inner: Any = model
    if not isinstance(inner, PreTrainedModel) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise SparseRingError(
            f"{type(model).__name__} is neither a Transformers model nor a PEFT model around one: pass what "
            "from_pretrained or get_peft_model returned"
        )
    return inner


def attention_layers(model: nn.Module) -> dict[str, int]:
    """The layers of a model by the names of their attention modules."""
    found = ((name, getattr(module, "layer_idx", None)) for name, module in model.named_modules())
    return {name: layer for name, layer in found if isinstance(layer, int)}


def enable_gradient_checkpointing(model: nn.Module, **options: Any) -> None:
    """Turn on gradient checkpointing whose replay takes index and attention output from where the first pass left them.

    Args:
        options: ``every_n_layers`` and ``offload`` of Transformers; a ring with ``"layer_chunk_tokens"`` or ``"offload"`` refuses
            them when training begins.

    Raises:
        SparseRingError: for ``use_reentrant=True``, which takes no ``context_fn``.
    """
    base = base_model_of(model)
    if hasattr(base, "activation_checkpointing_enable"):
        base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False}, **options)
    else:  # Transformers before 5.24 has only the older name, later ones warn about it
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **options)
    adopt_gradient_checkpointing(base)


def adopt_gradient_checkpointing(model: nn.Module) -> None:
    """Give our ``context_fn`` to checkpointing that Trainer has turned on; without checkpointing, change nothing."""
    module: Any
    for module in base_model_of(model).modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is None or getattr(function, "func", None) is _checkpoint_layer:
            continue
        if not isinstance(function, functools.partial):
            raise SparseRingError(
                "gradient checkpointing uses a function of its own, which takes no context_fn: turn it on by "
                "enable_gradient_checkpointing(model) of ds_sparse_ring.integrations.transformers"
            )
        if function.keywords.get("use_reentrant", True):
            raise SparseRingError(
                'gradient checkpointing: use_reentrant=True takes no context_fn: pass {"use_reentrant": False}, or no '
                "keyword arguments at all"
            )
        module._gradient_checkpointing_func = functools.partial(
            _checkpoint_layer, function.func, *function.args, **{**function.keywords, "context_fn": checkpoint_context_fn}
        )


def _checkpoint_layer(function: Callable[..., Any], layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpoint a layer. Its inputs leave the device if the ring that it attends on has an ``"offload"`` section.

    A layer that works in chunks is its own checkpoint: around it, another one would run it twice. (Transformers from 5.24 on
    checkpoint ``forward`` of a layer's class, which such a layer does not call.)
    """
    if is_chunked(getattr(getattr(layer, "func", None), "__self__", None)):
        return layer(*args)
    context = getattr(layer, "keywords", {}).get(NAME)  # Transformers has bound a layer's keyword arguments
    spill = context.spill if isinstance(context, SequenceContext) else None
    with nullcontext() if spill is None else spill.saved_tensors():
        return function(layer, *args, **options)


def sparse_ring_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparse_ring: SequenceContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in place of attention.

    Args:
        query, key, value: ``[1, H, n, D]``, ``[1, K, n, D]`` after rotary embedding; any batch without ``sparse_ring``.
        attention_mask: a 4-D mask of `sparse_ring_mask`, only without ``sparse_ring``.
        scaling: softmax scale; by default ``D ** -0.5``.
        sparse_ring: the bound sequence, or None for whole rows in evaluation and generation (then SDPA runs).

    Returns:
        Output ``[1, n, H, D]`` and no attention weights.

    Raises:
        SparseRingError: an argument that would change the result, or training on a batch that is not sharded.
    """
    check_arguments(dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sparse_ring is None:
        if module.training and torch.is_grad_enabled():
            raise SparseRingError(
                "training on a batch without a sparse_ring entry: wrap the data collator with SparseRing.collator "
                "(SparseRingTrainer does it) or call SparseRing.sequence_batch; whole rows are for model.eval() only"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
    if not isinstance(sparse_ring, SequenceContext):
        raise SparseRingError(
            "the sparse_ring entry reached attention unbound, so the model is not attached: call attach(model, ring)"
        )
    if attention_mask is not None:
        raise SparseRingError("a sharded sequence takes no attention mask; SparseRing.sequence_batch removes padding")
    return sparse_ring_attention(query, key, value, sparse_ring, layer=module.layer_idx, scale=scale), None


def sparse_ring_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask of whole rows in evaluation and generation: that of SDPA; nothing for a sharded sequence.

    A shard has neither padding nor cache, and its striped position ids look like packed documents, for which
    Transformers would build a mask of ``n * n`` entries that no one reads.
    """
    whole = attention_mask is not None or q_length != kv_length or isinstance(q_offset, Tensor) or q_offset != 0
    if not whole:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask, **kwargs)
