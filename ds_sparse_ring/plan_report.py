"""``ds-sparse-ring plan``: what a job will take, as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_sparse_ring.config import EveryQuerySelector, FullSelector, SparseRingConfig
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import Job, Schedule, load_shape, schedules, states_of
from ds_sparse_ring.memory import MAX_SEQUENCE_UNIT, Memory, layers_before_others, longest_sequence, memory_of
from ds_sparse_ring.plots import save_timeline
from ds_sparse_ring.simulate import save_trace
from ds_sparse_ring.units import GIB

_COLUMNS_OF_DENSITY = 0.3


def print_plan(job: Job, title: str, timeline: Path | None) -> None:
    """Estimate every schedule, print them and the fastest one that fits.

    Args:
        title: the model as the user named it.

    Raises:
        SparseRingError: a set-up that is impossible, naming what would be possible.
    """
    found = [estimate(job, schedule) for schedule in schedules(job)]
    if not found:
        raise SparseRingError(
            f"plan: no schedule fits {job.world} ranks and the heads of {title}: set degree or ulysses_degree to 1"
        )
    heading = f"{title}, {job.tokens} tokens, {job.world} x {job.hardware.name}, ZeRO-{job.zero_stage}"
    table = Table(title=heading, title_justify="left")
    memory = ["memory GiB"] + [f"{tier} GiB" for tier in ("host", "disk") if any(getattr(e.memory, tier) for e in found)]
    for name in ("schedule", "step s", "tokens/s", "attention s", "exposed", "ranks", "hops", *memory):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for e in sorted(found, key=lambda e: e.step_ms):
        table.add_row(*_row(e, job), *[f"{getattr(e.memory, name.split()[0]) / GIB:.0f}" for name in memory[1:]])
    console = _console()
    console.print(table)
    console.print(f"simulated; rates of {job.hardware.name}: {job.hardware.source}")
    console.print(_shares(job))
    fitting = [e for e in found if not e.memory.misfits(job.hardware)]
    if not fitting:
        _print_misfit(min(found, key=lambda e: e.memory.device), job, console)
        return
    best = min(fitting, key=lambda e: e.step_ms)
    console.print(f"fastest that fits: {_settings(best.schedule)}")
    console.print(f"its device memory: {_total(best.memory)}")
    if timeline is not None:
        try:
            save_trace(best.backward.events, timeline)
            save_timeline(best.backward.events, timeline.with_suffix(".png"))
        except OSError as error:
            raise SparseRingError(
                f"plan: --timeline {timeline} cannot be written: {error.strerror}: give a file in a folder that exists"
            ) from None
        console.print(f"one layer's backward pass: {timeline} (chrome://tracing) and {timeline.with_suffix('.png')}")


def print_longest(job: Job, title: str) -> None:
    """The longest sequence that fits, and what a longer one lacks."""
    console = _console()
    tokens, schedule, reasons = longest_sequence(job)
    size = job.config.check_degree(job.world)
    machine = f"{job.world} x {job.hardware.name} with {job.hardware.host_gib:g} GiB of host memory each"
    where = f"{title}, {machine}, ZeRO-{job.zero_stage}"
    if schedule is None:
        console.print(f"{where}: not even {MAX_SEQUENCE_UNIT} tokens fit: {'; '.join(reasons)}")
        return
    memory = memory_of(replace(job, tokens=tokens), schedule)
    console.print(f"{where}: {tokens} tokens ({tokens / 1024:g}K) in {schedule.name(size)}: {_settings(schedule)}")
    console.print(f"bound by: {'; '.join(reasons)} (at {tokens + MAX_SEQUENCE_UNIT} tokens)")
    console.print(f"device memory: {_total(memory)}")
    console.print(f"host memory {memory.host / GIB:.1f} GiB, disk {memory.disk / GIB:.1f} GiB a rank")
    if memory.recomputed:
        console.print(f"{memory.recomputed} of {job.model.num_hidden_layers} layers attend again in the backward pass")
    if again := layers_before_others(job, job.model.num_hidden_layers):
        console.print(f"{again} of {job.model.num_hidden_layers} layers run forward once more, for the inputs of later ones")
    console.print(f"predicted, not measured; {_shares(job)}")


def read_job(
    file: Path | None,
    model: str,
    tokens: int,
    world: int,
    hardware: str,
    density: float,
    columns: float | None,
    *,
    liger: bool = False,
) -> Job:
    """What is to be planned, from a DeepSpeed file (None: the defaults, ZeRO-3) and the command line.

    Args:
        columns: share of all causal pairs; None: the usual part of ``density``.

    Raises:
        SparseRingError: naming what is wrong with which of them.
    """
    config = SparseRingConfig() if file is None else SparseRingConfig.from_deepspeed(file)
    states = {"zero_stage": 3} if file is None else states_of(load_ds_json(file))
    if not 0 <= density <= 1:
        percent = f": {density:g} % is {density / 100:g}" if 1 < density <= 100 else ""
        raise SparseRingError(f"plan: --density {density:g} is no share of all causal pairs, 0 to 1{percent or ', such as 0.05'}")
    if columns is None:
        # every_query has no diagonals but its window, a small share of a long sequence
        columns = density * (1.0 if isinstance(config.selector, EveryQuerySelector) else _COLUMNS_OF_DENSITY)
    if not 0 <= columns <= density:
        raise SparseRingError(f"plan: needs 0 <= columns <= density, got --columns {columns:g} and --density {density:g}")
    share = (1.0, 0.0) if isinstance(config.selector, FullSelector) else (density, columns)
    return Job(load_shape(model), load_hardware(hardware), config, tokens, world, *share, **states, liger=liger)


def _print_misfit(nearest: Estimate, job: Job, console: Console) -> None:
    console.print(f"no schedule fits the memory; {'; '.join(nearest.memory.misfits(job.hardware))}")
    console.print(f"on the device, GiB: {', '.join(_parts(nearest.memory))}")
    console.print(f"ways out: {', '.join(_ways_out(job))}. --config FILE plans with the settings of a file")


def _ways_out(job: Job) -> list[str]:
    """What the job does not do yet, the cheapest first."""
    config, every = job.config, job.config.check_degree(job.world) == job.world
    ways = [
        ("Liger (--liger)", not job.liger),
        ("layer_chunk_tokens", config.layer_chunk_tokens is None),
        ("layer_inputs_every (2)", config.layer_chunk_tokens is not None and config.layer_inputs_every == 1),
        ("offload" if config.offload is None else "more room in offload", True),
        ("a higher ZeRO stage", job.zero_stage < 3),
        ("more GPUs (--world)" if every else "more ranks to a sequence (degree)", True),
    ]
    return [way for way, is_left in ways if is_left]


def _shares(job: Job) -> str:
    """What is active. A selector with a price keeps what it keeps: only a run says how much."""
    if isinstance(job.config.selector, FullSelector):
        return 'density 1 of the triangle: selector "full"'
    return f"density {job.density:g} of the triangle, set by --density; {job.columns:g} of it columns, set by --columns"


def _total(memory: Memory) -> str:
    return ", ".join([f"{memory.device / GIB:.1f} GiB", *_parts(memory)])


def _parts(memory: Memory) -> list[str]:
    """GiB, the largest first."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    return [f"{name} {nbytes / GIB:.1f}" for name, nbytes in parts]


def _settings(schedule: Schedule) -> str:
    ulysses, inner, kind = schedule
    return f'"ulysses_degree": {ulysses}, "inner_degree": {inner or "null"}, "inner": "{kind}"'


def _console() -> Console:
    return Console(width=None if Console().is_terminal else 120)


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
        f"{e.memory.device / GIB:.0f}" + ": does not fit" * bool(e.memory.misfits(job.hardware)),
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
    except (ValueError, OverflowError):  # no number, or infinity
        tokens = 0
    if tokens < 1:
        raise SparseRingError(f"tokens: {text!r} is no number of tokens; write 131072, 128K or 1M")
    return tokens
