"""``make bench-cpu``: the CPU kernels beside PyTorch's dense attention, in one process, on the same tensors.

Rates are (query, key) pairs that the index has, per second, forward and backward together; dense attention does all causal pairs.
Every figure is a median of rounds that take turns, so that a machine which slows down slows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.bench.patterns import vertical_slash_pattern
from ds_sparse_ring.bench.result import device_name, write_result
from ds_sparse_ring.bench.timing import alternate
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash, causal_cost, cost
from ds_sparse_ring.kernels import ColumnKV, Kernel, Work, get_kernel
from ds_sparse_ring.layout import BlockMap
from ds_sparse_ring.plan_report import parse_tokens
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index

HEADS, KV_HEADS, HEAD_SIZE, SEGMENT_TOKENS = 8, 2, 64, 1024
PATTERNS = [  # name, density, density by columns (None: all but the forced diagonals), forced diagonals
    ("isolated", 0.02, 0.006, 1),  # two forced diagonals alone would be 2.3 %
    ("columns", 0.02, None, 1),
    ("isolated", 0.05, 0.015, 2),
    ("columns", 0.05, None, 2),
    ("isolated", 0.10, 0.03, 2),
    ("columns", 0.10, None, 2),
    ("isolated", 0.30, 0.09, 2),
    ("columns", 0.30, None, 2),
    ("full", 1.0, 0.0, 2),
]


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the sequence, 8K for example.")] = "8K",
    threads: Annotated[int, typer.Option(help="Threads of PyTorch and of the kernels.")] = 2,
    rounds: Annotated[int, typer.Option(help="Timed rounds; figures are medians.")] = 5,
    backend: Annotated[str, typer.Option(help="Backend to measure.")] = "cpu",
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("runs/bench_cpu.json"),
) -> None:
    """Print a Markdown table and write it as JSON."""
    length = parse_tokens(tokens)
    torch.set_num_threads(threads)
    kernel, case = get_kernel(backend), _Case(length)
    rows = [case.measure(kernel, *pattern, rounds) for pattern in PATTERNS]
    selection = case.selection_seconds(rounds)
    fields = {
        "threads": threads,
        "shape": {"tokens": length, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "dtype": "float32"},
        "rounds": rounds,
        "selection_s": selection,
        "rows": rows,
    }
    write_result(output, "cpu", fields)
    print(f"{device_name('cpu')}, {threads} threads, torch {torch.__version__}; S {length}, {HEADS} query and {KV_HEADS} KV "
          f"heads, head size {HEAD_SIZE}, fp32, segments of {SEGMENT_TOKENS}; median of {rounds}")  # fmt: skip
    print("| pattern | density | forward ms | backward ms | dense fwd + bwd ms | Gpairs/s | dense Gpairs/s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['pattern']} | {r['density']:.3f} | {1e3 * r['forward_s']:.0f} | {1e3 * r['backward_s']:.0f} | "
              f"{1e3 * r['dense_s']:.0f} | {r['pairs_per_s'] / 1e9:.2f} | {r['dense_pairs_per_s'] / 1e9:.2f} | "
              f"{r['ratio']:.2f} |")  # fmt: skip
    print(f"selection by price, {length // SEGMENT_TOKENS} segments: {1e3 * selection:.0f} ms")


class _Case:
    """Tensors of one layer, with dense attention as PyTorch users run it (keys and values repeated to the query heads)."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q, self.do = (torch.randn(HEADS, tokens, HEAD_SIZE, generator=generator) for _ in range(2))
        self.k, self.v = (torch.randn(KV_HEADS, tokens, HEAD_SIZE, generator=generator) for _ in range(2))
        self.scale = HEAD_SIZE**-0.5
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        self.batch = {"input_ids": ids}
        self.sequence = shard_batch(self.batch, kind="striped", ranks=1, rank=0, segment_tokens=SEGMENT_TOKENS)["sparse_ring"]
        repeat = HEADS // KV_HEADS
        self.dense = [
            x[None].clone().requires_grad_()
            for x in (self.q, self.k.repeat_interleave(repeat, 0), self.v.repeat_interleave(repeat, 0))
        ]

    def measure(
        self, kernel: Kernel, name: str, density: float, by_columns: float | None, forced: int, rounds: int
    ) -> dict[str, Any]:
        segments = self.sequence.segments
        index: Index = (
            FullIndex(segments, HEADS)
            if name == "full"
            else vertical_slash_pattern(segments, HEADS, density=density, column_density=by_columns, forced_diagonals=forced)
        )
        blocks = torch.arange(segments[-1].end)
        pairs = float(cost(index, blocks).sum())
        causal = float(causal_cost(segments, blocks).sum()) * HEADS
        call = _KernelCall(self, kernel, index)
        dense_s, forward_s, backward_s = _medians([self.run_dense, call.forward, call.backward], rounds)
        rate, dense_rate = pairs / (forward_s + backward_s), causal / dense_s
        return {
            "pattern": name,
            "density": pairs / causal,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "dense_s": dense_s,
            "pairs_per_s": rate,
            "dense_pairs_per_s": dense_rate,
            "ratio": rate / dense_rate,
        }

    def run_dense(self) -> None:
        q, k, v = self.dense
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(self.do[None])

    def selection_seconds(self, rounds: int) -> float:
        ring = SparseRing(SparseRingConfig(segment_tokens=SEGMENT_TOKENS))
        context = ring.bind(ring.sequence_batch(self.batch)["sparse_ring"])
        return _medians([lambda: select_index(self.q, self.k, context, scale=self.scale)], rounds)[0]


class _KernelCall:
    """Forward and backward of one index over the whole sequence."""

    def __init__(self, case: _Case, kernel: Kernel, index: Index) -> None:
        self.case, self.kernel = case, kernel
        self.work = Work(BlockMap(1, 0), BlockMap(1, 0), index, case.scale)
        self.columns = _columns(case.k, case.v, index)
        self.o, self.lse = torch.zeros_like(case.q), case.q.new_zeros(case.q.shape[:2])
        self.forward()
        self.delta = (case.do * self.o).sum(-1)

    def forward(self) -> None:
        c = self.case
        self.o.zero_()
        self.lse.fill_(-math.inf)
        self.kernel.forward(
            c.q, c.k, c.v, self.work, self.o, self.lse, self.columns
        )  # fmt: skip

    def backward(self) -> None:
        c = self.case
        dq, dk, dv = (torch.zeros_like(x) for x in (c.q, c.k, c.v))
        d_columns = ColumnKV(torch.zeros_like(self.columns.k), torch.zeros_like(self.columns.v)) if self.columns else None
        self.kernel.backward(
            c.q, c.k, c.v, c.do, self.lse, self.delta, self.work, dq, dk, dv, self.columns, d_columns
        )  # fmt: skip


def _columns(k: Tensor, v: Tensor, index: Index) -> ColumnKV | None:
    if not isinstance(index, VerticalSlash) or index.column_values.numel() == 0:
        return None
    head = index.column_kv_heads(KV_HEADS)
    return ColumnKV(k[head, index.column_values], v[head, index.column_values])


def _medians(functions: list[Callable[[], Any]], rounds: int) -> list[float]:
    return [timing.median_s for timing in alternate(functions, rounds, torch.device("cpu"), warm_up=1)]


if __name__ == "__main__":
    typer.run(main)
