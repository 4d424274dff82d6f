"""Whether all ranks have the same configuration: with another one a rank would send other bytes, in another order.

Asked of the store through which torch.distributed found its ranks: on no device, and before there are groups, which the section
decides on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch.distributed as dist

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError

_SHOWN = 3
"""Keys that a message names."""


def check_same_section(config: SparseRingConfig) -> None:
    """Compare the section with those of all ranks of the world, each of which calls it, as often and in the same order.

    ``offload.disk_path`` may differ: hosts have disks of their own.

    Raises:
        SparseRingError: ranks have another section than rank 0; on all ranks, with the first keys that differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    world, rank = dist.get_world_size(), dist.get_rank()
    default: Any = dist.distributed_c10d._get_default_store()
    if default is None:  # MPI has none
        return
    store = dist.PrefixStore("sparse_ring", default)
    ring = store.add(f"rings of {rank}", 1)
    section = config.model_dump_json(exclude={"offload": {"disk_path"}})
    store.set(f"section {ring} {rank}", section)
    store.set(f"digest {ring} {rank}", hashlib.sha256(section.encode()).hexdigest())
    digests = [store.get(f"digest {ring} {other}") for other in range(world)]
    others = [other for other, digest in enumerate(digests) if digest != digests[0]]
    if others:
        first, other = (json.loads(store.get(f"section {ring} {of}")) for of in (0, others[0]))
        raise SparseRingError(_describe(others, first, other))


def _describe(others: list[int], first: dict[str, Any], other: dict[str, Any]) -> str:
    keys = [key for key in first if first[key] != other[key]]
    shown = "; ".join(
        f"sparse_ring.{key} is {json.dumps(first[key])} on rank 0 and {json.dumps(other[key])} on rank {others[0]}"
        for key in keys[:_SHOWN]
    )
    more = f"; {len(keys) - _SHOWN} more keys differ" if len(keys) > _SHOWN else ""
    ranks = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    return (
        f"the section differs between ranks: {len(others)} have another one than rank 0 ({ranks}): {shown}{more}: start all "
        "ranks with the same configuration; offload.disk_path alone may differ"
    )
