"""Builders of the package's compiled kernels, in the manner of DeepSpeed's op builders.

Imported as ``ds_sparse_ring.op_builder``. It holds no builder yet: the ``torch`` backend needs nothing compiled.

This folder must never be installed as a top-level package ``op_builder``: DeepSpeed looks for one of that name.
"""
