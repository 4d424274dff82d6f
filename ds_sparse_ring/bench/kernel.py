"""``ds-sparse-ring bench kernel``: sparse attention of one layer beside dense attention and beside other libraries.

Everything runs in one process on the same tensors, in turns; figures are medians, with the fastest and the slowest round. Rates
count active (query, key) entries only: 4 D floating-point operations an entry forward, 10 D backward. A case that does not
fit, or that a library cannot do, keeps its line in the table, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from ds_sparse_ring.bench.accuracy import ErrorLine, measure_errors
from ds_sparse_ring.bench.contenders import Contender, Dense, FlashSparse, Flex, Ours, Problem
from ds_sparse_ring.bench.counts import active_pairs, minimal_bytes
from ds_sparse_ring.bench.kernel_report import SpeedLine, save_plot, tables
from ds_sparse_ring.bench.options import chosen_device, tokens_or_none
from ds_sparse_ring.bench.patterns import PatternKind, pattern
from ds_sparse_ring.bench.recorded import RecordedIndex
from ds_sparse_ring.bench.result import about, write_result
from ds_sparse_ring.bench.timing import Timing, alternate
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, causal_cost
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.kernels.dense import DenseCase, best_dense
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.plan_report import parse_tokens

LONG_S = 0.5
"""Dense attention that takes longer, forward and backward, is timed once per shape instead of in turns with every case."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TIME_UP = "not run: the time was up"
_Makers = dict[str, Callable[[Problem], Contender]]


def main(
    tokens: Annotated[str, typer.Option(help="Lengths, comma-separated; K is 1024.")] = "16K,64K,128K,512K",
    density: Annotated[str, typer.Option(help="Active shares of the causal area, in percent.")] = "2,5,10,20",
    patterns: Annotated[str, typer.Option(help="band, clustered, isolated, columns.")] = "clustered,columns,isolated",
    index: Annotated[list[Path] | None, typer.Option(help="Recorded index to measure at its own shape; repeatable.")] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    head_size: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    heads_per_pattern: Annotated[int, typer.Option(help="Neighbouring query heads that share a pattern.")] = 1,
    spread: Annotated[float, typer.Option(help="Largest over smallest density of a head.")] = 100.0,
    column_share: Annotated[float, typer.Option(help="Share of clustered and isolated that columns cover.")] = 0.3,
    segment_tokens: Annotated[str, typer.Option(help="Tokens of a segment.")] = "16K",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    backends: Annotated[str, typer.Option(help="Backends of ours; empty: every fast one that runs here.")] = "",
    peers: Annotated[str, typer.Option(help="Other libraries: flex-128, fa4-128; empty: none.")] = "flex-128,fa4-128",
    dense: Annotated[str, typer.Option(help="Library for dense attention; empty: the best one.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 7,
    check_tokens: Annotated[str, typer.Option(help="Length at which errors are measured; 0: not at all.")] = "2K",
    check_density: Annotated[float, typer.Option(help="Density at which errors are measured, in percent.")] = 25.0,
    budget_seconds: Annotated[float, typer.Option(help="No case begins later than this after the start.")] = 540.0,
    device: Annotated[str, typer.Option(help="cuda or cpu; the CPU only if it is given.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file, written after every case; a picture goes beside it.")] = Path(
        "runs/bench_kernel.json"
    ),
) -> None:
    """Print Markdown tables of speeds and errors, and write them as JSON and as a picture."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    where = chosen_device("kernel", device)
    setting = Setting(
        where, DTYPES[dtype], heads_per_pattern, spread, column_share, parse_tokens(segment_tokens), rounds, dense or None
    )
    shape = Shape(heads, kv_heads, head_size)
    recorded = [Case.of_recording(RecordedIndex.load(path)) for path in index or []]
    named = [(cast(PatternKind, kind), _share(share)) for kind in _split(patterns) for share in _split(density)]
    lengths = [_length(text) for text in _split(tokens)]
    checked = tokens_or_none(check_tokens)
    checks = [Case(kind, check_density / 100, checked, shape) for kind in _split(patterns)] if checked else []
    cases = recorded + [Case(kind, share, length, shape) for length in lengths for kind, share in named]
    bench = Bench(setting, _makers(_split(backends), _split(peers), where), time.monotonic() + budget_seconds, output)
    try:
        bench.run(checks + [c for c in recorded if c.tokens <= 8192 and checked], cases)
    finally:  # whatever ends the run, what was measured is shown
        print(tables(about(where) | bench.settings(), bench.speeds, bench.errors))
        save_plot(output.with_suffix(".png"), bench.speeds)


@dataclass(frozen=True)
class Shape:
    """Heads of a layer and their size."""

    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Setting:
    """What all cases share; ``dense``: the library that was named, if one was."""

    device: torch.device
    dtype: torch.dtype
    heads_per_pattern: int
    spread: float
    column_share: float
    segment_tokens: int
    rounds: int
    dense: str | None


@dataclass(frozen=True)
class Case:
    """One index to measure: a pattern of a density, or a recorded index (``density`` is then its own)."""

    kind: str
    density: float
    tokens: int
    shape: Shape
    recorded: RecordedIndex | None = None

    @classmethod
    def of_recording(cls, recorded: RecordedIndex) -> Case:
        """The case of a recorded index, at its own shape."""
        index, shape = recorded.index, Shape(recorded.heads, recorded.kv_heads, recorded.head_size)
        pairs = active_pairs(index) / recorded.heads
        causal = float(causal_cost(index.segments, torch.arange(index.segments[-1].end)).sum())
        kind = f"{recorded.source} ({shape.heads}:{shape.kv_heads} heads of {shape.head_size})"
        return cls(kind, pairs / causal, index.segments[-1].end * BLOCK, shape, recorded)

    def make_index(self, setting: Setting) -> VerticalSlash:
        """The index, on the CPU."""
        if self.recorded is not None:
            return self.recorded.index
        segment_tokens = setting.segment_tokens
        if self.tokens < segment_tokens:  # a check at few tokens is to see several segments, as a long sequence has them
            segment_tokens = max(4 * BLOCK, self.tokens // 4 // BLOCK * BLOCK)
        segments = make_segments([self.tokens], -(-self.tokens // BLOCK), segment_tokens)
        return pattern(
            cast(PatternKind, self.kind), segments, self.shape.heads, density=self.density, spread=setting.spread,
            column_share=setting.column_share, heads_per_pattern=setting.heads_per_pattern,
        )  # fmt: skip


@dataclass
class Bench:
    """Runs cases and keeps their lines; JSON is written after each, so that nothing is lost when the time is up."""

    setting: Setting
    makers: _Makers
    deadline: float
    output: Path
    speeds: list[SpeedLine] = field(default_factory=list)
    errors: list[ErrorLine] = field(default_factory=list)
    _dense: dict[tuple[int, Shape], list[Timing]] = field(default_factory=dict)
    _compiled_for: tuple[int, Shape] | None = None

    def run(self, checks: list[Case], cases: list[Case]) -> None:
        """Errors of ``checks``, then speeds of ``cases``."""
        for case in checks:
            self._guarded(case, self._check, self._no_check)
        for case in cases:
            self._guarded(case, self._measure, self._no_speed)

    def settings(self) -> dict[str, Any]:
        """What all cases share, with the names of the file."""
        s = self.setting
        shared = {"dtype": str(s.dtype), "segment_tokens": s.segment_tokens, "rounds": s.rounds}
        heads = {"head_spread": s.spread, "column_share": s.column_share, "heads_per_pattern": s.heads_per_pattern}
        return {**shared, **heads}

    def _guarded(self, case: Case, work: Callable[[Case], None], refuse: Callable[[Case, str], None]) -> None:
        if time.monotonic() > self.deadline:
            refuse(case, TIME_UP)
        else:
            if self._compiled_for != (case.tokens, case.shape):
                torch._dynamo.reset()  # compiled for one shape each: past a limit torch would stop to compile
                self._compiled_for = (case.tokens, case.shape)
            try:
                work(case)
            except Exception as error:  # one case that fails does not end a long run
                refuse(case, _reason(error))
            if self.setting.device.type == "cuda":
                torch.cuda.empty_cache()
        lines = {"speeds": [asdict(x) for x in self.speeds], "errors": [asdict(x) for x in self.errors]}
        write_result(self.output, self.setting.device, self.settings() | lines)

    def _no_check(self, case: Case, reason: str) -> None:
        self.errors.append(ErrorLine(case.kind, case.density, case.tokens, "all", {}, reason))

    def _no_speed(self, case: Case, reason: str) -> None:
        self._add(case, case.density, "all", why_not=reason)

    def _problem(self, case: Case) -> Problem:
        s, shape = self.setting, case.shape
        return Problem.random(case.make_index(s), shape.kv_heads, shape.head_size, s.dtype, s.device)

    def _check(self, case: Case) -> None:
        problem = self._problem(case)
        for name, contender in self._contenders(problem):
            if isinstance(contender, str):
                self.errors.append(ErrorLine(case.kind, case.density, case.tokens, name, {}, contender))
            else:
                errors = measure_errors(problem, contender)
                self.errors.append(ErrorLine(case.kind, case.density, case.tokens, name, errors, None))
        print(f"errors  {case.kind} {100 * case.density:.1f} % at {case.tokens} tokens", flush=True)

    def _measure(self, case: Case) -> None:
        problem = self._problem(case)
        dense, in_turns = self._dense_of(case, problem)
        found = list(self._contenders(problem))
        able: list[Contender] = [c for _, c in found if not isinstance(c, str)]
        timed = self._time([dense, *able] if in_turns and dense is not None else able)
        self._add_lines(case, problem, dense, found, timed)
        print(f"speed   {case.kind} {100 * case.density:.1f} % at {case.tokens} tokens", flush=True)

    def _dense_of(self, case: Case, problem: Problem) -> tuple[Dense | None, bool]:
        """Dense attention, and whether it is fast enough to take turns with the others; None if there is none here."""
        shape = (case.tokens, case.shape)
        try:
            dense = Dense(best_dense(DenseCase.of(problem.q, problem.k), self.setting.dense), problem)
        except SparseRingError as error:
            self.speeds.append(
                SpeedLine(case.kind, case.density, case.tokens, asdict(case.shape), "dense", True, why_not=str(error))
            )
            return None, False
        if shape not in self._dense:
            functions, device = [dense.forward, dense.backward], self.setting.device
            timings = alternate(functions, 1, device, warm_up=1)
            if sum(t.median_s for t in timings) > LONG_S:
                timings = alternate(functions, min(3, self.setting.rounds), device, warm_up=0)
            self._dense[shape] = timings
        return dense, sum(t.median_s for t in self._dense[shape]) <= LONG_S

    def _contenders(self, problem: Problem) -> Iterator[tuple[str, Contender | str]]:
        """Each contender after one run of both passes, or why it cannot do it."""
        for name, make in self.makers.items():
            if time.monotonic() > self.deadline:
                yield name, TIME_UP
                continue
            try:
                contender = make(problem)
                contender.results()
            except Exception as error:  # other people's code: whatever it raises is its line in the table
                if self.setting.device.type == "cuda":
                    torch.cuda.empty_cache()
                yield name, _reason(error)
            else:
                yield name, contender

    def _time(self, contenders: list[Contender]) -> dict[str, list[Timing]]:
        """Forward, backward, then what each does apart, all of them in turns."""
        functions = [f for c in contenders for f in (c.forward, c.backward, *c.apart().values())]
        timings = iter(alternate(functions, self.setting.rounds, self.setting.device))
        return {c.name: [next(timings) for _ in range(2 + len(c.apart()))] for c in contenders}

    def _add_lines(
        self,
        case: Case,
        problem: Problem,
        dense: Dense | None,
        found: list[tuple[str, Contender | str]],
        timed: dict[str, list[Timing]],
    ) -> None:
        index = problem.host_index
        pairs, moved = active_pairs(index), minimal_bytes(index, problem.q, problem.k)
        causal = float(causal_cost(index.segments, torch.arange(index.segments[-1].end)).sum()) * case.shape.heads
        density = pairs / causal
        if dense is not None:
            forward, backward = timed.get(dense.name, self._dense[case.tokens, case.shape])
            self._add(case, density, dense.name, is_dense=True, pairs=causal, forward=forward, backward=backward)
        for name, contender in found:
            if isinstance(contender, str):
                self._add(case, density, name, why_not=contender)
                continue
            forward, backward, *others = timed[name]
            apart = {label: t.median_s for label, t in zip(contender.apart(), others, strict=True)}
            self._add(
                case, density, name, pairs=pairs, executed_pairs=contender.executed_pairs, forward=forward, backward=backward,
                apart=apart, minimal_bytes=moved, ours=isinstance(contender, Ours),
            )  # fmt: skip

    def _add(self, case: Case, density: float, name: str, **measured: Any) -> None:
        recorded = case.recorded is not None
        self.speeds.append(SpeedLine(case.kind, density, case.tokens, asdict(case.shape), name, recorded=recorded, **measured))


def _makers(backends: list[str], peers: list[str], device: torch.device) -> _Makers:
    """How to make each contender that was asked for.

    Raises:
        SparseRingError: a peer that is not known.
    """
    known: _Makers = {
        "flex-128": Flex,
        "fa4-128": FlashSparse,
    }
    unknown = [name for name in peers if name not in known]
    if unknown:
        raise SparseRingError(f"bench: unknown peer {unknown[0]!r}; use any of {', '.join(known)}")
    names = backends or [name for name in ("cuda", "triton", "cpu") if _runs(name, device)]

    def ours(name: str) -> Callable[[Problem], Contender]:
        return lambda problem: Ours(name, get_kernel(name), problem)

    return {name: ours(name) for name in names} | {name: known[name] for name in peers}


def _runs(backend: str, device: torch.device) -> bool:
    """Whether a backend can be had for a device; the reference is left out: it is not made to be fast."""
    if (backend == "cpu") != (device.type == "cpu"):
        return False
    try:
        get_kernel(backend)
    except SparseRingError:
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
    line = text[0][:200] if text else ""
    return line if isinstance(error, SparseRingError) else f"{type(error).__name__}: {line}"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _share(text: str) -> float:
    """A density in per cent, as a share."""
    try:
        return float(text) / 100
    except ValueError:
        raise typer.BadParameter(f"--density {text}: needs numbers in per cent, such as 5,10") from None


def _length(text: str) -> int:
    """Tokens of "512", "16K" or "1M"."""
    tokens = parse_tokens(text)
    if tokens % 128:
        raise typer.BadParameter(f"--tokens {text}: needs numbers such as 512, 16K or 1M that are multiples of 128")
    return tokens


if __name__ == "__main__":
    typer.run(main)
