"""``bench index``: what choosing the index costs, by length of sequence and of segments.

A figure is the median over rounds of the time of `select_index`, its one wait for the device included, with the spread of the
rounds beside it. On a GPU it is taken twice: behind work that the device has still to do, as in training, where launches are
hidden by the layers before; and on an idle device. Queries and keys are random with planted columns and slashes, or recorded.
Selectors that ask probes, and ``every_query``, whose scores are looked at by the kernels of training's backend.

Shapes: H query heads, K key/value heads, n tokens, D head size.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ds_sparse_ring.bench.options import chosen_device, tokens_or_none
from ds_sparse_ring.bench.result import device_name, write_result
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.plan_report import parse_tokens
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from ds_sparse_ring.units import MIB

TOKENS = ["16K", "32K", "64K", "128K", "256K", "512K"]
SEGMENTS = ["1K", "2K", "4K", "8K", "16K", "0"]
SHORT_SEGMENTS = ["256", "512", "1K"]
"""Those of every_query."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_WARM_UP = 3
_QUEUED = 8192  # rows of a square matrix product, which takes longer than the launches of a selection


def main(
    tokens: Annotated[list[str], typer.Option(help="Tokens of the sequence, 64K for example; may be repeated.")] = TOKENS,
    segment_tokens: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Tokens of a segment, 0 for one segment; may be repeated. Left out: {', '.join(SEGMENTS)}; "
            f"of every_query {', '.join(SHORT_SEGMENTS)}."
        ),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    head_size: Annotated[int, typer.Option(help="Head size.")] = 128,
    heads_per_pattern: Annotated[
        int | None, typer.Option(help="Query heads that share a pattern. Left out: 1; of every_query all of a KV head.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    selector: Annotated[
        Literal["price", "top_p", "fixed", "every_query"], typer.Option(help="With its default values.")
    ] = "price",
    price: Annotated[float | None, typer.Option(help="Another price than the default, of price or every_query.")] = None,
    backend: Annotated[
        Literal["auto", "cuda", "triton"], typer.Option(help="Whose kernel scores for every_query on a GPU.")
    ] = "auto",
    recorded: Annotated[Path | None, typer.Option(help='File of torch.save({"q": [H, n, D], "k": [K, n, D]}).')] = None,
    attention_ms: Annotated[list[float] | None, typer.Option(help="Measured attention, one per --tokens; ms.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each case.")] = 10,
    device: Annotated[str, typer.Option(help="cuda or cpu; the CPU only if it is given.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("runs/bench_index.json"),
) -> None:
    """Print a Markdown table and write it as JSON."""
    if attention_ms and len(attention_ms) != len(tokens):
        raise typer.BadParameter(f"--attention-ms: {len(attention_ms)} values for {len(tokens)} lengths; give one for each")
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"--dtype: {dtype!r} is none of {', '.join(_DTYPES)}")
    shape = _Shape(heads, kv_heads, head_size, _DTYPES[dtype], str(chosen_device("index", device)))
    chosen: dict[str, Any] = {"kind": selector} | ({"price": price} if price is not None else {})
    every_query = selector == "every_query"
    segments = [tokens_or_none(text) for text in segment_tokens or (SHORT_SEGMENTS if every_query else SEGMENTS)]
    common: dict[str, Any] = {"selector": chosen, "backend": backend if every_query and shape.on_gpu else "torch"}
    if heads_per_pattern is not None:
        common["heads_per_pattern"] = heads_per_pattern
    rows = []
    for place, length in enumerate(map(parse_tokens, tokens)):
        q, k = load(recorded, length, shape) if recorded else planted(length, shape)
        for segment in segments:
            if segment <= length:
                context = _context(length, common | {"segment_tokens": segment or None})
                row = measure(q, k, context, rounds)
                row["attention_ms"] = attention_ms[place] if attention_ms else None
                rows.append(row)
                _print_row(row, first=len(rows) == 1, shape=shape)
    fields = {
        "shape": {"heads": q.shape[0], "kv_heads": k.shape[0], "head_size": q.shape[2], "dtype": dtype},
        "heads_per_pattern": SparseRingConfig(**common).heads_per_pattern,
        "selector": chosen,
        "backend": common["backend"],
        "inputs": str(recorded) if recorded else "planted",
        "rounds": rounds,
        "rows": rows,
    }
    write_result(output, shape.device, fields)


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def planted(tokens: int, shape: _Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random q ``[H, n, D]`` and k ``[K, n, D]`` in which 1 key in 512 is a column and the last heads have slashes.

    Scores of the rest spread over about four units of the exponent, as those of trained models do.
    """
    generator = torch.Generator(shape.device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=shape.device, dtype=shape.dtype)

    q, k = normal(shape.heads, tokens, shape.head_size), normal(shape.kv_heads, tokens, shape.head_size)
    common = normal(1, 1, shape.head_size)
    q += common
    columns = torch.randint(0, tokens, (max(1, tokens // 512),), generator=generator, device=shape.device)
    k[:, columns] += 0.6 * common
    group = shape.heads // shape.kv_heads
    for head in range(shape.kv_heads):
        for distance in (64 * 5 + 7, 64 * 50, 64 * 300 + 33):
            if distance < tokens:  # the last query head of the group finds the keys that lie so far back
                q[head * group + group - 1, distance:] += 1.1 * k[head, : tokens - distance]
    return q, k


_RECORDED = 'give what torch.save({"q": [H, n, D], "k": [K, n, D]}, path) has written'


def load(path: Path, tokens: int, shape: _Shape) -> tuple[Tensor, Tensor]:
    """The first ``tokens`` recorded queries and keys.

    Raises:
        SparseRingError: the file holds something else, or fewer tokens.
    """
    try:
        recorded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the bytes of another file happen to mean
        raise SparseRingError(f"{path}: cannot be read ({type(error).__name__}); {_RECORDED}") from error
    if not isinstance(recorded, dict) or not {"q", "k"} <= recorded.keys():
        raise SparseRingError(f"{path}: holds no queries and keys; {_RECORDED}")
    q, k = recorded["q"], recorded["k"]
    if q.dim() != 3 or k.dim() != 3 or min(q.shape[1], k.shape[1]) < tokens:
        raise SparseRingError(f"{path}: q {tuple(q.shape)} and k {tuple(k.shape)} do not hold {tokens} tokens as [heads, n, D]")
    parts = [x[:, :tokens].to(shape.device, shape.dtype).contiguous() for x in (q, k)]
    return parts[0], parts[1]


def _context(tokens: int, config: dict[str, Any]) -> SequenceContext:
    ring = SparseRing(SparseRingConfig(**config))
    return ring.bind(ring.sequence_batch({"input_ids": torch.zeros(1, tokens, dtype=torch.int64)})["sparse_ring"])


def measure(q: Tensor, k: Tensor, context: SequenceContext, rounds: int) -> dict[str, Any]:
    """Times (ms), extra memory at the peak (bytes) and what was chosen, for one sequence.

    Args:
        q: ``[H, n, D]``; k: ``[K, n, D]``. Tokens are padded to whole blocks.
    """
    padding = context.layout.local_tokens - q.shape[1]
    q, k = (torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x for x in (q, k))
    scale = q.shape[2] ** -0.5
    index = select_index(q, k, context, scale=scale)
    assert isinstance(index, VerticalSlash), "the full index is not selected"
    times, idle = (
        [_timed_ms(q, k, context, scale, queued=queued) for _ in range(_WARM_UP + rounds)][_WARM_UP:] for queued in (True, False)
    )
    peak = None
    if q.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        select_index(q, k, context, scale=scale)
        peak = torch.cuda.max_memory_allocated() - before
    choices = len(context.segments) * index.patterns
    return {
        "tokens": q.shape[1] - padding,
        "segment_tokens": context.config.segment_tokens,
        "segments": len(context.segments),
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "idle_ms": statistics.median(idle),
        "peak_bytes": peak,
        "columns_per_pattern": index.column_values.numel() / choices,
        "diagonals_per_pattern": index.diagonal_values.numel() / choices,
    }


def _timed_ms(q: Tensor, k: Tensor, context: SequenceContext, scale: float, *, queued: bool) -> float:
    if not q.is_cuda:
        begin_s = time.perf_counter()
        select_index(q, k, context, scale=scale)
        return 1e3 * (time.perf_counter() - begin_s)
    work = q.new_ones(_QUEUED, _QUEUED) if queued else q
    torch.cuda.synchronize()
    if queued:
        torch.mm(work, work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    select_index(q, k, context, scale=scale)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _print_row(row: dict[str, Any], *, first: bool, shape: _Shape) -> None:
    if first:
        print(f"{device_name(shape.device)}, torch {torch.__version__}, {shape.dtype}".replace("torch.", ""))
        print("| tokens | segment | median ms | least - most | idle ms | peak MiB | columns | diagonals | of attention |")
        print("|---|---|---|---|---|---|---|---|---|")
    segment = row["segment_tokens"] or "one"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}"
    share = f"{100 * row['median_ms'] / row['attention_ms']:.1f} %" if row["attention_ms"] else "-"
    print(
        f"| {row['tokens']} | {segment} | {row['median_ms']:.2f} | {row['least_ms']:.2f} - {row['most_ms']:.2f} | "
        f"{row['idle_ms']:.2f} | {peak} | "
        f"{row['columns_per_pattern']:.0f} | {row['diagonals_per_pattern']:.1f} | {share} |",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
