"""Long-context training with dynamic sparse attention on a striped ring, for DeepSpeed and Transformers.

``import ds_sparse_ring`` checks the installed versions and loads nothing heavy; these names are loaded when first used:

* `SparseRing`: the runtime that shards batches and runs attention over the ring;
* `SparseRingConfig`: the section ``"sparse_ring"`` of a DeepSpeed configuration;
* `attach`: makes a Transformers model attend on a ring;
* `SparseRingTrainer`: the Transformers Trainer with all of this built in;
* `use_sparse_ring`: puts a Trainer that is made already on a ring.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_sparse_ring.versions import check_versions

if TYPE_CHECKING:
    from ds_sparse_ring.config import SparseRingConfig
    from ds_sparse_ring.integrations.trainer import SparseRingMixin, SparseRingTrainer, use_sparse_ring
    from ds_sparse_ring.integrations.transformers import attach
    from ds_sparse_ring.runtime import SparseRing

__version__ = "0.1.0"

__all__ = ["SparseRing", "SparseRingConfig", "SparseRingMixin", "SparseRingTrainer", "attach", "use_sparse_ring"]

_HOMES = {
    "SparseRing": "ds_sparse_ring.runtime",
    "SparseRingConfig": "ds_sparse_ring.config",
    "SparseRingMixin": "ds_sparse_ring.integrations.trainer",
    "SparseRingTrainer": "ds_sparse_ring.integrations.trainer",
    "attach": "ds_sparse_ring.integrations.transformers",
    "use_sparse_ring": "ds_sparse_ring.integrations.trainer",
}

check_versions()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
