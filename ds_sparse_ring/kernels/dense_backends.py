"""Causal attention over one document by the libraries that have it, each behind the same two functions.

Shapes: H query heads, K key/value heads (H a multiple of K), n tokens of the document, D head size. q, o, do: ``[H, n, D]``;
k, v: ``[K, n, D]``, one dtype; lse_nat: ``[H, n]`` float32 (float64 for float64 inputs), the natural logarithm of the sum of
exponentials of the scaled scores. Each library gets views in the order that it wants; nothing is copied before the call.

The functions that take a log-sum-exp and give gradients are internals of their libraries, so that versions are bounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Protocol

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class DenseCase:
    """What is to be attended: where, in which dtype, and the numbers of heads and their size."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> DenseCase:
        """The case of queries ``[H, n, D]`` and keys ``[K, n, D]``."""
        return cls(q.device, q.dtype, q.shape[-1], q.shape[0], k.shape[0])


class DenseBackend(Protocol):
    """One library. `refusal` is asked first; the other two rely on its answer."""

    @property
    def name(self) -> str:
        """How it is asked for."""

    def version(self) -> str | None:
        """What is installed, None if nothing is."""

    def refusal(self, case: DenseCase) -> str | None:
        """Why the library cannot be used for ``case``; None if it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """o ``[H, n, D]`` in the dtype of q, and lse_nat ``[H, n]``."""

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        """dq, dk, dv in the shapes and the dtype of q, k, v."""


class _FlashAttention:
    """What FlashAttention 2, 3 and 4 share: tensors ``[1, n, heads, D]`` in half precision on CUDA."""

    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    supported: ClassVar[str]
    capability: ClassVar[int]
    """Lowest major compute capability."""

    def version(self) -> str | None:
        return next((found for name in self.distributions if (found := _installed(name))), None)

    def refusal(self, case: DenseCase) -> str | None:
        found = self.version()
        if found is None:
            return "not installed"
        if Version(found) not in SpecifierSet(self.supported, prereleases=True):
            return f"{found} is installed, {self.supported} is needed"
        if case.device.type != "cuda":
            return "runs on CUDA only"
        major, minor = torch.cuda.get_device_capability(case.device)
        if major < self.capability:
            return f"needs compute capability {self.capability}.0, this is {major}.{minor}"
        if case.dtype not in (torch.float16, torch.bfloat16):
            return f"has no {_name(case.dtype)}"
        if case.head_size % 8 or case.head_size > 256:
            return f"head size {case.head_size} is no multiple of 8 up to 256"
        functions = self.functions()
        return functions if isinstance(functions, str) else None

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
        """The library's forward and backward function, or why they cannot be imported."""
        raise NotImplementedError

    def _function(self, which: int) -> Callable[..., Any]:
        functions = self.functions()
        if isinstance(functions, str):
            raise ImportError(functions)
        return functions[which]


class FlashAttention4(_FlashAttention):
    """flash-attn-4, the CuTe DSL kernels (Hopper, Blackwell). Compiles for each new set of options: seconds, once."""

    name = "flash-attn-4"
    distributions = ("flash-attn-4",)
    supported = ">=4.0.0b36,<5"
    capability = 9

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
        return _import("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(q.device):
            out, lse, *_ = self._function(0)(*_tokens_first(q, k, v), softmax_scale=scale, causal=True, return_lse=True)
        return out[0].transpose(0, 1), lse[0]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        q_, k_, v_, o_, do_ = _tokens_first(q, k, v, o, do)
        with torch.cuda.device(q.device):
            dq, dk, dv, *_ = self._function(1)(
                q_, k_, v_, o_, do_, _rows(lse), softmax_scale=scale, causal=True, deterministic=_deterministic()
            )
        return _heads_first(dq, dk, dv)


class FlashAttention3(_FlashAttention):
    """FlashAttention 3, the CUDA C++ kernels for Hopper."""

    name = "flash-attn-3"
    distributions = ("flash-attn-3", "flash_attn_3")
    supported = ">=3.0.0b1,<4"
    capability = 9

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
        return _import("flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(q.device):
            out, lse, *_ = self._function(0)(*_tokens_first(q, k, v), softmax_scale=scale, causal=True)
        return out[0].transpose(0, 1), lse[0]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        q_, k_, v_, o_, do_ = _tokens_first(q, k, v, o, do)
        gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_, k_, v_))
        lengths = (None,) * 6  # of several sequences in one call
        with torch.cuda.device(q.device):
            self._function(1)(do_, q_, k_, v_, o_, _rows(lse), *lengths, *gradients, scale, True, deterministic=_deterministic())
        return _heads_first(*gradients)


class FlashAttention2(_FlashAttention):
    """FlashAttention 2 of the package flash-attn (Ampere and later)."""

    name = "flash-attn-2"
    distributions = ("flash-attn",)
    supported = ">=2.7,<3"  # 2.7 changed what both functions take and give
    capability = 8

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
        return _import("flash_attn.flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(q.device):
            out, lse, *_ = self._function(0)(*_tokens_first(q, k, v), 0.0, scale, True, -1, -1, 0.0, None, False)
        return out[0].transpose(0, 1), lse[0]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        q_, k_, v_, o_, do_ = _tokens_first(q, k, v, o, do)
        gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_, k_, v_))
        with torch.cuda.device(q.device):
            self._function(1)(do_, q_, k_, v_, o_, _rows(lse), *gradients, 0.0, scale, True, -1, -1, 0.0, None, _deterministic())
        return _heads_first(*gradients)


class _TorchCUDA:
    """What the fused CUDA operators behind ``scaled_dot_product_attention`` share. torch itself says what they take."""

    name: ClassVar[str]

    def version(self) -> str | None:
        return torch.__version__

    def refusal(self, case: DenseCase) -> str | None:
        if case.device.type != "cuda":
            return "runs on CUDA only"
        shapes = ((1, heads, 128, case.head_size) for heads in (case.heads, case.kv_heads, case.kv_heads))
        q, k, v = (torch.empty(shape, dtype=case.dtype, device=case.device, requires_grad=True) for shape in shapes)
        if not self.takes(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, case.heads != case.kv_heads)):
            return f"torch refuses {_name(case.dtype)}, head size {case.head_size}, {case.heads}:{case.kv_heads} heads here"
        return None

    def takes(self, params: Any) -> bool:
        """Whether torch would use the operator."""
        raise NotImplementedError


class TorchCuDNN(_TorchCUDA):
    """cuDNN's attention, as shipped with torch."""

    name = "torch-cudnn"

    def version(self) -> str | None:
        return f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}" if torch.backends.cudnn.is_available() else None

    def takes(self, params: Any) -> bool:
        return bool(torch.backends.cuda.can_use_cudnn_attention(params))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q[None], k[None], v[None], None, True, 0.0, True, False, scale=scale
        )
        return out[0], lse.view(q.shape[:2])  # [1, H, n, 1]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        n, unused = q.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)  # of the random numbers of dropout
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do[None], q[None], k[None], v[None], o[None], lse.contiguous()[None, :, :, None],
            unused, unused, None, None, None, n, n, 0.0, True, scale=scale,
        )  # fmt: skip
        return dq[0], dk[0], dv[0]


class TorchFlash(_TorchCUDA):
    """FlashAttention 2, as compiled into torch."""

    name = "torch-flash"

    def takes(self, params: Any) -> bool:
        return bool(torch.backends.cuda.can_use_flash_attention(params))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], 0.0, True, False, scale=scale
        )
        return out[0], lse[0, :, : q.shape[1]]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        n, unused = q.shape[1], torch.zeros(2, dtype=torch.int64, device=q.device)  # of the random numbers of dropout
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do[None], q[None], k[None], v[None], o[None], _rows(lse), None, None, n, n, 0.0, True, unused, unused, scale=scale
        )
        return dq[0], dk[0], dv[0]


class TorchCPU:
    """torch's fused attention for CPUs."""

    name = "torch-cpu"

    def version(self) -> str | None:
        return torch.__version__

    def refusal(self, case: DenseCase) -> str | None:
        return None if case.device.type == "cpu" else "runs on the CPU only"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None], 0.0, True, scale=scale)
        return out[0], lse[0]

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> Gradients:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do[None], q[None], k[None], v[None], o[None], lse[None], 0.0, True, scale=scale
        )
        return dq[0], dk[0], dv[0]


BACKENDS: tuple[DenseBackend, ...] = (
    FlashAttention4(),
    FlashAttention3(),
    TorchCuDNN(),
    FlashAttention2(),
    TorchFlash(),
    TorchCPU(),
)
"""Fastest first, as measured on a Hopper GPU."""


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def _import(module: str, *names: str) -> tuple[Any, Any] | str:
    """Two attributes of a module, or why it cannot be imported; tried once."""
    try:
        found = importlib.import_module(module)
        first, second = (getattr(found, name) for name in names)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a library built for another CUDA
        return f"cannot be imported: {error}"
    return first, second


def _deterministic() -> bool:
    """Whether the user asked torch for the same bits on every run; torch's own operators see to it themselves."""
    return torch.are_deterministic_algorithms_enabled()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[heads, n, D]`` as ``[1, n, heads, D]``."""
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _heads_first(dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _rows(lse: Tensor) -> Tensor:
    """``[H, n]`` as the contiguous ``[1, H, n]`` that the CUDA kernels read without looking at strides."""
    return lse.contiguous()[None]
