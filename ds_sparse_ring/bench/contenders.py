"""Everything that ``bench kernel`` times on one problem: our backends, dense attention, and other libraries' sparse attention.

Each contender holds one problem and runs its forward and backward pass on it, as often as asked. What it cannot do it says
when it is made.

Shapes: H query heads, K key/value heads, S tokens of one document, D head size, n tiles a side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ds_sparse_ring.bench.counts import column_bitmap, diagonal_bitmap, tile_maps, tile_pairs
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, mask
from ds_sparse_ring.kernels import ColumnKV, Kernel, Work
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.kernels.dense import DenseAttention, DenseCase
from ds_sparse_ring.kernels.dense_backends import FlashAttention4
from ds_sparse_ring.layout import BLOCK, BlockMap

MAX_TILES = 1 << 29
"""Most entries of a map of tiles, heads * n * n: lists of tiles take a dozen times that many bytes while they are made."""


@dataclass(frozen=True)
class Problem:
    """One layer's tensors and its index, all on one device; ``host_index``: the same on the CPU, to count in.

    q, do: ``[H, S, D]``; k, v: ``[K, S, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    index: VerticalSlash
    host_index: VerticalSlash
    scale: float

    @classmethod
    def random(cls, index: VerticalSlash, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Problem:
        """Normal random tensors from a fixed seed for an index on the CPU."""
        generator = torch.Generator(device).manual_seed(0)
        heads, tokens = index.patterns * index.heads_per_pattern, index.segments[-1].end * BLOCK
        shapes = [(count, tokens, head_size) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, do = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
        names = ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values")
        moved = replace(index, **{name: getattr(index, name).to(device) for name in names})
        return cls(q, k, v, do, moved, index, head_size**-0.5)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[0]


class Contender(Protocol):
    """One implementation on one problem."""

    @property
    def name(self) -> str:
        """What the tables call it."""

    @property
    def executed_pairs(self) -> float | None:
        """(query, key) pairs in the tiles that it works on; None where the index does not tell."""

    def forward(self) -> Tensor:
        """o ``[H, S, D]``."""

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; after `forward`."""

    def apart(self) -> dict[str, Callable[[], Any]]:
        """Work that belongs to the passes and is timed apart from them, by name."""

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both passes with everything that belongs to them: o, dq, dk, dv."""

    def visible(self, head: int) -> Tensor:
        """The element-wise mask that it computes, bool ``[S, S]``."""


class Ours:
    """A backend of this package, called as on one rank: results are written once; columns are gathered before."""

    def __init__(self, name: str, kernel: Kernel, problem: Problem) -> None:
        self.name, self.kernel, self.problem = name, kernel, problem
        p = problem
        acc = accumulator_dtype(p.q.dtype)
        # written once, as ring_forward and ring_backward have it on one rank
        self.o, dq = torch.empty_like(p.q), torch.empty_like(p.q)
        self.work = Work(BlockMap(1, 0), BlockMap(1, 0), p.index, p.scale)
        self.executed_pairs = tile_pairs(p.host_index)
        self.lse = torch.empty(p.q.shape[:2], dtype=acc, device=p.q.device)
        self.dkv = torch.empty(2, *p.k.shape, dtype=acc, device=p.k.device)
        self.gradients = [dq, self.dkv[0], self.dkv[1]]
        self.column_place = p.index.column_kv_heads(p.k.shape[0]) * p.k.shape[1] + p.index.column_values
        self.columns = self.gather()
        self.d_column_rows = torch.empty(2, *self.columns.k.shape, dtype=acc, device=p.k.device)
        self.d_columns = ColumnKV(self.d_column_rows[0], self.d_column_rows[1])
        self.delta = torch.empty_like(self.lse)

    def gather(self) -> ColumnKV:
        """Keys and values of the columns, as a ring gathers them once a layer."""
        return ColumnKV(*(x.flatten(0, 1)[self.column_place] for x in (self.problem.k, self.problem.v)))

    def forward(self) -> Tensor:
        p = self.problem
        self.kernel.forward(p.q, p.k, p.v, self.work, self.o, self.lse, self._given(self.columns), overwrite=True)
        return self.o

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        p = self.problem
        dq, dk, dv = self.gradients
        for x in (self.dkv, self.d_column_rows):  # accumulators start empty: that counts as part of the pass
            x.zero_()
        self.kernel.backward(
            p.q, p.k, p.v, p.do, self.lse, self.delta, self.work, dq, dk, dv,
            self._given(self.columns), self._given(self.d_columns), overwrite=True,
        )  # fmt: skip
        return dq, dk, dv

    def apart(self) -> dict[str, Callable[[], Any]]:
        return {"gather columns": self.gather, "row sums of do * o": self.row_sums, "return columns": self.return_columns}

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        o = self.forward()
        self.row_sums()
        dq, dk, dv = self.backward()
        self.return_columns()
        return o, dq, dk, dv

    def row_sums(self) -> None:
        """delta = row sums of do * o, which the backward pass is given."""
        self.delta = self.kernel.delta(self.problem.do, self.o)

    def return_columns(self) -> None:
        """Add the columns' gradients where their keys and values live."""
        self.kernel.add_rows(self.dkv.flatten(1, 2), self.column_place, self.d_column_rows)

    def visible(self, head: int) -> Tensor:
        return index_mask(self.problem, head)

    def _given(self, columns: ColumnKV) -> ColumnKV | None:
        return columns if self.column_place.numel() else None


class Dense:
    """Dense causal attention by the best library that is installed."""

    executed_pairs = None

    def __init__(self, attention: DenseAttention, problem: Problem) -> None:
        self.name, self.attention, self.problem = attention.name, attention, problem
        self.o, self.lse = problem.q, problem.q

    def forward(self) -> Tensor:
        p = self.problem
        self.o, self.lse = self.attention.forward(p.q, p.k, p.v, scale=p.scale)
        return self.o

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        p = self.problem
        return self.attention.backward(p.do, p.q, p.k, p.v, self.o, self.lse, scale=p.scale)

    def apart(self) -> dict[str, Callable[[], Any]]:
        return {}

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.forward(), *self.backward()

    def visible(self, head: int) -> Tensor:
        return _triangle(self.problem)


class _Autograd:
    """A library with an autograd function: its graph is kept, so that the backward pass can run again."""

    name: str
    problem: Problem
    inputs: list[Tensor]
    do: Tensor
    o: Tensor

    def attend(self) -> Tensor:
        """o in the library's own layout, differentiable with respect to ``inputs``."""
        raise NotImplementedError

    def heads_first(self, x: Tensor) -> Tensor:
        """``[heads, S, D]`` from the library's layout."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        with torch.enable_grad():
            self.o = self.attend()
        return self.heads_first(self.o.detach())

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(self.o, self.inputs, self.do, retain_graph=True)
        return self.heads_first(dq), self.heads_first(dk), self.heads_first(dv)

    def apart(self) -> dict[str, Callable[[], Any]]:
        return {}

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.forward(), *self.backward()


class Flex(_Autograd):
    """FlexAttention: tiles of 128 tokens from a `BlockMask`, columns and the triangle by its ``mask_mod``.

    Its backward pass has no smaller tiles on Hopper (torch 2.11).
    """

    name = "flex-128"
    size = 128

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        whole, partly = _maps(problem, self.size)
        self.executed_pairs = float((whole | partly).sum()) * self.size**2
        self.block_mask = _block_mask(problem, whole, partly, self.size)
        self.inputs = [x[None].detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        self.do = problem.do[None]
        grouped = problem.heads != problem.k.shape[0]
        self._attend = partial(_compiled_flex(), block_mask=self.block_mask, scale=problem.scale, enable_gqa=grouped)

    def attend(self) -> Tensor:
        # compiled backward passes that may overwrite what they saved run only once
        with torch._functorch.config.patch(donated_buffer=False):
            return self._attend(*self.inputs)

    def heads_first(self, x: Tensor) -> Tensor:
        return x[0]

    def visible(self, head: int) -> Tensor:
        return index_mask(self.problem, head)


class FlashSparse(_Autograd):
    """flash-attn-4 with lists of tiles of 128 x 128 tokens: a tile that the index touches is computed whole."""

    name = "fa4-128"
    size = 128

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        why_not = FlashAttention4().refusal(DenseCase.of(problem.q, problem.k))
        if why_not is not None:
            raise SparseRingError(why_not)
        whole, partly = _maps(problem, self.size)
        tiles = whole | partly
        self.executed_pairs = float(tiles.sum()) * self.size**2
        self.tiles = tiles if tiles.numel() <= 1 << 16 else None
        own = torch.eye(tiles.shape[-1], dtype=torch.bool, device=tiles.device).expand_as(tiles)
        self.lists = [_lists(x & own, x & ~own) for x in (tiles, tiles.mT)]
        self.inputs = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        self.do = problem.do.transpose(0, 1)[None]

    def attend(self) -> Tensor:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
        from flash_attn.cute.interface import flash_attn_func

        forward, backward = (BlockSparseTensorsTorch(*x, block_size=(self.size, self.size)) for x in self.lists)
        out = flash_attn_func(
            *self.inputs, softmax_scale=self.problem.scale, mask_mod=_causal_mod(), return_lse=True,
            block_sparse_tensors=forward, block_sparse_tensors_bwd=backward,
        )  # fmt: skip
        return out[0]

    def heads_first(self, x: Tensor) -> Tensor:
        return x[0].transpose(0, 1)

    def visible(self, head: int) -> Tensor:
        if self.tiles is None:
            raise SparseRingError("the map of tiles is kept for short sequences only")
        return self.tiles[head].repeat_interleave(self.size, 0).repeat_interleave(self.size, 1) & _triangle(self.problem)


def index_mask(problem: Problem, head: int) -> Tensor:
    """The mask of one query head by the index's definition, bool ``[S, S]``."""
    tokens = torch.arange(problem.q.shape[1], device=problem.q.device)
    return mask(problem.index, head, tokens, tokens)


def _triangle(problem: Problem) -> Tensor:
    tokens = problem.q.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=problem.q.device).tril()


def _maps(problem: Problem, size: int) -> tuple[Tensor, Tensor]:
    """Tiles that are active as a whole and those that are in part, bool ``[H, n, n]``."""
    tiles = problem.heads * (problem.q.shape[1] // size) ** 2
    if tiles > MAX_TILES:
        raise SparseRingError(f"lists of {tiles:.1e} tiles of {size} tokens do not fit: they grow with heads * tokens^2")
    whole, partly = tile_maps(problem.index, size)
    shared = problem.index.heads_per_pattern
    return whole.repeat_interleave(shared, 0), partly.repeat_interleave(shared, 0)


def _ordered(tiles: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The active tiles of each row, ascending: how many, int32 ``[1, H, n]``, and which, int32 ``[1, H, n, width]``."""
    counts = tiles.sum(-1, dtype=torch.int32)
    width = int(counts.max().clamp(min=1)) if width is None else width
    lists = torch.zeros(*counts.shape, width, dtype=torch.int32, device=tiles.device)
    head, row, tile = tiles.nonzero(as_tuple=True)
    begins = counts.flatten().cumsum(0) - counts.flatten()
    place = torch.arange(tile.numel(), device=tiles.device) - begins[head * tiles.shape[1] + row]
    lists[head, row, place] = tile.int()
    return counts[None], lists[None]


def _lists(partly: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_ordered(partly), *_ordered(whole)


def _block_mask(problem: Problem, whole: Tensor, partly: Tensor, size: int) -> BlockMask:
    index, device = problem.index, problem.q.device
    count = range(len(index.segments))
    diagonals = torch.stack([diagonal_bitmap(index, s) for s in count])
    columns = torch.stack([column_bitmap(index, s) for s in count])
    lengths = torch.tensor([s.end - s.begin for s in index.segments], device=device)
    segment = torch.arange(len(index.segments), device=device).repeat_interleave(lengths)
    shared = index.heads_per_pattern

    def active(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s, offset = segment[q // BLOCK], q // BLOCK - k // BLOCK
        on = diagonals[s, head // shared, offset.clamp(min=0)] | columns[s, head // shared, k]
        return (q >= k) & on

    return BlockMask.from_kv_blocks(
        *_ordered(partly, partly.shape[-1]), *_ordered(whole, whole.shape[-1]),
        BLOCK_SIZE=size, mask_mod=active, seq_lengths=(problem.q.shape[1], problem.k.shape[1]),
    )  # fmt: skip


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mod() -> Any:
    """Key not after query, in the language of flash-attn-4; for tiles on the diagonal."""
    import cutlass.cute as cute

    @cute.jit
    def causal(batch, head, q, k, lengths, tensors):  # type: ignore[no-untyped-def]
        return k <= q

    return causal
