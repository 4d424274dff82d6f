"""One small call of every GPU kernel, for compute-sanitizer (make test-gpu-sanitize): no library of others runs beside them."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.kernels import GPU_BACKENDS, get_kernel
from ds_sparse_ring.op_builder import CUDAAttentionBuilder
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from tests.kernel_checks import make_gradient, make_index, make_sequence, on_device, run
from tests.unit.reference import global_qkv

SELECTORS: list[dict[str, Any]] = [
    {"kind": "price", "price": 1e-3},
    {"kind": "top_p", "p": 0.7},
    {"kind": "fixed", "columns": 40, "slashes": 6},
    {"kind": "every_query"},
]


def main() -> None:
    """Attention by every kind of index, merging and overwriting; selection by every selector."""
    sequence = make_sequence([333, 65])
    backends = [name for name in GPU_BACKENDS if name != "cuda" or CUDAAttentionBuilder().is_available()]
    for head_size, kind in product((128, 64), ("vertical-slash", "block-lists", "full")):
        q, k, v = (x.to("cuda", torch.bfloat16) for x in global_qkv(sequence, 4, 2, head_size))
        index = on_device(make_index(kind, sequence, 4, 1), q.device)
        for backend, overwrite in product(backends, (False, True)):
            run(get_kernel(backend), q, k, v, make_gradient(q), index, 0.1, overwrite=overwrite)
            torch.cuda.synchronize()
            print("attention", backend, head_size, "dims", kind, "overwriting" if overwrite else "merging", flush=True)
    for selector in SELECTORS:
        ring = SparseRing(SparseRingConfig(selector=selector, segment_tokens=128))
        batch = ring.sequence_batch({"input_ids": torch.zeros(1, 700, dtype=torch.int64)})
        q, k, _ = (x.to("cuda", torch.bfloat16) for x in global_qkv(batch["sparse_ring"], 4, 2, 128))
        select_index(q, k, ring.bind(batch["sparse_ring"]), scale=0.1)
        torch.cuda.synchronize()
        print("selection", selector["kind"], flush=True)


if __name__ == "__main__":
    main()
