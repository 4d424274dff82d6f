"""``ds-sparse-ring plan``: what a job will take, as a table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_sparse_ring.config import FullSelector, SparseRingConfig
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import Estimate, Job, estimate, load_shape, schedules
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.plots import save_timeline
from ds_sparse_ring.simulate import save_trace


def print_plan(
    file: Path | None,
    model: str,
    seq: str,
    world: int,
    hardware: str,
    density: float,
    columns: float,
    timeline: Path | None,
) -> None:
    """Estimate every schedule, print them and the fastest one that fits.

    Raises:
        SparseRingError: a set-up that is impossible, naming what would be possible.
    """
    config = SparseRingConfig() if file is None else SparseRingConfig.from_deepspeed(file)
    stage = 3 if file is None else int(load_ds_json(file).get("zero_optimization", {}).get("stage", 0))
    full = isinstance(config.selector, FullSelector)
    if not 0 <= columns <= density <= 1:
        raise SparseRingError(f"plan: needs 0 <= columns <= density <= 1, got columns {columns} and density {density}")
    share = (1.0, 0.0) if full else (density, columns)
    job = Job(load_shape(model), load_hardware(hardware), config, parse_tokens(seq), world, *share, zero_stage=stage)
    found = [estimate(job, schedule) for schedule in schedules(job)]
    if not found:
        raise SparseRingError(f"plan: no schedule fits {world} ranks and the heads of {model}: set degree or ulysses_degree to 1")
    table = Table(title=f"{model}, {job.tokens} tokens, {world} x {job.hardware.name}, ZeRO-{stage}", title_justify="left")
    memory = ("memory GiB",) if config.offload is None else ("memory GiB", "offloaded GiB")
    for heading in ("schedule", "step s", "tokens/s", "attention s", "exposed", "ranks", "hops", *memory):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for e in sorted(found, key=lambda e: e.step_ms):
        table.add_row(*_row(e, job))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(f"simulated; rates of {job.hardware.name}: {job.hardware.source}")
    fitting = [e for e in found if _fits(e, job)]
    if not fitting:
        console.print(
            "no schedule fits the memory: more ranks to a sequence (degree), a higher ZeRO stage, or another "
            f"{SparseRingConfig.SECTION}.offload"
        )
        return
    best = min(fitting, key=lambda e: e.step_ms)
    ulysses, inner, kind = best.schedule
    console.print(f'fastest that fits: "ulysses_degree": {ulysses}, "inner_degree": {inner or "null"}, "inner": "{kind}"')
    if timeline is not None:
        save_trace(best.backward.events, timeline)
        save_timeline(best.backward.events, timeline.with_suffix(".png"))
        console.print(f"one layer's backward pass: {timeline} (chrome://tracing) and {timeline.with_suffix('.png')}")


def _fits(e: Estimate, job: Job) -> bool:
    offload = job.config.offload
    outside = 0.0 if offload is None else offload.host_gib + (offload.disk_gib or 0.0)
    return e.memory < job.hardware.memory_gib * 2**30 and e.host_memory <= outside * 2**30


def _row(e: Estimate, job: Job) -> list[str]:
    size = job.config.check_degree(job.world)
    tokens = job.world // size * job.tokens / e.step_ms * 1e3
    return [
        e.schedule.name(size),
        f"{e.step_ms / 1e3:.2f}",
        f"{tokens:.0f}",
        f"{e.attention_ms / 1e3:.2f}",
        f"{100 * e.exposed:.1f} %",
        f"{e.backward.imbalance:.3f}",
        f"{e.backward.hop_imbalance:.3f}",
        f"{e.memory / 2**30:.0f}",
        *([] if job.config.offload is None else [f"{e.host_memory / 2**30:.0f}"]),
    ]


def parse_tokens(text: str) -> int:
    """A number of tokens; ``128K``, ``1M``.

    Raises:
        SparseRingError: something else.
    """
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    try:
        tokens = round(float(digits) * scale)
    except ValueError:
        tokens = 0
    if tokens < 1:
        raise SparseRingError(f"plan: {text!r} is no number of tokens; write 131072, 128K or 1M")
    return tokens
