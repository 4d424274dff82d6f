"""For models written for DeepSpeed-Ulysses: our ring inside DeepSpeed's `DistributedAttention`, and a class with its interface.

``deepspeed.sequence.layer.DistributedAttention`` (arXiv 2309.14509) exchanges heads for tokens within a group of ranks, attends
by a module that it was given, and exchanges back. That module can be a `RingLocalAttention`, which attends over the ring that
the groups form:

    DistributedAttention(RingLocalAttention(ring, layer=0), ring.axes.ulysses_group)

This works with either class: DeepSpeed's, or the one of this file, which knows rotary embedding on any ring and fewer KV heads
than ranks. DeepSpeed's must be given that very group: the ranks of a group are neighbours.

Both need the same batches, and the same configuration says which: those of `SparseRing.sequence_batch`, with ``"ulysses_degree"``
ranks in a group. The shards of a group, one after the other as DeepSpeed concatenates them, are then one shard of the layout over
the ring; with one group for all ranks they are contiguous shards of the sequence. A batch is one stream of documents ``[1, n]``.

Attention learns what it works on from the batch's ``sparse_ring`` entry: given with each call, or set once per micro-batch as
``ring.sequence``.

Shapes: n tokens of this rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.runtime import SparseRing


class RingLocalAttention(nn.Module):
    """Causal sparse attention over the ring, as the local attention of a `DistributedAttention`.

    Args:
        layer: number under which the ring's meter reports this layer.
        softmax_scale: multiplies q.k before the softmax; by default ``D ** -0.5``.
    """

    def __init__(self, ring: SparseRing, layer: int, softmax_scale: float | None = None) -> None:
        super().__init__()
        self.ring = ring
        self.layer = layer
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, sparse_ring: Sequence | None = None, **kwargs: Any
    ) -> Tensor:
        """Attend after an exchange within the ring's Ulysses group; what DeepSpeed's class calls. Collective over the ring.

        Args:
            query: this rank's share of the heads for all tokens of its group, ``[tokens, 1, H', D]`` or ``[1, tokens, H', D]``;
                key, value alike with K' heads. Shares may be unequal over the group.
            sparse_ring: the batch's entry of that name; by default ``ring.sequence``.

        Returns:
            The shape and dtype of ``query``.

        Raises:
            SparseRingError: masks or other arguments, or tensors that are not of the sequence.
        """
        _refuse_others(args, kwargs)
        context = self.ring.bind(self.sequence(sparse_ring), heads_exchanged=True)
        tokens = context.layout.local_tokens
        # tokens come in blocks: there is never one
        batch_dim = next((dim for dim in (1, 0) if query.dim() == 4 and query.shape[dim] == 1), None)
        if batch_dim is None or query.shape[1 - batch_dim] != tokens:
            size = self.ring.axes.ulysses_size
            raise SparseRingError(
                f"attention: queries {tuple(query.shape)} are not [{tokens}, 1, heads, head size] or [1, {tokens}, heads, head "
                f"size], the tokens of {size} ranks of this sequence: make the batch with SparseRing.sequence_batch (its rows "
                "become documents of one stream), and give DistributedAttention the group ring.axes.ulysses_group, whose size is "
                f'"ulysses_degree" ({size} now)'
            )
        return self.attend(query, key, value, batch_dim, context)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, batch_dim: int, context: SequenceContext) -> Tensor:
        """Attention of tensors in one of DeepSpeed's two layouts; the context says whether their heads are exchanged."""
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        q, k, v = (x.transpose(1, 2) if batch_dim == 0 else x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = sparse_ring_attention(q, k, v, context, layer=self.layer, scale=scale)
        return out if batch_dim == 0 else out.transpose(0, 1)

    def sequence(self, sparse_ring: Sequence | None) -> Sequence:
        """The batch entry that was given, or the one set on the ring.

        Raises:
            SparseRingError: there is none, or it is something else.
        """
        sequence = self.ring.sequence if sparse_ring is None else sparse_ring
        if not isinstance(sequence, Sequence):
            raise SparseRingError(
                f"attention: which sequence is this? sparse_ring is {_named(sequence)}: pass sparse_ring=batch['sparse_ring'] of "
                "the batch that SparseRing.sequence_batch made, or set ring.sequence to it before the forward pass"
            )
        return sequence


class DistributedAttention(nn.Module):
    """Our exchange of heads and our ring, with the constructor and the call of DeepSpeed's class of this name.

    Args:
        local_attention: a `RingLocalAttention`. (Any other module would know nothing of the ring.)
        sequence_process_group: None, or the ranks that share a sequence or those of a Ulysses group, as the ring has them.
        scatter_idx: 2, the heads' dimension. gather_idx: the tokens' dimension, 0 or 1; each call says it by ``batch_dim_idx``.
        sp_stream: None; transfers are overlapped by the ring's own plan.
        num_kv_heads: KV heads of the model, only to be checked. They may be fewer than the ranks.

    Raises:
        SparseRingError: anything else.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: dist.ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(local_attention, RingLocalAttention):
            raise SparseRingError(
                f"DistributedAttention: local_attention is {_named(local_attention)}, which knows no ring: pass "
                "RingLocalAttention(ring, layer=number)"
            )
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise SparseRingError(
                f"DistributedAttention: scatter_idx = {scatter_idx}, gather_idx = {gather_idx}: heads (2) are scattered and "
                "tokens (0 or 1) gathered: [tokens, batch, heads, head size] or [batch, tokens, heads, head size]"
            )
        if sp_stream is not None:
            raise SparseRingError("DistributedAttention: leave sp_stream out: the ring overlaps its transfers itself")
        _check_group(sequence_process_group, local_attention.ring)
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        sparse_ring: Sequence | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend. Collective over the ranks that share a sequence.

        Args:
            query: ``[n, 1, H, D]`` (batch_dim_idx 1) or ``[1, n, H, D]`` (0); key, value: alike with K heads, which divide H.
            rotary_pos_emb: cos and sin by position, ``[positions, 1, 1, r]`` each, for the first r of D (r even, halves rotated
                as in Megatron-DeepSpeed and Llama). Rows are taken by the tokens' places in their documents. None: done before.
            sparse_ring: the batch's entry of that name; by default ``ring.sequence``.

        Returns:
            The shape and dtype of ``query``.

        Raises:
            SparseRingError: a batch that is no stream of documents, masks or other arguments, or tensors that are not of the
                sequence.
        """
        _check_batch_dim(batch_dim_idx, query)
        _refuse_others(args, kwargs)
        if self.num_kv_heads is not None and key.shape[2] != self.num_kv_heads:
            raise SparseRingError(
                f"DistributedAttention: made for num_kv_heads = {self.num_kv_heads}, but the keys are {tuple(key.shape)}"
            )
        local = self.local_attn
        sequence = local.sequence(sparse_ring)
        if rotary_pos_emb is not None:
            query, key = _rotated(query, key, batch_dim_idx, rotary_pos_emb, local.ring, sequence)
        return local.attend(query, key, value, batch_dim_idx, local.ring.bind(sequence))


def _rotated(
    query: Tensor, key: Tensor, batch_dim: int, rotary: tuple[Tensor, Tensor], ring: SparseRing, sequence: Sequence
) -> tuple[Tensor, Tensor]:
    """Queries and keys under rotary embedding (RoFormer, arXiv 2104.09864), each token at its place in its document."""
    cos, sin = _checked_tables(rotary, query.shape[3], sequence)
    places = ring.positions(sequence, query.device).clamp(max=cos.shape[0] - 1)  # padding may count on past the table
    shape = (1, -1, 1, cos.shape[3]) if batch_dim == 0 else (-1, 1, 1, cos.shape[3])
    cos, sin = (table.flatten(1).to(query.device).index_select(0, places).view(shape) for table in (cos, sin))
    rotated = []
    for x in (query, key):
        turned, rest = x[..., : cos.shape[3]], x[..., cos.shape[3] :]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        rotated.append(torch.cat([turned.to(x.dtype), rest], -1))
    return rotated[0], rotated[1]


def _checked_tables(rotary: Any, head_size: int, sequence: Sequence) -> tuple[Tensor, Tensor]:
    tables = rotary if isinstance(rotary, tuple | list) else ()
    longest = sequence.longest_document
    shapes = [tuple(table.shape) for table in tables if isinstance(table, Tensor)]
    fits = len(shapes) == len(tables) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 4 and shapes[0][1:3] == (1, 1)
    if not fits or shapes[0][0] < longest or shapes[0][3] > head_size or shapes[0][3] % 2:
        raise SparseRingError(
            f"DistributedAttention: rotary_pos_emb is {shapes or _named(rotary)}; it must be (cos, sin), each [positions, 1, 1, "
            f"r] with at least {longest} positions (the longest document) and an even r up to the head size {head_size}"
        )
    return tables[0], tables[1]


def _check_batch_dim(batch_dim: Any, query: Tensor) -> None:
    if not isinstance(batch_dim, int) or batch_dim not in (0, 1):
        raise SparseRingError(
            f"DistributedAttention: batch_dim_idx is {_named(batch_dim)}; it must be 0 for [batch, tokens, heads, head size] or "
            "1 for [tokens, batch, heads, head size]. (A mask is not taken: attention is causal within each document)"
        )
    if query.dim() != 4 or query.shape[batch_dim] != 1:
        raise SparseRingError(
            f"DistributedAttention: queries {tuple(query.shape)} with batch_dim_idx = {batch_dim}: a batch of more than one row "
            "is one stream of documents here: give the whole batch [B, S] to SparseRing.sequence_batch and the model the [1, n] "
            "that it returns"
        )


def _refuse_others(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Masks, dropout and whatever else a local attention may be given would be lost."""
    given = [_named(x) for x in args if x is not None] + [key for key, x in kwargs.items() if x is not None]
    if given:
        raise SparseRingError(
            f"attention takes no further arguments, but got {', '.join(given)}: it is causal within each document, without "
            "dropout or bias. Give padding (attention_mask) and packed documents (position_ids) to SparseRing.sequence_batch"
        )


def _check_group(group: dist.ProcessGroup | None, ring: SparseRing) -> None:
    if group is None:
        return
    axes, given = ring.axes, sorted(dist.get_process_group_ranks(group))
    first, own = axes.rank - axes.sequence_rank, axes.rank - axes.ulysses_rank
    sequence, ulysses = list(range(first, first + axes.sequence_size)), list(range(own, own + axes.ulysses_size))
    if given not in (sequence, ulysses):
        raise SparseRingError(
            f"DistributedAttention: sequence_process_group has the ranks {given}; this ring's sequence is on {sequence}, its "
            f'Ulysses group on {ulysses}: pass None, or set "degree" and "ulysses_degree" to match'
        )


def _named(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
