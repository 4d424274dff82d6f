"""One buffer of host memory for the life of a store: reserved at once, pinned for CUDA as it is first used.

PyTorch's pinned allocator rounds to powers of two and pins per tensor; this buffer has the bytes that were asked for. Pinning
costs 0.4 s per GiB, so it is done by segments when their first byte is handed out: once, in the first step. (One call for all
would fail from 512 GiB on in the 580 series of NVIDIA's drivers.)
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from pathlib import Path

import torch

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.units import GIB

SEGMENT_BYTES = GIB
_CONTROL_GROUP, _NO_LIMIT = Path("/sys/fs/cgroup"), 1 << 60


class HostBuffer:
    """``nbytes`` of host memory, page-aligned.

    Attributes:
        bytes: uint8 ``[nbytes]``.
        pinned_bytes: how much of it is pinned by now; 0 without ``pin``.
    """

    def __init__(self, nbytes: int, *, pin: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Reserve the addresses; the memory itself comes when it is touched.

        Raises:
            SparseRingError: the system does not give that many addresses.
        """
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            memory = mmap.mmap(-1, max(nbytes, 1), flags=private)
        except (OSError, ValueError, OverflowError) as error:
            raise SparseRingError(
                f"host memory: {nbytes / GIB:.2f} GiB cannot be reserved ({error}): lower sparse_ring.offload.host_gib, or raise "
                "the limit on this process's memory (ulimit -v, vm.overcommit_memory)"
            ) from None
        with contextlib.suppress(AttributeError, OSError):  # where there are none, small pages serve: pinning then takes longer
            memory.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(AttributeError, OSError):  # a fork must not make pages copy-on-write below a device's copies
            memory.madvise(mmap.MADV_DONTFORK)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self.pinned_bytes = 0
        self._pin, self._segment_bytes = pin, segment_bytes
        self._pinned: dict[int, int] = {}  # segments by number; the address of each
        self._unpin = weakref.finalize(self, _unpin, self._pinned)

    def ready(self, begin: int, end: int) -> None:
        """Pin what is not pinned yet of these bytes.

        Raises:
            SparseRingError: the driver refuses, usually for want of memory.
        """
        if not self._pin:
            return
        for segment in range(begin // self._segment_bytes, -(-end // self._segment_bytes)):
            if segment in self._pinned:
                continue
            first = segment * self._segment_bytes
            size = min(self._segment_bytes, len(self.bytes) - first)
            address = self.bytes.data_ptr() + first
            code = torch.cuda.cudart().cudaHostRegister(address, size, 0).value
            if code:
                raise SparseRingError(
                    f"host memory: CUDA cannot pin another {size / GIB:.2f} GiB (error {code}); {self.pinned_bytes / GIB:.2f} of "
                    f"{len(self.bytes) / GIB:.2f} GiB are pinned: lower sparse_ring.offload.host_gib to what this machine has, "
                    "for all of its ranks together"
                )
            self._pinned[segment] = address
            self.pinned_bytes += size

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """These bytes, cut where segments meet: CUDA promises asynchronous copies within one registration only."""
        cuts = range((begin // self._segment_bytes + 1) * self._segment_bytes, end, self._segment_bytes)
        bounds = [begin, *cuts, end]
        return list(zip(bounds[:-1], bounds[1:], strict=True))

    def close(self) -> None:
        """Unpin; no copy may be under way."""
        self._unpin()
        self.pinned_bytes = 0


def warn_if_short(nbytes: int, ranks: int) -> None:
    """Say so when this machine seems to have less memory than ``ranks`` buffers of ``nbytes`` need.

    A warning and no error: some machines (virtual ones above all) get more memory as they touch it.
    """
    memory, limit = _meminfo(), memory_limit()
    if memory is None:
        return
    free = memory["MemAvailable"] if limit is None else min(memory["MemAvailable"], limit)
    if nbytes * ranks <= free:
        return
    asked = f"{nbytes / GIB:.1f} GiB" if ranks == 1 else f"{ranks} times {nbytes / GIB:.1f} GiB (one for each rank)"
    warnings.warn(
        f"sparse_ring.offload.host_gib: the store may pin {asked}, but {free / GIB:.1f} of this machine's "
        f"{memory['MemTotal'] / GIB:.1f} GiB are available now; when they run out the system kills the job. Lower host_gib, or "
        "add disk_path; if this machine's memory grows with its use, go on",
        stacklevel=3,
    )


def memory_limit() -> int | None:
    """Bytes that the control group of this process, a container's or a job's, may have together; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit = int((_CONTROL_GROUP / name).read_text())
            return limit if limit < _NO_LIMIT else None
    return None


def _meminfo() -> dict[str, int] | None:
    """Bytes by the names of /proc/meminfo; None where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes if {"MemAvailable", "MemTotal"} <= sizes.keys() else None


def _unpin(pinned: dict[int, int]) -> None:
    if pinned:
        torch.cuda.synchronize()  # copies may still read or write these bytes
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.popitem()[1])
