"""What a decoder layer on a shard computes, forward and backward, a chunk of tokens at a time (see `chunked_layers`).

Shapes: n local tokens, c of a chunk, W width, H query heads, K key/value heads, D head size. h, k, m: heads and tokens that
attention works on: H, K, n without a Ulysses group, H / u, K / u (at least 1), u n in one of u ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.ulysses import ChunkExchange

ATTENTION_NORMS = frozenset({"q_norm", "k_norm"})


@dataclass(frozen=True)
class LayerCall:
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
    def of(cls, layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], context: SequenceContext, chunk_tokens: int) -> LayerCall:
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

    def of_backward(self) -> LayerCall:
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
        self, x: Tensor, dy: Tensor, replay: AbstractContextManager[None], wants_dx: bool, sums: WeightGradients
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
        self, x: Tensor, dy: Tensor, dx: Tensor | None, replay: AbstractContextManager[None], sums: WeightGradients
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

    def _backward_after(self, x: Tensor, o: Tensor, dy: Tensor, dx: Tensor | None, sums: WeightGradients) -> Iterator[Tensor]:
        """do of one chunk after the other, ``[H, c, D]``."""
        for tokens, part in zip(self.chunks, self._chunks_of(o), strict=True):
            x_c, o_c = leaf(x[:, tokens], dx is not None), leaf(part, True)
            with torch.enable_grad():
                y_c = self._after(x_c, o_c)
            do_c, dx_c = sums.backward([y_c], [dy[:, tokens]], [o_c, x_c], self._parts_after())
            if dx is not None:
                dx[:, tokens] = dx_c
            yield do_c[0].transpose(0, 1)

    def _backward_before(self, x: Tensor, dqkv: tuple[Tensor, ...], dx: Tensor | None, sums: WeightGradients) -> None:
        chunks_of = self.heads.to_tokens([whole[0] for whole in dqkv], (self._heads, self._kv_heads, self._kv_heads))
        for tokens, dqkv_c in zip(self.chunks, chunks_of, strict=True):
            x_c = leaf(x[:, tokens], dx is not None)
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
        return parts + [getattr(attention, name) for name in sorted(ATTENTION_NORMS) if hasattr(attention, name)]

    def _parts_after(self) -> list[nn.Module]:
        return [self.layer.self_attn.o_proj, self.layer.post_attention_layernorm, self.layer.mlp]

    def _autocast(self) -> torch.autocast:
        # Uncached: converted weights of every layer, gathered ones too, would stay until the outermost autocast ends.
        enabled = self.autocast_dtype is not None
        return torch.autocast(self.device, dtype=self.autocast_dtype, enabled=enabled, cache_enabled=False)


class WeightGradients:
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


def leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.detach().requires_grad_(requires_grad)
