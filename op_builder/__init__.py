"""Builders of the compiled kernels, in DeepSpeed's manner.

An op is compiled when it is first loaded (JIT) or ahead of time by ``DS_BUILD_OPS=1 pip install .``; `load` takes the prebuilt
module if there is one. The sources are in ``ds_sparse_ring/csrc``.
"""

from __future__ import annotations

from ds_sparse_ring.op_builder.cpu_attention import CPUAttentionBuilder
from ds_sparse_ring.op_builder.cuda_attention import CUDAAttentionBuilder

ALL_BUILDERS = (CPUAttentionBuilder, CUDAAttentionBuilder)
"""Every op of this package, for reports and for building ahead of time."""

__all__ = ["ALL_BUILDERS", "CPUAttentionBuilder", "CUDAAttentionBuilder"]
