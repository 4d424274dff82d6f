"""Decoder layers a few thousand tokens at a time: for a whole shard only attention's own tensors exist.

At 512K tokens the intermediate tensors of one MLP of Qwen2.5-3B take 75 GiB, for one layer and with gradient checkpointing. Here
a layer is one autograd function, which is its own checkpoint and works on chunks of tokens wherever tokens do not see each other:

* forward: chunks: norm, projections, rotary embedding -> q, k, v; attention -> o; chunks: projection, norm, MLP -> y
* backward: chunks: q, k, v again; o as the first pass left it; chunks: from dy to do; attention's backward; chunks: to dx

Kept for the backward pass are the layer's input x and what attention puts into the slot of its call (`ds_sparse_ring.slots`);
with an ``"offload"`` section both leave the device. With ``"layer_inputs_every"`` the first of a few layers in a row keeps x, and
the backward pass makes the others' again (`_Kept`). Gradients of weights are summed over the chunks in float32 and leave the
function once: hooks on parameters, with which ZeRO reduces gradients, run once per parameter and micro-batch. Under ZeRO-3 a
layer is a leaf module, gathered once per pass and not for every chunk.

In a Ulysses group a chunk's heads are exchanged while the next chunk is computed; what attention sees has been exchanged.

Shapes: n local tokens, c of a chunk, W width, H query heads, K key/value heads, D head size. h, k, m: heads and tokens that
attention works on: H, K, n without a Ulysses group, H / u, K / u (at least 1), u n in one of u ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.model_checks import check_arguments
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.slots import checkpoint_context_fn
from ds_sparse_ring.spill import Spilled
from ds_sparse_ring.ulysses import ChunkExchange

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of Transformers that are computed here as they compute themselves; each is trained by a test."""

_LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_ATTENTION_NORMS = frozenset({"q_norm", "k_norm"})


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
    if unknown := sorted((parts ^ _LAYER_PARTS) | (of_attention - _ATTENTION_NORMS ^ _ATTENTION_PARTS)):
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
        call = _LayerCall.of(layer, hidden_states, position_embeddings, sparse_ring, self.chunk_tokens)
        trained = [p for p in layer.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (trained or hidden_states.requires_grad):
            with torch.no_grad():
                return call.forward(hidden_states)
        first, replay = checkpoint_context_fn()
        kept = _Kept(call, replay, hidden_states.requires_grad, _layer_before(layer, hidden_states, sparse_ring))
        with saved_tensors_hooks(kept.keep, _Kept.take):
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


@dataclass(eq=False)
class _Kept:
    """What the graph owns of a call: the slot and the input, maybe outside the device. Both go when the graph lets go of it.

    Of ``layer_inputs_every`` layers in a row only the first one keeps its input. The first one to run backward, the last of
    them, makes the others' inputs again, which then wait on the device for their own layers.

    Attributes:
        wants_dx: whether the input has a gradient. before: the layer from which the input is made; None: it is kept.
        x: the kept input. made: the input that a later layer has made. output: address of the output.
    """

    call: _LayerCall
    replay: AbstractContextManager[None]
    wants_dx: bool
    before: _Kept | None
    x: Tensor | Spilled | None = None
    made: Tensor | None = None
    output: int = 0

    def keep(self, x: Tensor) -> _Kept:
        """What autograd saves in place of the input."""
        spill = self.call.context.spill
        if self.before is None:
            self.x = x.detach() if spill is None else spill.saved_tensors().pack_hook(x)
        return self

    def take(self) -> Tensor:
        """The input ``[1, n, W]``, for this layer's backward pass."""
        if self.before is None:
            return self._input(last=True)
        if self.made is None:  # also in the second pass over a graph that is kept
            self._make()
        x, self.made = self.made, None
        assert x is not None
        return x

    def _make(self) -> None:
        """Inputs of this layer and of those between it and the one that has kept its own."""
        layers = [self]
        while (before := layers[-1].before) is not None:
            layers.append(before)
        x = layers[-1]._input(last=False)
        for kept, following in pairwise(reversed(layers)):
            following.made = x = kept._forward_again(x)

    def _input(self, *, last: bool) -> Tensor:
        assert self.x is not None
        return self.x.take(last=last)[0] if isinstance(self.x, Spilled) else self.x.detach()

    def _forward_again(self, x: Tensor) -> Tensor:
        """x -> y, both ``[1, n, W]``. The module is called: ZeRO-3's hooks gather its parameters, in an order that they learn."""

        def forward() -> Tensor:
            with torch.no_grad(), self.replay:
                return self.call.forward(x)

        # These hooks count the inputs with a gradient anew in each forward pass, and the layer's backward pass counts them down.
        with torch.enable_grad():
            y: Tensor = nn.Module.__call__(self.call.layer, _leaf(x, self.wants_dx), again=forward)
        return y.detach()


def _layer_before(layer: Any, x: Tensor, context: SequenceContext) -> _Kept | None:
    """The layer from which this one's input is made again; None: it keeps its input."""
    every, number, kept = context.config.layer_inputs_every, layer.self_attn.layer_idx, context.latest.get()
    if number % every == 0 or kept is None or kept.call.layer.self_attn.layer_idx + 1 != number:
        return None
    if x.data_ptr() != kept.output:
        raise SparseRingError(
            f"sparse_ring.layer_inputs_every = {every}: the input of layer {number} is not what layer {number - 1} returned, and "
            "the backward pass would make it again from there: remove the hook or code between the layers that changes it, or "
            "leave layer_inputs_every out"
        )
    return cast(_Kept, kept)


class _ChunkedLayer(torch.autograd.Function):
    """The parameters are inputs, so that their gradients go the way of all others; the layer is called with its own ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        call: _LayerCall,
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
        sums = _WeightGradients(ctx.trained)
        dx = ctx.call.of_backward().backward(x.detach(), grads[0], ctx.replay(), ctx.needs_input_grad[0], sums)
        return dx, None, None, None, *sums.pop()


@dataclass(frozen=True)
class _LayerCall:
    """A layer on a shard: what both passes compute.

    Attributes:
        rotary: cos, sin ``[1, n, D]``. context: for attention, of heads that are exchanged. chunks: ranges of local tokens.
        heads: exchanges them chunk by chunk. autocast_dtype: of the caller's autocast, None without.
    """

    layer: Any
    rotary: tuple[Tensor, Tensor]
    context: SequenceContext
    chunks: Sequence[slice]
    heads: ChunkExchange
    device: str
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(cls, layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], context: SequenceContext, chunk_tokens: int) -> _LayerCall:
        """A call as autocast is now; the backward pass runs outside of it."""
        device, n = x.device.type, x.shape[1]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        chunks = [slice(begin, min(begin + chunk_tokens, n)) for begin in range(0, n, chunk_tokens)]
        heads = ChunkExchange(context.axes, chunks, context.meter, layer.self_attn.layer_idx)
        return cls(layer, rotary, replace(context, heads_exchanged=True), chunks, heads, device, dtype)

    @property
    def _heads(self) -> int:
        heads: int = self.layer.self_attn.config.num_attention_heads
        return heads

    @property
    def _kv_heads(self) -> int:
        heads: int = self.layer.self_attn.config.num_key_value_heads
        return heads

    def of_backward(self) -> _LayerCall:
        """The same call in the backward pass."""
        return replace(self, heads=replace(self.heads, backward=True))

    def forward(self, x: Tensor) -> Tensor:
        """x -> y, both ``[1, n, W]``. Of the whole shard exist x, then q, k, v, then o instead of these, then y, too."""
        o, y = self._attend(*self._all_qkv(x)), x
        for tokens, o_c in zip(self.chunks, self._chunks_of(o), strict=True):
            y_c = self._after(x[:, tokens], o_c)
            if tokens.start == 0:
                y = y_c.new_empty(x.shape)
            y[:, tokens] = y_c
        return y

    def backward(
        self, x: Tensor, dy: Tensor, replay: AbstractContextManager[None], wants_dx: bool, sums: _WeightGradients
    ) -> Tensor | None:
        """dx ``[1, n, W]`` if it is wanted.

        Of the whole shard exist x and dy (which belongs to autograd) from first to last, dx from `_backward_after` on; q, k, v
        and o, then do, until attention's backward ends; dq, dk, dv from there on. So the most is, while attention works, x, dy,
        dx, q, k, v, o, do and what it makes itself; without k and v if these are in host memory, page by page.
        """
        dx = torch.empty_like(x) if wants_dx else None
        dqkv = self._backward_attention(x, dy, dx, replay, sums)
        self._backward_before(x, dqkv, dx, sums)
        return dx

    def _backward_attention(
        self, x: Tensor, dy: Tensor, dx: Tensor | None, replay: AbstractContextManager[None], sums: _WeightGradients
    ) -> tuple[Tensor, ...]:
        """dq ``[1, h, m, D]``, dk, dv ``[1, k, m, D]``; dx gets what goes past attention.

        If ranks share heads, dk and dv are in the accumulator's dtype.
        """
        qkv = [whole.requires_grad_() for whole in self._all_qkv(x)]
        of_shared: list[Tensor] | None = [] if self._kv_heads < self.heads.axes.ulysses_size else None
        with replay, torch.enable_grad():
            o = self._attend(*qkv, kv_gradients=of_shared)
        if self.context.page_blocks is not None:  # they are in host memory, and as leaves of the graph they are only asked for
            for whole in qkv[1:]:
                whole.untyped_storage().resize_(0)
        (do,) = self.heads.to_heads([do_c] for do_c in self._backward_after(x, o.detach(), dy, dx, sums))
        # Even if nobody wants what comes out: the replay has begun to gather columns, and ranks of a ring wait for each other.
        to_autograd = torch.autograd.grad(o, qkv if of_shared is None else qkv[:1], do.transpose(0, 1)[None])
        return (*to_autograd, *(of_shared or ()))

    def _backward_after(self, x: Tensor, o: Tensor, dy: Tensor, dx: Tensor | None, sums: _WeightGradients) -> Iterator[Tensor]:
        """do of one chunk after the other, ``[H, c, D]``."""
        for tokens, part in zip(self.chunks, self._chunks_of(o), strict=True):
            x_c, o_c = _leaf(x[:, tokens], dx is not None), _leaf(part, True)
            with torch.enable_grad():
                y_c = self._after(x_c, o_c)
            do_c, dx_c = sums.backward([y_c], [dy[:, tokens]], [o_c, x_c], self._parts_after())
            if dx is not None:
                dx[:, tokens] = dx_c
            yield do_c[0].transpose(0, 1)

    def _backward_before(self, x: Tensor, dqkv: tuple[Tensor, ...], dx: Tensor | None, sums: _WeightGradients) -> None:
        chunks_of = self.heads.to_tokens([whole[0] for whole in dqkv], (self._heads, self._kv_heads, self._kv_heads))
        for tokens, dqkv_c in zip(self.chunks, chunks_of, strict=True):
            x_c = _leaf(x[:, tokens], dx is not None)
            with torch.enable_grad():
                qkv_c = self._qkv(x_c, tokens)
            rounded = [part[None].to(of.dtype) for part, of in zip(dqkv_c, qkv_c, strict=True)]
            (dx_c,) = sums.backward(qkv_c, rounded, [x_c], self._parts_before())
            if dx is not None:
                dx[:, tokens] += dx_c

    def _all_qkv(self, x: Tensor) -> list[Tensor]:
        """q ``[1, h, m, D]``, k, v ``[1, k, m, D]``, without a graph."""
        with torch.no_grad():
            parts = ([part[0] for part in self._qkv(x[:, tokens], tokens)] for tokens in self.chunks)
            return [whole[None] for whole in self.heads.to_heads(parts)]

    def _chunks_of(self, o: Tensor) -> Iterator[Tensor]:
        """o ``[1, m, h, D]`` -> ``[1, c, H, D]`` for one chunk after the other."""
        return (part.transpose(0, 1)[None] for (part,) in self.heads.to_tokens([o[0].transpose(0, 1)], [self._heads]))

    def _qkv(self, x_c: Tensor, tokens: slice) -> list[Tensor]:
        """x_c ``[1, c, W]`` -> q ``[1, H, c, D]``, k, v ``[1, K, c, D]`` after RoPE, in the dtype that attention works in."""
        attention = self.layer.self_attn
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        with self._autocast():
            hidden = self.layer.input_layernorm(x_c)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (project(hidden).view(1, x_c.shape[1], -1, attention.head_dim) for project in projections)
            if hasattr(attention, "q_norm"):
                q, k = attention.q_norm(q), attention.k_norm(k)
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            q, k = rotate(q, k, *(table[:, tokens] for table in self.rotary))
        return [y if self.autocast_dtype is None else y.to(self.autocast_dtype) for y in (q, k, v)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, kv_gradients: list[Tensor] | None = None) -> Tensor:
        """o ``[1, m, h, D]``; ``kv_gradients``: of `sparse_ring_attention`."""
        attention = self.layer.self_attn
        number, scale = attention.layer_idx, attention.scaling
        with self._autocast():
            return sparse_ring_attention(q, k, v, self.context, layer=number, scale=scale, kv_gradients=kv_gradients)

    def _after(self, x_c: Tensor, o_c: Tensor) -> Tensor:
        """x_c ``[1, c, W]``, o_c ``[1, c, H, D]`` -> y ``[1, c, W]``."""
        layer = self.layer
        with self._autocast():
            hidden = x_c + layer.self_attn.o_proj(o_c.flatten(2))
            return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _parts_before(self) -> list[nn.Module]:
        attention = self.layer.self_attn
        parts = [self.layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj]
        return parts + [getattr(attention, name) for name in sorted(_ATTENTION_NORMS) if hasattr(attention, name)]

    def _parts_after(self) -> list[nn.Module]:
        return [self.layer.self_attn.o_proj, self.layer.post_attention_layernorm, self.layer.mlp]

    def _autocast(self) -> torch.autocast:
        # Uncached: converted weights of every layer, gathered ones too, would stay until the outermost autocast ends.
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.device, dtype=self.autocast_dtype, enabled=enabled, cache_enabled=False)


class _WeightGradients:
    """Gradients of the trained parameters, summed over chunks in the accumulator's dtype."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._trained = trained
        self._sums: dict[int, Tensor] = {}

    def backward(
        self, outputs: Iterable[Tensor], grads: Iterable[Tensor], inputs: Sequence[Tensor], parts: Iterable[nn.Module]
    ) -> list[Any]:
        """One chunk's backward pass: adds the gradients of the parts' parameters and returns those of ``inputs``.

        ``torch.autograd.grad`` and not ``backward``: no gradient reaches a parameter, no hook runs.
        """
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        parameters = {id(p): p for part in parts for p in part.parameters() if p.requires_grad}
        if not pairs:
            return [None] * len(inputs)
        ys, dys = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, [*wanted, *parameters.values()], dys, allow_unused=True)
        for key, gradient in zip(parameters, found[len(wanted) :], strict=True):
            if gradient is not None:
                self._add(key, gradient)
        of_inputs = iter(found)
        return [next(of_inputs) if x.requires_grad else None for x in inputs]

    def _add(self, key: int, gradient: Tensor) -> None:
        if key in self._sums:
            self._sums[key] += gradient
        else:
            self._sums[key] = gradient.to(accumulator_dtype(gradient.dtype), copy=True)

    def pop(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes; None for a parameter that was not used."""
        found = ((p, self._sums.pop(id(p), None)) for p in self._trained)
        return [None if total is None else total.to(p.dtype) for p, total in found]


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.detach().requires_grad_(requires_grad)
