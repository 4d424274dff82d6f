"""Where what checkpointed layers keep is kept: on the device, in host memory, on the disk, or nowhere. Pure integers.

A layer keeps its input and attention's output with its log-sum-exp; with ``layer_inputs_every`` only the first of a few in a row
keeps its input. Inputs come first, since nothing can stand in for these; an output can be computed again from the index, which is
always kept. The backward pass wants last what was kept first. So tiers are filled from the last layer back to the first one, the
fastest first: what is on the device is freed first and never copied, and the disk has the first layers, which are written while
the others still run and read when their own writes are long done.

Inputs take their places before any output does, so more room in a tier never means fewer outputs kept: an input that moves up
gives at least as many outputs room below as it takes it from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.units import GIB

Place = Literal["device", "host", "disk", "recompute"]

TIERS: tuple[Place, ...] = ("device", "host", "disk")

UNIT_BYTES = 1 << 14
"""Every tensor counts as a whole number of these; pages of the store's host memory and units of its file divide them."""


@dataclass(frozen=True)
class KeptBytes:
    """What one layer keeps of one token, or of a shard; bytes.

    Attributes:
        layers: how many there are. output: attention's output and its log-sum-exp. pages: keys and values, if these are in host
            memory while a layer is at work (``kv_page_tokens``); that is reserved. inputs_every: of so many layers in a row the
            first keeps its input.
    """

    layers: int
    input: int
    output: tuple[int, ...]
    pages: int = 0
    inputs_every: int = 1

    @classmethod
    def of_token(
        cls, layers: int, width: int, heads: int, kv_heads: int, head_size: int, *, paged: bool, inputs_every: int = 1,
        input_bytes: int = 2, output_bytes: int = 2, sum_bytes: int = 4,
    ) -> KeptBytes:  # fmt: skip
        """By the sizes of a layer.

        Args:
            width: of its input. kv_heads: that a rank has keys and values of, in host memory if ``paged``. input_bytes,
                output_bytes, sum_bytes: of an element of the input, of attention's tensors, and of the log-sum-exp.
        """
        output = heads * head_size * output_bytes, heads * sum_bytes
        pages = 2 * kv_heads * head_size * output_bytes if paged else 0
        return cls(layers, width * input_bytes, output, pages, inputs_every)

    def of_shard(self, tokens: int) -> KeptBytes:
        """Of so many tokens, each tensor in whole units."""
        output = tuple(padded(nbytes * tokens) for nbytes in self.output)
        return replace(
            self, input=padded(self.input * tokens), output=output, pages=padded(self.pages * tokens) if self.pages else 0
        )

    @property
    def inputs(self) -> int:
        """How many inputs are kept."""
        return -(-self.layers // self.inputs_every)


@dataclass(frozen=True)
class Budgets:
    """Room of a rank in bytes. What is larger than ``staging`` cannot go to the disk."""

    device: int
    host: int
    disk: int = 0
    staging: int = 0

    @classmethod
    def of(cls, config: OffloadConfig) -> Budgets:
        """Those of an ``"offload"`` section."""
        disk = config.disk_gib or 0.0
        return cls(*(int(gib * GIB) for gib in (config.device_gib, config.host_gib, disk, config.staging_gib if disk else 0.0)))

    def room(self, tier: Place, nbytes: int) -> int:
        """For tensors, or a layer's output and log-sum-exp, of ``nbytes``."""
        if tier == "disk":
            return self.disk if nbytes <= self.staging else 0
        return self.device if tier == "device" else self.host


@dataclass(frozen=True)
class Ladder:
    """A place for each kept input and each layer's output; ``shard``: their sizes."""

    shard: KeptBytes
    budgets: Budgets
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    def used(self, place: Place) -> int:
        """Bytes there, at most."""
        pages = self.shard.pages if place == "host" else 0
        return pages + self.inputs.count(place) * self.shard.input + self.outputs.count(place) * sum(self.shard.output)

    @property
    def recomputed(self) -> int:
        """Layers that attend again in the backward pass."""
        return self.outputs.count("recompute")

    def lines(self) -> list[str]:
        """For people: which layers keep what where, and how much of each budget that takes."""
        every = self.shard.inputs_every
        layers = groupby(range(self.shard.layers), key=lambda i: (self.inputs[i // every], self.outputs[i]))
        parts = [_run(list(of_run), every, *places) for places, of_run in layers]
        given = {"device": self.budgets.device, "host": self.budgets.host, "disk": self.budgets.disk}
        used = [
            f"{tier} {self.used(tier) / GIB:.1f} of {given[tier] / GIB:.1f} GiB"
            for tier in TIERS
            if given[tier] or self.used(tier)
        ]
        return ["kept for the backward pass: " + "; ".join(parts), "in use by it on each rank: " + ", ".join(used)]


@lru_cache(maxsize=64)
def make_ladder(per_token: KeptBytes, tokens: int, budgets: Budgets, *, keep_outputs: bool) -> Ladder:
    """Places for a shard.

    Args:
        tokens: of the shard. keep_outputs: False: every layer attends again (``"checkpoint": "index"``).

    Raises:
        SparseRingError: the inputs do not fit, naming bytes and ways out.
    """
    shard = per_token.of_shard(tokens)
    given, budgets = budgets, replace(budgets, host=max(0, budgets.host - shard.pages))
    room = {tier: budgets.room(tier, shard.input) for tier in TIERS}
    inputs = _fill(shard.inputs, shard.input, room)
    if len(inputs) < shard.inputs:
        raise SparseRingError(_too_much(shard, budgets, tokens))
    if sum(shard.output) > budgets.staging:
        room["disk"] = 0
    outputs = _fill(shard.layers, sum(shard.output), room) if keep_outputs else []
    again: list[Place] = ["recompute"] * (shard.layers - len(outputs))
    return Ladder(shard, given, tuple(reversed(inputs)), tuple(again + outputs[::-1]))


def _fill(tensors: int, nbytes: int, room: dict[Place, int]) -> list[Place]:
    """Places of at most so many tensors, the last layer's first; takes their bytes out of ``room``."""
    places: list[Place] = []
    for tier in TIERS:
        count = min(tensors - len(places), room[tier] // nbytes)
        room[tier] -= count * nbytes
        places += [tier] * count
    return places


def _too_much(shard: KeptBytes, budgets: Budgets, tokens: int) -> str:
    needed, fit = shard.inputs * shard.input, {tier: budgets.room(tier, shard.input) // shard.input for tier in TIERS}
    left = shard.inputs - sum(fit.values())
    host = -(-(budgets.host + shard.pages + left * shard.input) * 10 // GIB) / 10
    pages = f", {shard.pages} more are reserved for keys and values" if shard.pages else ""
    disk = "a larger disk_gib" if budgets.disk else "disk_path and disk_gib"
    if budgets.disk and shard.input > budgets.staging:
        disk = f"staging_gib of at least {2 * shard.input / GIB:.2g}, through which they pass to the disk"
    return (
        f"sparse_ring.offload: the inputs of {shard.inputs} checkpointed layers for {tokens} tokens a rank needs {needed} bytes "
        f"({needed / GIB:.2f} GiB, {shard.input} bytes a layer), and there is room for {fit['device']} of them on the device "
        f"({budgets.device} bytes), {fit['host']} in host memory ({budgets.host} bytes{pages}) and {fit['disk']} on the disk "
        f"({budgets.disk} bytes): set host_gib to {host:g} or more, {disk}, a device_gib that the device has free, "
        f"layer_inputs_every = {2 * shard.inputs_every} with layer_chunk_tokens, which keeps fewer of them, or share a sequence "
        "among more ranks (degree)"
    )


def _run(layers: Sequence[int], every: int, of_input: Place, of_output: Place) -> str:
    numbers = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
    output = "attended again" if of_output == "recompute" else f"output {of_output}"
    kept = "input" if every == 1 else f"1 input in {every}"
    return f"{numbers}: {kept} {of_input}, {output}"


def padded(nbytes: int, unit: int = UNIT_BYTES) -> int:
    """In whole units, at least one."""
    return max(1, -(-nbytes // unit)) * unit
