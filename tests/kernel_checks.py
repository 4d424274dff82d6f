"""What kernel tests share, on any device: tensors and indices of a case, one pass over it, and its errors against float64."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from ds_sparse_ring.batch import Sequence, shard_batch
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash
from ds_sparse_ring.kernels import ColumnKV, Kernel, Work
from ds_sparse_ring.kernels.contract import accumulator_dtype, empty_result
from ds_sparse_ring.layout import BLOCK, BlockMap
from tests.unit.reference import (
    dense_mask,
    global_qkv,
    long_block_lists,
    masked_attention,
    packed_batch,
    random_block_lists,
    random_index,
)

SHAPES = [
    # document lengths, query heads, KV heads, heads per pattern, head size
    pytest.param([1], 1, 1, 1, 16, id="one-token"),
    pytest.param([63], 2, 1, 1, 32, id="less-than-a-block"),
    pytest.param([65], 2, 2, 1, 32, id="a-block-and-a-token"),
    pytest.param([333], 8, 1, 1, 64, id="gqa-8-to-1"),
    pytest.param([333], 8, 1, 4, 64, id="gqa-8-to-1-shared-patterns"),
    pytest.param([700], 4, 2, 2, 32, id="pattern-per-kv-head"),
    pytest.param([130, 1, 257, 64], 4, 4, 1, 32, id="documents"),
    pytest.param([300], 3, 1, 1, 40, id="odd-heads-and-head-size"),
]


def make_gradient(q: torch.Tensor) -> torch.Tensor:
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(q)


def make_sequence(lengths: list[int], *, segment_tokens: int = 128) -> Sequence:
    batch = packed_batch(lengths)
    return shard_batch(batch, kind="striped", ranks=1, rank=0, segment_tokens=segment_tokens)["sparse_ring"]


def make_index(kind: str, sequence: Sequence, patterns: int, shared: int) -> Index:
    if kind == "full":
        return FullIndex(sequence.segments, patterns, shared)
    if kind == "block-lists":
        return random_block_lists(sequence, patterns, shared, share=0.4)
    if kind == "long-lists":
        return long_block_lists(sequence, patterns, shared)
    return random_index(sequence, patterns, shared, columns=70, diagonals=3)


def on_device(index: Index, device: torch.device) -> Index:
    """The same index with its tensors on a device."""
    tensors = {f.name: getattr(index, f.name) for f in fields(index) if f.init}  # type: ignore[arg-type]
    return type(index)(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in tensors.items()})


def column_kv(k: Tensor, v: Tensor, index: Index, heads: int) -> ColumnKV | None:
    if not isinstance(index, VerticalSlash):
        return None
    kv_head = index.column_patterns() * index.heads_per_pattern // (heads // k.shape[0])
    return ColumnKV(k[kv_head, index.column_values], v[kv_head, index.column_values])


def run(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, index: Index, scale: float, *, overwrite: bool = False
) -> tuple[Tensor, ...]:
    """Forward and backward in one call over the whole sequence; column gradients added to their keys.

    With ``overwrite`` the outputs are filled with NaN before, and o and dq have the input's dtype.
    """
    acc, work = accumulator_dtype(q.dtype), Work(BlockMap(1, 0), BlockMap(1, 0), index, scale)
    columns = column_kv(k, v, index, q.shape[0])
    o, lse = empty_result(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=q.device) for x in (q, k, v))
    if overwrite:
        o, dq = (torch.full_like(q, float("nan")) for _ in range(2))
        lse.fill_(float("nan"))
    kernel.forward(q, k, v, work, o, lse, columns, overwrite=overwrite)
    d_columns = None if columns is None else ColumnKV(*(torch.zeros_like(x, dtype=acc) for x in (columns.k, columns.v)))
    delta = kernel.delta(do, o)
    kernel.backward(q, k, v, do, lse, delta, work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
    if isinstance(index, VerticalSlash) and d_columns is not None:
        kv_head = index.column_patterns() * index.heads_per_pattern // (q.shape[0] // k.shape[0])
        place = kv_head * dk.shape[1] + index.column_values
        dkv = torch.stack([dk, dv])
        kernel.add_rows(dkv.flatten(1, 2), place, torch.stack([d_columns.k, d_columns.v]))
        dk, dv = dkv
    return o, lse, dq, dk, dv


def dense_reference(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv of dense attention under an element-wise mask, computed by PyTorch in ``dtype``."""
    q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v))
    o = masked_attention(q, k, v, visible, scale)
    o.backward(do.to(dtype))
    return o.detach(), q.grad, k.grad, v.grad  # type: ignore[return-value]


def check_errors(
    kernel: Kernel,
    kind: str,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    shared: int,
    dtype: torch.dtype,
    head_size: int,
    *,
    device: str = "cpu",
    overwrite: bool = False,
    segment_tokens: int = 128,
) -> None:
    """Every result errs at most twice as much as PyTorch's in the same dtype."""
    sequence = make_sequence(lengths, segment_tokens=segment_tokens)
    index = make_index(kind, sequence, heads // shared, shared)
    visible = dense_mask(index, heads, sequence.layout.blocks * BLOCK).to(device)
    q, k, v = (x.to(device, dtype) for x in global_qkv(sequence, heads, kv_heads, head_size))
    do, scale = make_gradient(q), head_size**-0.5
    exact = dense_reference(q, k, v, do, visible, scale, torch.float64)
    in_dtype = dense_reference(q, k, v, do, visible, scale, dtype)
    o, _, *grads = run(kernel, q, k, v, do, on_device(index, q.device), scale, overwrite=overwrite)
    for got, same, true in zip([o, *grads], in_dtype, exact, strict=True):
        error, in_same = got.double() - true, same.double() - true
        assert error.square().mean() <= 4 * in_same.square().mean(), "root mean square error above twice PyTorch's"
        # the largest of thousands of rounding errors is noise: a wider bound, and never below the last place of an entry
        assert error.abs().max() <= max(4 * in_same.abs().max(), torch.finfo(dtype).eps * true.abs().max())


def check_hops(
    kernel: Kernel, kind: str, dtype: torch.dtype, *, tolerance: float, device: str = "cpu", head_size: int = 32
) -> None:
    """Ranks of a striped ring, each other's keys in two chunks of signed offsets: forward and backward equal one call's."""
    sequence, ranks, heads = make_sequence([300, 500, 100]), 3, 2  # 15 blocks
    index = on_device(make_index(kind, sequence, heads, 1), torch.device(device))
    q, k, v = (x.to(device, dtype) for x in global_qkv(sequence, heads, 1, head_size))
    do, scale = make_gradient(q), head_size**-0.5
    whole = run(kernel, q, k, v, do, index, scale)
    columns = column_kv(k, v, index, heads)
    o, lse = empty_result(q)
    gradients = [torch.zeros_like(o), *(torch.zeros(x.shape, dtype=o.dtype, device=x.device) for x in (k, v))]
    d_columns = None if columns is None else ColumnKV(*(torch.zeros_like(x, dtype=o.dtype) for x in (columns.k, columns.v)))

    def part(x: Tensor, rank: int, chunk: slice) -> Tensor:
        return x.unflatten(1, (-1, BLOCK))[:, rank::ranks][:, chunk].flatten(1, 2)

    def put(x: Tensor, rank: int, chunk: slice, value: Tensor) -> None:
        x.unflatten(1, (-1, BLOCK))[:, rank::ranks][:, chunk] = value.unflatten(1, (-1, BLOCK))

    everything, cut = slice(None), 2
    pieces = [(r, s, chunk) for r in range(ranks) for s in range(ranks) for chunk in (slice(cut, None), slice(0, cut))]
    for rank, source, chunk in pieces:
        work = Work(BlockMap(ranks, rank), BlockMap(ranks, source + ranks * (chunk.start or 0)), index, scale)
        piece_o, piece_lse = part(o, rank, everything), part(lse, rank, everything)
        with_columns = columns if source == rank and chunk.start == 0 else None
        kernel.forward(
            part(q, rank, everything), part(k, source, chunk), part(v, source, chunk), work, piece_o, piece_lse, with_columns
        )
        put(o, rank, everything, piece_o)
        put(lse, rank, everything, piece_lse)
    delta = kernel.delta(do, o)
    for rank, source, chunk in pieces:
        work = Work(BlockMap(ranks, rank), BlockMap(ranks, source + ranks * (chunk.start or 0)), index, scale)
        dq, dk, dv = part(gradients[0], rank, everything), part(gradients[1], source, chunk), part(gradients[2], source, chunk)
        piece_do, piece_lse, piece_delta = (part(x, rank, everything) for x in (do, lse, delta))
        own = source == rank and chunk.start == 0
        kernel.backward(
            part(q, rank, everything), part(k, source, chunk), part(v, source, chunk), piece_do, piece_lse, piece_delta,
            work, dq, dk, dv, columns if own else None, d_columns if own else None,
        )  # fmt: skip
        put(gradients[0], rank, everything, dq)
        put(gradients[1], source, chunk, dk)
        put(gradients[2], source, chunk, dv)
    if isinstance(index, VerticalSlash) and d_columns is not None:
        place = index.column_patterns() * index.heads_per_pattern // heads * k.shape[1] + index.column_values
        dkv = torch.stack(gradients[1:])
        kernel.add_rows(dkv.flatten(1, 2), place, torch.stack([d_columns.k, d_columns.v]))
        gradients[1:] = dkv.unbind()
    for got, want in zip([o, lse, *gradients], whole, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
