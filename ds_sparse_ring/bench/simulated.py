"""Simulated steps on many GPUs, as Markdown: the tables of docs/measurements.md that are marked so.

Context parallelism over at most 32 ranks, the rest data parallel; ZeRO-3; dense attention beside sparse attention.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import Job, Schedule, load_shape, schedules
from ds_sparse_ring.plan_report import parse_tokens
from ds_sparse_ring.units import GIB

JOBS = "8:512K 8:1M 8:2M 8:4M 32:512K 32:1M 32:2M 32:4M 128:2M 512:2M"
_MOST_CONTEXT = 32


def main(
    jobs: Annotated[str, typer.Option(help="GPUs:tokens, several separated by blanks.")] = JOBS,
    model: Annotated[str, typer.Option(help="As for ds-sparse-ring plan.")] = "qwen2.5-3b",
    hardware: Annotated[str, typer.Option(help="As for ds-sparse-ring plan.")] = "h200",
    density: Annotated[float, typer.Option(help="Active share of the causal pairs.")] = 0.05,
    columns: Annotated[float, typer.Option(help="Share of the causal pairs that are columns; of every_query all are.")] = 0.015,
    selector: Annotated[Literal["price", "every_query"], typer.Option(help="every_query: in 512 segments.")] = "price",
) -> None:
    """Print a Markdown table of the fastest schedules, and one of ring and gather."""
    made = [_job(text, model, hardware, density, columns, selector) for text in jobs.split()]
    print("| GPUs | context x data | tokens | dense step s | sparse step s | tokens/s sparse | times dense | exposed | imbalance | GiB a rank | fastest schedule |")  # noqa: E501  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for dense, sparse in made:
        print(_row(sparse, _best(dense), _best(sparse)), flush=True)
    print("\n| GPUs | tokens | ring: step s | exposed | gather: step s | exposed |\n|---|---|---|---|---|---|")
    for _, job in made:
        if job.world <= _MOST_CONTEXT:
            ring, gather = (_best(job, kind) for kind in ("ring", "gather"))
            size = job.config.check_degree(job.world)
            cells = [f"{e.step_ms / 1e3:.2f} ({e.schedule.name(size)}) | {100 * e.exposed:.1f} %" for e in (ring, gather)]
            print(f"| {job.world} | {_tokens(job)} | {cells[0]} | {cells[1]} |", flush=True)


def _job(text: str, model: str, hardware: str, density: float, columns: float, selector: str) -> tuple[Job, Job]:
    """Dense and sparse."""
    world, tokens = int(text.split(":")[0]), parse_tokens(text.split(":")[1])
    degree = min(world, _MOST_CONTEXT)

    def job(kind: str, share: float, of_columns: float) -> Job:
        section: dict[str, Any] = {"degree": degree, "selector": {"kind": kind}}
        if kind == "every_query":
            section["segment_tokens"] = tokens // 512
        config = SparseRingConfig.model_validate(section)
        machine = load_hardware(hardware)
        if kind == "full":  # a ring whose hops run as fast as dense attention on one GPU
            ideal = {"ring_dense_forward": machine.dense_forward, "ring_dense_backward": machine.dense_backward}
            machine = machine.model_copy(update=ideal)
        return Job(load_shape(model), machine, config, tokens, world, share, of_columns)

    return job("full", 1.0, 0.0), job(selector, density, density if selector == "every_query" else columns)


def _best(job: Job, kind: str | None = None) -> Estimate:
    """The fastest schedule without Ulysses groups of the kind, or of all kinds with them."""
    allowed = [s for s in schedules(job) if kind is None or (s.kind == kind and s.ulysses == 1)]
    return min((estimate(job, schedule) for schedule in allowed or [Schedule()]), key=lambda e: e.step_ms)


def _row(job: Job, dense: Estimate, sparse: Estimate) -> str:
    size = job.config.check_degree(job.world)
    gib = sparse.memory.device / GIB
    cells = [
        job.world,
        f"{size} x {job.world // size}",
        _tokens(job),
        f"{dense.step_ms / 1e3:.1f}",
        f"{sparse.step_ms / 1e3:.2f}",
        f"{job.world // size * job.tokens / sparse.step_ms * 1e3:.0f}",
        f"{dense.step_ms / sparse.step_ms:.1f}",
        f"{100 * sparse.exposed:.1f} %",
        f"{sparse.backward.imbalance:.3f}",
        f"{gib:.0f}" + ("" if not sparse.memory.misfits(job.hardware) else ": does not fit"),
        sparse.schedule.name(size),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _tokens(job: Job) -> str:
    return f"{job.tokens >> 20}M" if job.tokens % (1 << 20) == 0 else f"{job.tokens >> 10}K"


if __name__ == "__main__":
    typer.run(main)
