"""The longest sequence that is predicted to fit, by model, GPUs and host memory, as Markdown for docs/measurements.md.

ZeRO-3, layers in chunks, everything that layers keep in host memory first.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import Job, load_shape
from ds_sparse_ring.memory import longest_sequence

MODELS = "qwen2.5-3b qwen2.5-7b llama-3.1-8b qwen2.5-32b llama-3.1-70b"


def main(
    models: Annotated[str, typer.Option(help="As for ds-sparse-ring plan, several separated by blanks.")] = MODELS,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, all of which share a sequence.")] = "1 2 8 32",
    host: Annotated[str, typer.Option(help="GiB of host memory a GPU for what layers keep; 0 is no offload.")] = "0 64 200",
    hardware: Annotated[str, typer.Option(help="As for ds-sparse-ring plan.")] = "h200",
    chunk: Annotated[int, typer.Option(help="layer_chunk_tokens; 0: whole layers.")] = 16384,
    columns: Annotated[float, typer.Option(help="Share of the causal pairs that are columns.")] = 0.015,
) -> None:
    """Print the table."""
    budgets = [int(text) for text in host.split()]
    print("| model | GPUs | " + " | ".join(f"{gib} GiB a GPU" if gib else "no offload" for gib in budgets) + " |")
    print("|---|---|" + "---|" * len(budgets))
    for model in models.split():
        for world in (int(text) for text in gpus.split()):
            cells = [_cell(_job(model, world, gib, hardware, chunk, columns)) for gib in budgets]
            print(f"| {model} | {world} | {' | '.join(cells)} |", flush=True)


def _job(model: str, world: int, host_gib: int, hardware: str, chunk: int, columns: float) -> Job:
    offload = {"host_gib": float(host_gib)} if host_gib else None
    section = {"selector": {"kind": "price"}, "offload": offload, "layer_chunk_tokens": chunk or None}
    config = SparseRingConfig.model_validate(section)
    return Job(load_shape(model), load_hardware(hardware), config, 1, world, max(columns, 0.05), columns)


def _cell(job: Job) -> str:
    tokens, schedule, reasons = longest_sequence(job)
    if schedule is None:
        return "-"
    bound = "inputs in host memory" if reasons[0].startswith("sparse_ring.offload") else reasons[0].split(":")[0]
    return f"{tokens // 1024}K ({bound})"


if __name__ == "__main__":
    typer.run(main)
