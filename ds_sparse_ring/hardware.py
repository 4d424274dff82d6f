"""What a machine can do, as the simulator needs it: rates and links. Profiles by name, or from a JSON file of the same fields.

``source`` says where the numbers come from. Only those of ``h200`` were measured with this package (docs/measurements.md).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from ds_sparse_ring.config_errors import list_problems
from ds_sparse_ring.errors import SparseRingError

Rate = PositiveFloat | Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]
"""One number, or numbers by a count of tokens, in a file ``{"2048": 243, "8192": 388}``; see `rate_at`."""


def rate_at(rate: Rate, count: float) -> float:
    """The rate of so many: between two numbers by the logarithm, beyond them the last one."""
    if not isinstance(rate, dict):
        return rate
    (fewer, value), *more = sorted(rate.items())
    for number, rate_there in more:
        if count < number:
            way = max(0.0, math.log(count / fewer) / math.log(number / fewer))
            return value + way * (rate_there - value)
        fewer, value = number, rate_there
    return value


class Hardware(BaseModel):
    """One kind of GPU and the machine around it. Rates in TFLOP/s of one GPU, links in GB/s one way, times in ms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    node_ranks: PositiveInt
    """GPUs of a node."""
    memory_gib: PositiveFloat
    host_gib: NonNegativeFloat
    """Host memory of a GPU's share of its node; of the profiles assumed: 2 TB for 8 GPUs, 1 TB around the 40 GB ones."""
    dense_forward: PositiveFloat
    dense_backward: PositiveFloat
    """Dense causal attention, per active entry (4 D and 10 D)."""
    sparse_forward: Rate
    sparse_backward: Rate
    """This package's kernels, likewise. By queries that read a column: tokens of a segment that a rank has, times query heads of
    a pattern. Diagonals have the last number."""
    ring_dense_forward: PositiveFloat
    ring_dense_backward: PositiveFloat
    """Dense attention on a ring, whose shards no library of dense attention takes: this package's kernels on the full index."""
    rest: PositiveFloat
    """Everything but attention in a training step, on the FLOPs that it executes (recomputation included)."""
    liger_rest: PositiveFloat
    """The same with Liger's kernels."""
    chunked: Rate = 0.88
    """Of these two rates what is left with ``layer_chunk_tokens``: a projection more, copies, sums of weight gradients. By tokens
    of a chunk."""
    inner_gb_s: PositiveFloat
    outer_gb_s: PositiveFloat
    """Link of one GPU to another one of its node, and of another node."""
    latency_ms: NonNegativeFloat
    """Of one transfer."""
    host_gb_s: PositiveFloat = 50
    """From pinned host memory to one GPU."""
    disk_gb_s: PositiveFloat = 2
    """Between host memory and the disk, of one GPU's share, written or read. Of all profiles assumed, not measured: an NVMe drive
    for each GPU, at what such drives write for long."""
    index_share: NonNegativeFloat
    """Time for choosing the index over that of the sparse attention of one layer, both passes; by thresholds (price, top_p)."""
    fixed_index_share: NonNegativeFloat
    """Likewise by the fixed selector, which ranks the sums of every head and segment."""
    scores: PositiveFloat
    """Scores of all queries and keys without attention (every_query), TFLOP/s at 2 D a causal pair."""
    column_gb_s: PositiveFloat | None = None
    """Keys and values of columns put in their order, and sums of their gradients put back, GB/s of these; null: not counted."""
    listing_ms: NonNegativeFloat = 0.0
    """Making lists of a million columns from bits (every_query)."""


_A100: dict[str, Any] = {
    "source": "assumed: FlashAttention 2 as published, sparse kernels at a like share of the peak",
    "node_ranks": 8,
    "dense_forward": 190,
    "dense_backward": 165,
    "sparse_forward": 90,
    "sparse_backward": 90,
    "ring_dense_forward": 95,
    "ring_dense_backward": 95,
    "rest": 170,
    "liger_rest": 190,
    "inner_gb_s": 200,
    "outer_gb_s": 22,
    "latency_ms": 0.08,
    "host_gb_s": 25,
    "index_share": 0.05,
    "fixed_index_share": 0.1,
    "scores": 100,
}
_H200: dict[str, Any] = {
    "source": "measured on one GPU, links on two (docs/measurements.md); assumed: between nodes 400 Gbit/s a GPU, disks 2 GB/s",
    "node_ranks": 8,
    "dense_forward": 679,
    "dense_backward": 611,
    "sparse_forward": 508,
    "sparse_backward": {2048: 243, 8192: 388, 16384: 456},
    "ring_dense_forward": 608,
    "ring_dense_backward": 471,
    "rest": 463,
    "liger_rest": 570,
    # "A decoder layer in chunks" of docs/measurements.md without attention and index, beside 0.88 at 16384, as of whole steps
    "chunked": {2048: 0.625, 4096: 0.816, 8192: 0.864, 16384: 0.88, 32768: 0.9, 65536: 0.894},
    "inner_gb_s": 300,
    "outer_gb_s": 45,
    "latency_ms": 0.08,
    "host_gb_s": 55,
    "index_share": 0.04,
    "fixed_index_share": 0.09,
    "scores": 690,
    "column_gb_s": 640,
    "listing_ms": 0.1,
}
_CPU: dict[str, Any] = {
    "source": "attention measured on two cores of an AMD EPYC (docs/measurements.md), the rest assumed",
    "node_ranks": 64,
    "dense_forward": 0.13,
    "dense_backward": 0.13,
    "sparse_forward": 0.17,
    "sparse_backward": 0.16,
    "ring_dense_forward": 0.17,
    "ring_dense_backward": 0.16,
    "rest": 0.1,
    "liger_rest": 0.1,
    "inner_gb_s": 2,
    "outer_gb_s": 1,
    "latency_ms": 0.2,
    "host_gb_s": 10,
    "disk_gb_s": 0.5,
    "index_share": 1.0,
    "fixed_index_share": 1.0,
    "scores": 0.1,
}
_PROFILES = [
    Hardware(name="h200", memory_gib=139, host_gib=238, **_H200),
    Hardware(name="h100", memory_gib=79, host_gib=238, **{**_H200, "source": "assumed: as h200, which has the same peak"}),
    Hardware(name="a100-80gb", memory_gib=79, host_gib=238, **_A100),
    Hardware(name="a100-40gb", memory_gib=39, host_gib=119, **_A100),
    Hardware(name="cpu", memory_gib=24, host_gib=24, **_CPU),
]


def profile_of_device(device: str) -> str | None:
    """The profile all of whose words are in the name of a device; "NVIDIA A100-SXM4-80GB" is an a100-80gb."""
    words = device.lower().replace("-", " ").split()
    return next((profile.name for profile in _PROFILES if set(profile.name.split("-")) <= set(words)), None)


def load_hardware(name: str) -> Hardware:
    """A profile by name, or from a JSON file.

    Raises:
        SparseRingError: neither a known name nor a file with these fields.
    """
    for profile in _PROFILES:
        if profile.name == name:
            return profile
    known = ", ".join(profile.name for profile in _PROFILES)
    if not Path(name).is_file():
        raise SparseRingError(f"hardware: {name!r} is neither a file nor one of {known}")
    try:
        return Hardware(**json.loads(Path(name).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:  # other fields, no JSON, no object
        what = list_problems(error) if isinstance(error, ValidationError) else error
        raise SparseRingError(
            f"hardware: {name}: {what}. Give a JSON object with the fields of Hardware (ds_sparse_ring/hardware.py), or one of "
            f"{known}"
        ) from None
