"""Decoder layers a few thousand tokens at a time: for a whole shard only attention's own tensors exist.

At 512K tokens the intermediate tensors of one MLP of Qwen2.5-3B take 75 GiB, for one layer and with gradient checkpointing. Here
a layer is one autograd function, which is its own checkpoint and works on chunks of tokens wherever tokens do not see each other:

* forward: chunks: norm, projections, rotary embedding -> q, k, v; attention -> o; chunks: projection, norm, MLP -> y
* backward: chunks: q, k, v again; o as the first pass left it; chunks: from dy to do; attention's backward; chunks: to dx

Kept for the backward pass are the layer's input x and what attention puts into the slot of its call (`ds_sparse_ring.slots`);
with an ``"offload"`` section both leave the device. With ``"layer_inputs_every"`` the first of a few layers in a row keeps x,
and the backward pass makes the others' again (`kept_inputs`). Gradients of weights are summed over the chunks in float32 and
leave the function once: hooks on parameters, with which ZeRO reduces gradients, run once per parameter and micro-batch. Under
ZeRO-3 a layer is a leaf module, gathered once per pass and not for every chunk.

In a Ulysses group a chunk's heads are exchanged while the next chunk is computed; what attention sees has been exchanged. What
both passes compute is in `chunked_call`.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.chunked_call import ATTENTION_NORMS, LayerCall, WeightGradients
from ds_sparse_ring.integrations.kept_inputs import KeptInput, layer_before
from ds_sparse_ring.integrations.model_checks import check_arguments
from ds_sparse_ring.slots import checkpoint_context_fn

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of Transformers that are computed here as they compute themselves; each is trained by a test."""

_LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def enable_chunked_layers(model: nn.Module, chunk_tokens: int) -> None:
    """Compute the decoder layers of sharded batches in chunks from now on; before ``deepspeed.initialize``.

    `ds_sparse_ring.integrations.transformers.attach` does it for a ring whose section sets ``"layer_chunk_tokens"``. Whole rows,
    in evaluation and generation, take the layers' own way.

    Args:
        model: a Transformers model, or a PEFT model around one.
        chunk_tokens: tokens of the shard that pass through norms, projections and MLP at once; the last chunk may be shorter.

    Raises:
        SparseRingError: layers that are not known here, or an engine of ZeRO-3 that gathers them module by module; no token.
    """
    if chunk_tokens < 1:
        raise SparseRingError(f"chunked layers: chunk_tokens = {chunk_tokens}: give at least 1, say 16384, or leave it out")
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SparseRingError(
            f"chunked layers: {type(model).__name__} has no decoder layers of Transformers: give a model that from_pretrained "
            "returned, or leave layer_chunk_tokens out"
        )
    for layer in layers:
        _check_layer(layer)
    for layer in layers:
        # Gathered as one: the hooks of its parts would gather and release their parameters once per chunk.
        set_z3_leaf_module(layer, True)
        layer.forward = ChunkedForward(layer, chunk_tokens)


def disable_chunked_layers(model: nn.Module) -> None:
    """Give the layers their own forward back. They stay leaf modules, as which an engine may have gathered them."""
    for layer in model.modules():
        if is_chunked(layer):
            del layer.forward


def is_chunked(layer: object) -> bool:
    """Whether a module is a layer that is computed in chunks."""
    return isinstance(getattr(layer, "__dict__", {}).get("forward"), ChunkedForward)


def _check_layer(layer: Any) -> None:
    name, way_out = type(layer).__name__, "leave layer_chunk_tokens out for this model"
    if name not in KNOWN_LAYERS or not type(layer).__module__.startswith("transformers."):
        raise SparseRingError(
            f"chunked layers: {name} may do more than norms, attention and an MLP; known are {', '.join(KNOWN_LAYERS)}: {way_out}"
        )
    parts, of_attention = ({key for key, _ in module.named_children()} for module in (layer, layer.self_attn))
    if unknown := sorted((parts ^ _LAYER_PARTS) | (of_attention - ATTENTION_NORMS ^ _ATTENTION_PARTS)):
        raise SparseRingError(f"chunked layers: {name} was changed, its {', '.join(unknown)} is not known here: {way_out}")
    if "forward" in layer.__dict__ and not is_chunked(layer):
        raise SparseRingError(f"chunked layers: another library has replaced the forward of {name}: {way_out}")
    if any(hasattr(part, "ds_id") for part in layer.children()):
        raise SparseRingError(
            "chunked layers: ZeRO-3 has put hooks into the layers already and would gather their parameters once per chunk: call "
            "attach(model, ring) (or enable_chunked_layers) before deepspeed.initialize"
        )


class ChunkedForward:
    """What stands in place of a layer's ``forward``. An object and no closure: a copied model takes it along to its own layer."""

    def __init__(self, layer: Any, chunk_tokens: int) -> None:
        self.layer = layer
        self.chunk_tokens = chunk_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (again := kwargs.get("again")) is not None:  # within the hooks of the layer, of ZeRO-3 for one
            return again()
        if kwargs.get("sparse_ring") is None:  # whole rows
            return type(self.layer).forward(self.layer, *args, **kwargs)
        return self._sharded(*args, **kwargs)

    @torch.compiler.disable  # as attention: a compiled model calls it as it is
    def _sharded(
        self,
        hidden_states: Tensor,
        *,
        sparse_ring: SequenceContext,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        layer = self.layer
        if not isinstance(sparse_ring, SequenceContext):
            raise SparseRingError(
                "the sparse_ring entry reached a layer unbound, so the model is not attached: call attach(model, ring)"
            )
        if attention_mask is not None:
            raise SparseRingError("a sharded sequence takes no attention mask; SparseRing.sequence_batch removes padding")
        check_arguments(layer.self_attn.attention_dropout if layer.training else 0.0, kwargs)
        _check_dropout(layer)
        call = LayerCall.of(layer, hidden_states, position_embeddings, sparse_ring, self.chunk_tokens)
        trained = [p for p in layer.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (trained or hidden_states.requires_grad):
            with torch.no_grad():
                return call.forward(hidden_states)
        first, replay = checkpoint_context_fn()
        kept = KeptInput(call, replay, hidden_states.requires_grad, layer_before(layer, hidden_states, sparse_ring))
        with saved_tensors_hooks(kept.keep, KeptInput.take):
            y: Tensor = _ChunkedLayer.apply(hidden_states, call, first, weakref.ref(replay), *trained)
        kept.output = y.data_ptr()
        sparse_ring.latest.set(kept)
        return y


def _check_dropout(layer: nn.Module) -> None:
    if not layer.training:
        return
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            raise SparseRingError(
                f"chunked layers: {name} drops out with p = {module.p}, and the backward pass would draw other elements: set it "
                "to 0 (LoRA: lora_dropout=0.0), or leave layer_chunk_tokens out"
            )


class _ChunkedLayer(torch.autograd.Function):
    """The parameters are inputs, so that their gradients go the way of all others; the layer is called with its own ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        call: LayerCall,
        first: AbstractContextManager[None],
        replay: weakref.ref[AbstractContextManager[None]],
        *trained: nn.Parameter,
    ) -> Tensor:
        with first:
            y = call.forward(x)
        # Parameters are no saved tensors: they would leave the device with x. Nor are cos and sin, which all layers share.
        ctx.call, ctx.replay, ctx.trained = call, replay, trained
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors  # first: it keeps the slot alive
        sums = WeightGradients(ctx.trained)
        dx = ctx.call.of_backward().backward(x.detach(), grads[0], ctx.replay(), ctx.needs_input_grad[0], sums)
        return dx, None, None, None, *sums.pop()
