"""Which ``layer_chunk_tokens`` and ``offload.kv_page_tokens`` suit a job: a few of each are estimated beside its own.

Chunks are tried with every schedule. They leave attention as it is, so that it is simulated once. Pages are tried with one
schedule, the fastest that fits or, if none does, that of least device memory: each size is another simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.job import Job, Schedule
from ds_sparse_ring.memory import longest_sequence, ring_layout

Key = Literal["layer_chunk_tokens", "kv_page_tokens"]

_CHUNKS = (None, 16384, 8192, 32768, 4096)
"""Of equally good ones the first is taken."""

_PAGES = 3
_LEAST_PAGE = 32768
"""Tokens. Shorter pages hide less of their copies."""

_WORTH_A_CHANGE = 0.98
_BESIDE_GIB = 3
"""CUDA, NCCL and fragmentation take so much at most: other sizes than a job's own leave room for it, if any does."""


class Sizes(NamedTuple):
    """Tokens of a chunk and of a page; None: whole layers, no pages."""

    chunk: int | None
    page: int | None

    @classmethod
    def of(cls, job: Job) -> Sizes:
        """Those of a job."""
        return cls(job.config.layer_chunk_tokens, job.config.page_tokens)

    def put_into(self, job: Job) -> Job:
        """The job with these; pages need its ``offload``."""
        offload = job.config.offload
        if offload is not None:
            offload = offload.model_copy(update={"kv_page_tokens": self.page})
        every = 1 if self.chunk is None else job.config.layer_inputs_every  # whole layers keep their inputs
        update = {"layer_chunk_tokens": self.chunk, "layer_inputs_every": every, "offload": offload}
        return replace(job, config=job.config.model_copy(update=update))


@dataclass(frozen=True)
class Choice:
    """Sizes, and what a schedule takes with them."""

    sizes: Sizes
    estimate: Estimate


def all_keys(job: Job) -> set[Key]:
    """Keys that may be set: that of pages only beside other keys of ``offload``."""
    return {"layer_chunk_tokens"} if job.config.offload is None else {"layer_chunk_tokens", "kv_page_tokens"}


def open_keys(job: Job) -> set[Key]:
    """Those of them that the configuration leaves out."""
    offload = job.config.offload
    said = job.config.model_fields_set | (set() if offload is None else offload.model_fields_set)
    return all_keys(job) - said


def try_sizes(job: Job, own: Sequence[Estimate], keys: Collection[Key]) -> list[Choice]:
    """What other sizes take beside a job's own, which come first.

    Args:
        own: of the job itself, one of each schedule. keys: what may be another size.
    """
    sizes = Sizes.of(job)
    chunks = _chunks(job, keys)
    found = [Choice(sizes, e) for e in own]
    for chunk in chunks:
        tried = Sizes(chunk, sizes.page)
        other = tried.put_into(job)
        found += [Choice(tried, estimate(other, e.schedule, e)) for e in own if _is_part(job, e.schedule, chunk)]
    if "kv_page_tokens" not in keys:
        return found
    schedule = (fastest(job, found) or min(found, key=lambda choice: choice.estimate.memory.device)).estimate.schedule
    for page in _pages(job, schedule):
        same: Estimate | None = None
        for chunk in (sizes.chunk, *(c for c in chunks if _is_part(job, schedule, c))):
            tried = Sizes(chunk, page)
            same = estimate(tried.put_into(job), schedule, same)
            found.append(Choice(tried, same))
    return found


def fastest(job: Job, found: Iterable[Choice]) -> Choice | None:
    """Of those that fit, first of those that leave room for what is not counted; None if none fits."""
    fitting = [choice for choice in found if not choice.estimate.memory.misfits(job.hardware)]
    roomy = [choice for choice in fitting if _leaves_room(job, choice)]
    return min(roomy or fitting, key=lambda choice: choice.estimate.step_ms, default=None)


def choose(job: Job, found: Sequence[Choice]) -> Choice | None:
    """What to set where nothing is set: the job's own sizes, others if these are better; None if nothing fits.

    Others are better if a job's own do not fit, or leave no room for what is not counted, or if they save 2 % of a step.
    """
    own, best = fastest(job, (choice for choice in found if choice.sizes == Sizes.of(job))), fastest(job, found)
    if own is None or best is None or _leaves_room(job, best) > _leaves_room(job, own):
        return best
    return best if _saves(best, own) else own


def better(own: Choice | None, job: Job, found: Sequence[Choice]) -> Choice | None:
    """The best of ``found`` if it saves 2 % of a step of ``own``, or if that is None, because nothing fitted; else None."""
    best = fastest(job, found)
    return best if best is not None and (own is None or _saves(best, own)) else None


def longest_with_sizes(job: Job, keys: Collection[Key]) -> tuple[Sizes, int, Schedule | None, list[str]]:
    """The sizes with which the longest sequence fits, a job's own if no other ones take a longer one, and `longest_sequence`."""
    own = Sizes.of(job)
    pages = (_LEAST_PAGE,) if "kv_page_tokens" in keys else ()
    tried = [Sizes(chunk, page) for page in (own.page, *pages) for chunk in (own.chunk, *_chunks(job, keys))]
    found = [(sizes, *longest_sequence(sizes.put_into(job))) for sizes in tried]
    return max(found, key=lambda each: each[1])


def _chunks(job: Job, keys: Collection[Key]) -> list[int | None]:
    """Others than the job's own."""
    return [chunk for chunk in _CHUNKS if chunk != job.config.layer_chunk_tokens] if "layer_chunk_tokens" in keys else []


def _is_part(job: Job, schedule: Schedule, chunk: int | None) -> bool:
    """Whether a rank has more tokens than a chunk; else it is no other choice than a larger one."""
    return chunk is None or chunk < ring_layout(job, schedule).local_tokens // schedule.ulysses


def _pages(job: Job, schedule: Schedule) -> list[int | None]:
    """None, and the largest powers of two below a shard; others than the job's own."""
    below = 1 << ((ring_layout(job, schedule).local_tokens - 1).bit_length() - 1)
    sizes = [None, *(page for i in range(_PAGES) if (page := below >> i) >= _LEAST_PAGE)]
    return [page for page in sizes if page != job.config.page_tokens]


def _leaves_room(job: Job, choice: Choice) -> bool:
    hardware = job.hardware
    return not choice.estimate.memory.misfits(hardware.model_copy(update={"memory_gib": hardware.memory_gib - _BESIDE_GIB}))


def _saves(best: Choice, own: Choice) -> bool:
    return best.estimate.step_ms <= _WORTH_A_CHANGE * own.estimate.step_ms
