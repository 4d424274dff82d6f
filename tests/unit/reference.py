"""Plain references that the tests compare with: loops over tokens, dense matrices, nothing shared with the code under test."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import BlockLists, Index, VerticalSlash, mask, row_of_entries
from ds_sparse_ring.kernels.dense import DenseAttention
from ds_sparse_ring.runtime import SparseRing
from tests.common import rank_device


def dense_mask(index: Index, heads: int, tokens: int) -> Tensor:
    """``[heads, tokens, tokens]`` from the index's definition."""
    device = index.diagonal_values.device if isinstance(index, VerticalSlash) else rank_device()
    every = torch.arange(tokens, device=device)
    return torch.stack([mask(index, head, every, every) for head in range(heads)])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Dense attention ``[H, n, D]`` under an element-wise mask; rows without a key give 0."""
    group = q.shape[0] // k.shape[0]
    scores = (q @ k.repeat_interleave(group, 0).mT) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    probabilities = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), torch.zeros_like(scores))
    return probabilities @ v.repeat_interleave(group, 0)


def random_index(
    sequence: Sequence, patterns: int, heads_per_pattern: int, *, columns: int, diagonals: int, seed: int = 0
) -> VerticalSlash:
    """Diagonal 0 plus random diagonals and columns, with very different numbers per (segment, pattern)."""
    generator = torch.Generator().manual_seed(seed)
    diagonal_pairs, column_pairs = [], [torch.empty(0, 2, dtype=torch.int64)]
    for s, segment in enumerate(sequence.segments):
        for p in range(patterns):
            row = s * patterns + p
            reach = segment.end - segment.document_begin
            some = torch.randint(0, reach, (p * diagonals // max(1, patterns - 1),), generator=generator)
            values = torch.cat([torch.zeros(1, dtype=torch.int64), some])
            diagonal_pairs.append(torch.stack([torch.full_like(values, row), values], 1))
            if not segment.is_padding:
                low, high = segment.document_begin * 64, segment.valid_end
                values = torch.randint(low, high, ((patterns - 1 - p) * columns,), generator=generator)
                column_pairs.append(torch.stack([torch.full_like(values, row), values], 1))
    return VerticalSlash.from_keys(
        sequence.segments, patterns, heads_per_pattern, torch.cat(diagonal_pairs), torch.cat(column_pairs)
    )


def random_block_lists(sequence: Sequence, patterns: int, heads_per_pattern: int, *, share: float, seed: int = 0) -> BlockLists:
    """A random share of the earlier blocks of each query block's document, another one for each pattern."""
    generator = torch.Generator().manual_seed(seed)
    blocks = sequence.layout.blocks
    pairs = [torch.empty(0, 2, dtype=torch.int64)]
    for segment in sequence.segments:
        for pattern in range(patterns):
            for q_block in range(segment.begin, segment.end):
                earlier = torch.arange(segment.document_begin, q_block)
                chosen = earlier[torch.rand(earlier.shape, generator=generator) < share]
                pairs.append(torch.stack([torch.full_like(chosen, pattern * blocks + q_block), chosen], 1))
    return BlockLists.from_keys(sequence.segments, patterns, heads_per_pattern, torch.cat(pairs))


def long_block_lists(sequence: Sequence, patterns: int, heads_per_pattern: int) -> BlockLists:
    """Most of the earlier blocks for the last two query blocks, and the first two key blocks for most others."""
    lists = random_block_lists(sequence, patterns, heads_per_pattern, share=0.8)
    blocks, row = sequence.layout.blocks, row_of_entries(lists.block_ptr, lists.block_values)
    kept = (row % blocks >= blocks - 2) | (lists.block_values < 2)
    pairs = torch.stack([row, lists.block_values], 1)[kept]
    return BlockLists.from_keys(sequence.segments, patterns, heads_per_pattern, pairs)


def packed_batch(lengths: list[int], *, vocabulary: int = 97, seed: int = 0) -> dict[str, Tensor]:
    """One row of documents told apart by their positions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


def bound(lengths: list[int], **config: object) -> tuple[SparseRing, Sequence, SequenceContext]:
    """A ring of this process group, and a sequence of documents of ``lengths`` bound to it.

    Probes choose if nothing else is said: columns and diagonals that differ, also on short rows.
    """
    ring = SparseRing(SparseRingConfig(**{"selector": {"kind": "price"}, **config}))
    sequence = ring.sequence_batch(packed_batch(lengths))["sparse_ring"]
    return ring, sequence, ring.bind(sequence)


def global_qkv(
    sequence: Sequence, heads: int, kv_heads: int, head_size: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries ``[heads, N, head_size]``, keys and values over the whole aligned stream; the same on every rank, on the
    rank's device."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sequence.layout.blocks * 64
    shapes = [(heads, tokens, head_size), (kv_heads, tokens, head_size), (kv_heads, tokens, head_size)]
    q, k, v = [torch.randn(shape, generator=generator, dtype=torch.float64).to(rank_device(), dtype) for shape in shapes]
    return q, k, v


class NoWaiting(TorchDispatchMode):
    """Refuses operators that make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount"), name
        if name in ("index", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), "boolean indexing waits"
        return func(*args, **(kwargs or {}))


def check_dense(
    dense: DenseAttention,
    device: torch.device,
    dtype: torch.dtype,
    rows: list[int] | None,
    total: int,
    heads: int,
    kv_heads: int,
    head_size: int,
) -> None:
    """Output, log-sum-exp and gradients err at most twice as much as PyTorch's plain attention in the same dtype."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(count, total, head_size) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    scale, used = head_size**-0.5, total if rows is None else sum(rows)
    document = torch.full((total,), -1, device=device)
    document[:used] = torch.arange(len(rows or [0]), device=device).repeat_interleave(
        torch.tensor(rows or [total], device=device)
    )
    visible = (document[:, None] == document[None]) & (document[:, None] >= 0)
    visible &= torch.ones(total, total, dtype=torch.bool, device=device).tril()
    o, lse = dense.forward(q, k, v, scale=scale, rows=rows)
    gradients = dense.backward(do, q, k, v, o, lse, scale=scale, rows=rows)
    assert o.dtype == dtype and lse.shape == q.shape[:2]
    assert (o[:, used:] == 0).all() and torch.isneginf(lse[:, used:]).all()
    exact = _with_gradients(q, k, v, do, visible, scale, torch.float64)
    same = _with_gradients(q, k, v, do, visible, scale, dtype)
    scores = (q.double() @ k.double().repeat_interleave(heads // kv_heads, 0).mT) * scale
    true_lse = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)[:, :used]
    assert (lse[:, :used] - true_lse).abs().max() <= (1e-11 if dtype == torch.float64 else 1e-4), "natural logarithm"
    for got, single, true in zip([o, *gradients], same, exact, strict=True):
        error, allowed = got.double() - true, single.double() - true
        floor = 1e-24 if dtype == torch.float64 else 0.0  # the same arithmetic as the reference's, in another order
        assert error.square().mean() <= 4 * allowed.square().mean() + floor, "root mean square error above twice PyTorch's"


def _with_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    scores = ((inputs[0] @ inputs[1].repeat_interleave(q.shape[0] // k.shape[0], 0).mT) * scale).masked_fill(
        ~visible, float("-inf")
    )
    # rows without a key: the mask after the softmax keeps NaN out of the gradients
    probabilities = scores.masked_fill(~visible.any(-1, keepdim=True), 0).softmax(-1).masked_fill(~visible, 0)
    o = probabilities @ inputs[2].repeat_interleave(q.shape[0] // k.shape[0], 0)
    return (o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype)))
