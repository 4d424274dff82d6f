"""Liger's fused kernels for what is not attention: norms, rotary embedding, the MLP's gate.

At 5 % density four fifths of a step are not attention, and a third of that is element by element, in kernels that read and write
memory and do little else. Trainer has ``use_liger_kernel`` for it; this is the same for a loop of one's own.
"""

from __future__ import annotations

import importlib.util

from torch import nn

from ds_sparse_ring.errors import SparseRingError


def use_liger_kernels(model: nn.Module) -> None:
    """Let a Transformers model on a GPU, or a PEFT model around one, compute norms, rotary embedding and gates by Liger.

    The loss stays the model's own, which `enable_tiled_loss` can tile: the one that Liger fuses with the last layer reads weights
    that ZeRO-3 has not gathered.

    Raises:
        SparseRingError: Liger is not installed, or does not know the model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise SparseRingError("liger kernels: not installed; pip install liger-kernel, or leave them out")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise SparseRingError(f"liger kernels: none for {type(model).__name__} ({kind!r}), only for {known}; leave them out")
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
