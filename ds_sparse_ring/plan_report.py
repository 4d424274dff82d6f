"""``ds-sparse-ring plan``: what a job will take, as a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_sparse_ring.config import EveryQuerySelector, FullSelector, SparseRingConfig
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import Job, Schedule, configured, load_shape, schedules, states_of
from ds_sparse_ring.memory import MAX_SEQUENCE_UNIT, Memory, layers_before_others, memory_of
from ds_sparse_ring.plan_sizes import Choice, Sizes, all_keys, better, choose, longest_with_sizes, open_keys, try_sizes
from ds_sparse_ring.plots import save_timeline
from ds_sparse_ring.simulate import save_trace
from ds_sparse_ring.units import GIB

_COLUMNS_OF_DENSITY = 0.3
_MOST_RANKS = 64


def print_plan(job: Job, title: str, timeline: Path | None) -> None:
    """Estimate every schedule, with sizes of chunks and pages where the configuration leaves them out, and print the fastest.

    Args:
        title: the model as the user named it.

    Raises:
        SparseRingError: a set-up that is impossible, naming what would be possible.
    """
    left_out, console = open_keys(job), _console()
    tried, left = _simulated(job)
    if left:
        console.print(f"{left} schedules with rings of more than {_MOST_RANKS} ranks are left out: they take minutes to simulate")
    own = [estimate(job, schedule) for schedule in tried]
    found = try_sizes(job, own, left_out)
    best = choose(job, found)
    console.print(_table(job, title, _shown(job, found, best)))
    console.print(f"simulated; rates of {job.hardware.name}: {job.hardware.source}")
    console.print(_shares(job))
    if best is None:
        _print_misfit(min(own, key=lambda e: e.memory.device), job, console)
    else:
        console.print(f"fastest that fits: {_settings(best.estimate.schedule)}, {_sizes(best.sizes, job)}")
        if best.sizes != Sizes.of(job):
            console.print("the table is for these sizes, which the configuration leaves out")
        console.print(f"its device memory: {_total(best.estimate.memory)}")
    if (every := all_keys(job)) - left_out:
        _print_better(better(best, job, try_sizes(job, own, every)), best, job, console)
    if best is not None and timeline is not None:
        _save_timeline(best.estimate, timeline, console)


def _simulated(job: Job) -> tuple[list[Schedule], int]:
    """Schedules of short rings and the configuration's own, or all if there are no others; and how many that leaves out."""
    every, size = schedules(job), job.config.check_degree(job.world)
    short = [s for s in every if size // s.ulysses <= _MOST_RANKS or s == configured(job)] or every
    return short, len(every) - len(short)


def _shown(job: Job, found: list[Choice], best: Choice | None) -> list[Choice]:
    """Every schedule with the best chunks; pages that the configuration does not say were tried with one schedule."""
    own = Sizes.of(job)
    sizes = own if best is None else own._replace(chunk=best.sizes.chunk)
    shown = [choice for choice in found if choice.sizes == sizes]
    return shown if best is None or best in shown else [*shown, best]


def _table(job: Job, title: str, shown: list[Choice]) -> Table:
    heading = f"{title}, {job.tokens} tokens, {job.world} x {job.hardware.name}, ZeRO-{job.zero_stage}"
    table = Table(title=heading, title_justify="left")
    estimates = [choice.estimate for choice in shown]
    copies = ["copies s"] * any(e.copies_ms for e in estimates)
    tiers = [tier for tier in ("host", "disk") if any(getattr(e.memory, tier) for e in estimates)]
    gib = ["memory GiB", *(f"{tier} GiB" for tier in tiers)]
    for name in ("schedule", "step s", "tokens/s", "attention s", *copies, "exposed", "ranks", "hops", *gib):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for choice in sorted(shown, key=lambda choice: choice.estimate.step_ms):
        outside = [f"{getattr(choice.estimate.memory, tier) / GIB:.0f}" for tier in tiers]
        table.add_row(*_row(choice, job, copies=bool(copies)), *outside)
    return table


def _print_better(other: Choice | None, best: Choice | None, job: Job, console: Console) -> None:
    """Sizes that the configuration does not have, though it says some."""
    if other is None:
        return
    settings = f"{_settings(other.estimate.schedule)}, {_sizes(other.sizes, job)}"
    if best is None:
        console.print(f"other sizes than those of the configuration fit: {settings}")
    else:
        faster = 1 - other.estimate.step_ms / best.estimate.step_ms
        console.print(f"{100 * faster:.0f} % less time with other sizes than those of the configuration: {settings}")


def _save_timeline(e: Estimate, timeline: Path, console: Console) -> None:
    try:
        save_trace(e.backward.events, timeline)
        save_timeline(e.backward.events, timeline.with_suffix(".png"))
    except OSError as error:
        raise SparseRingError(
            f"plan: --timeline {timeline} cannot be written: {error.strerror}: give a file in a folder that exists"
        ) from None
    console.print(f"one layer's backward pass: {timeline} (chrome://tracing) and {timeline.with_suffix('.png')}")


def print_longest(job: Job, title: str) -> None:
    """The longest sequence that fits, and what a longer one lacks; sizes that the configuration leaves out are those it takes."""
    console = _console()
    sizes, tokens, schedule, reasons = longest_with_sizes(job, open_keys(job))
    size = job.config.check_degree(job.world)
    machine = f"{job.world} x {job.hardware.name} with {job.hardware.host_gib:g} GiB of host memory each"
    where = f"{title}, {machine}, ZeRO-{job.zero_stage}"
    if schedule is None:
        console.print(f"{where}: not even {MAX_SEQUENCE_UNIT} tokens fit: {'; '.join(reasons)}")
        return
    memory = memory_of(replace(sizes.put_into(job), tokens=tokens), schedule)
    settings = f"{_settings(schedule)}, {_sizes(sizes, job)}"
    console.print(f"{where}: {tokens} tokens ({tokens / 1024:g}K) in {schedule.name(size)}: {settings}")
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
    if job.world <= _MOST_RANKS:
        _, tokens, _, _ = longest_with_sizes(job, open_keys(job))
        console.print(f"the longest sequence that fits here: {tokens} tokens ({tokens / 1024:g}K), see --max-seq")


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


def _sizes(sizes: Sizes, job: Job) -> str:
    chunk, page = json.dumps(sizes.chunk), json.dumps(sizes.page)
    of_offload = "" if job.config.offload is None else f', "offload.kv_page_tokens": {page}'
    return f'"layer_chunk_tokens": {chunk}{of_offload}'


def _console() -> Console:
    return Console(width=None if Console().is_terminal else 120)


def _row(choice: Choice, job: Job, *, copies: bool) -> list[str]:
    e, size, page = choice.estimate, job.config.check_degree(job.world), choice.sizes.page
    tokens = job.world // size * job.tokens / e.step_ms * 1e3
    return [
        e.schedule.name(size)
        + (f", pages of {page}" if page != job.config.page_tokens else "")
        + (", as configured" if e.schedule == configured(job) else ""),
        f"{e.step_ms / 1e3:.2f}",
        f"{tokens:.0f}",
        f"{e.attention_ms / 1e3:.2f}",
        *[f"{e.copies_ms / 1e3:.2f}"] * copies,
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
