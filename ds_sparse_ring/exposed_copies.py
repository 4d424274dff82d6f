"""Copies of what checkpointed layers keep, to host memory or the disk and back, as far as computation does not hide them.

A layer's copies run beside one layer's computation: forward no more tensors may wait to be written than staging memory holds,
backward two tensors come ahead (`spill`). All of them take the link between the device and host memory, those of the disk at the
same time the disk; the slower one counts. Times in ms.
"""

from __future__ import annotations

from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.ladder import Ladder


def exposed_copies_ms(ladder: Ladder, hardware: Hardware, forward_ms: float, backward_ms: float, again_ms: float) -> float:
    """Of both passes of all layers.

    Args:
        forward_ms, backward_ms: what a layer computes. again_ms: what it computes more in the backward pass if its output was
            not kept.
    """
    shard, exposed = ladder.shard, 0.0
    for layer, of_output in enumerate(ladder.outputs):
        group, place = divmod(layer, shard.inputs_every)
        of_input = ladder.inputs[group] if place == 0 else "recompute"
        places = ((of_input, shard.input), (of_output, sum(shard.output)))
        outside = sum(nbytes for place, nbytes in places if place in ("host", "disk"))
        disk_ms = sum(nbytes for place, nbytes in places if place == "disk") / hardware.disk_gb_s / 1e6
        beside = backward_ms + (again_ms if of_output == "recompute" else 0.0)
        exposed += max(0.0, outside / hardware.host_gb_s / 1e6 - forward_ms, disk_ms - forward_ms)
        exposed += max(0.0, (outside + shard.pages) / hardware.host_gb_s / 1e6 - beside, disk_ms - beside)
    return exposed
