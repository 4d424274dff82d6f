"""``bench layer``: a decoder layer's forward and backward pass, by the tokens that pass through it at once.

Two layers of a model's sizes, with fresh weights, train on one sequence: whole and checkpointed, in chunks
(``layer_chunk_tokens``), and in chunks with keys and values in host memory, page by page (``offload.kv_page_tokens``). What the
layers keep stays where it would in training. A figure is half of the two layers' median; what surrounds them is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ds_sparse_ring.bench.options import chosen_device, tokens_or_none
from ds_sparse_ring.bench.result import write_result
from ds_sparse_ring.bench.timing import Timing, alternate
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.integrations.liger import use_liger_kernels
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.job import ModelShape, load_shape
from ds_sparse_ring.plan_report import parse_tokens
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.units import GIB

CHUNKS = ["0", "2K", "4K", "8K", "16K", "32K", "64K"]
PAGES = ["0"]
_WORDS, _LAYERS, _TILE = 256, 2, 4096


def main(
    model: Annotated[str, typer.Option(help="As for ds-sparse-ring plan.")] = "qwen2.5-3b",
    tokens: Annotated[str, typer.Option(help="Tokens of the sequence.")] = "128K",
    chunk_tokens: Annotated[list[str], typer.Option(help="layer_chunk_tokens, 0 for whole layers; may be repeated.")] = CHUNKS,
    page_tokens: Annotated[
        list[str], typer.Option(help="kv_page_tokens, 0 for none; may be repeated, only with chunks.")
    ] = PAGES,
    host_gib: Annotated[float, typer.Option(help="offload.host_gib, 0 for no offload.")] = 8.0,
    columns: Annotated[int, typer.Option(help="Columns of a head and segment.")] = 2600,
    slashes: Annotated[int, typer.Option(help="Slashes of a head and segment.")] = 52,
    segment_tokens: Annotated[str, typer.Option(help="Tokens of a segment.")] = "16K",
    liger: Annotated[bool, typer.Option(help="Norms, rotary embedding and gates by Liger, on a GPU.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each case.")] = 3,
    device: Annotated[str, typer.Option(help="cuda or cpu; the CPU only if it is given.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("runs/bench_layer.json"),
) -> None:
    """Print a Markdown table and write it as JSON."""
    place = chosen_device("layer", device)
    selector = {"kind": "fixed", "columns": columns, "slashes": slashes}
    section: dict[str, Any] = {"degree": 1, "selector": selector, "segment_tokens": parse_tokens(segment_tokens)}
    rows: list[dict[str, Any]] = []
    length, pages = parse_tokens(tokens), [tokens_or_none(text) for text in page_tokens]
    for chunk in map(tokens_or_none, chunk_tokens):
        for page in pages if chunk else [0]:
            case = _Case(load_shape(model), length, chunk, page, host_gib, place, liger)
            timing, peak = case.measure(section, rounds)
            rows.append({"chunk_tokens": chunk, "page_tokens": page, "peak_bytes": peak} | vars(timing))
    print("| chunk | page | ms of a layer | least - most | peak GiB above weights |\n|---|---|---|---|---|")
    for row in rows:
        ms, least, most = (1e3 * row[key] for key in ("median_s", "fastest_s", "slowest_s"))
        memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.2f}"
        print(
            f"| {row['chunk_tokens'] or 'whole'} | {row['page_tokens'] or '-'} | {ms:.1f} | {least:.1f} - {most:.1f} | {memory} |"
        )
    fields = {"model": model, "tokens": length, "section": section, "liger": liger, "rounds": rounds, "rows": rows}
    write_result(output, place, fields)


@dataclass(frozen=True)
class _Case:
    shape: ModelShape
    tokens: int
    chunk: int
    page: int
    host_gib: float
    device: torch.device
    liger: bool

    def measure(self, section: dict[str, Any], rounds: int) -> tuple[Timing, int | None]:
        """Seconds of one layer, and bytes at the peak beside weights and their gradients; None where nothing counts them."""
        offload = {"host_gib": self.host_gib, "kv_page_tokens": self.page or None} if self.host_gib else None
        ring = SparseRing(SparseRingConfig(**section, layer_chunk_tokens=self.chunk or None, offload=offload))
        ring.meter.active = False
        model, batch = self._model(ring), self._batch(ring)

        def step() -> None:
            loss: Tensor = model(**batch, num_items_in_batch=self.tokens).loss
            loss.backward()

        step()  # gradients of weights are there from now on
        timed = alternate([step], rounds, self.device, warm_up=1)[0]
        peak = None
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            peak = torch.cuda.max_memory_allocated(self.device) - before
        return Timing(*(seconds / _LAYERS for seconds in vars(timed).values())), peak

    def _model(self, ring: SparseRing) -> Any:
        shape = self.shape.model_dump() | {"num_hidden_layers": _LAYERS, "vocab_size": _WORDS, "tie_word_embeddings": True}
        shape["head_dim"] = self.shape.head_size
        config = Qwen2Config(**shape, max_position_embeddings=self.tokens, use_cache=False)
        with self.device:
            model: Any = Qwen2ForCausalLM(config)
        model.to(torch.bfloat16).train()
        if self.liger:
            use_liger_kernels(model)
        enable_gradient_checkpointing(model)
        enable_tiled_loss(model, _TILE)
        attach(model, ring)
        return model

    def _batch(self, ring: SparseRing) -> dict[str, Any]:
        words = torch.randint(0, _WORDS, (1, self.tokens), generator=torch.Generator().manual_seed(0))
        batch = ring.sequence_batch({"input_ids": words, "labels": words})
        return {key: x.to(self.device) if isinstance(x, Tensor) else x for key, x in batch.items()}


if __name__ == "__main__":
    typer.run(main)
