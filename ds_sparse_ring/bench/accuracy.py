"""Errors of a contender against float64, beside those of PyTorch's plain attention in the contender's own dtype.

Shapes: H query heads, K key/value heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.bench.contenders import Contender, Problem

NAMES = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class ErrorLine:
    """Root mean square errors of one contender: per result (ours, PyTorch's in the same dtype); or why there are none."""

    kind: str
    density: float
    tokens: int
    name: str
    errors: dict[str, tuple[float, float]]
    why_not: str | None


def measure_errors(problem: Problem, contender: Contender) -> dict[str, tuple[float, float]]:
    """Root mean square errors of o, dq, dk, dv: the contender's, and those of PyTorch in the same dtype, under its mask.

    What comes in float32 is rounded to the dtype of q first, as the layer does.
    """
    got = [x.to(problem.q.dtype) for x in contender.results()]
    exact = plain_attention(problem, contender.visible, torch.float64)
    same = plain_attention(problem, contender.visible, problem.q.dtype)
    return {name: (_rms(g.double() - e), _rms(s.double() - e)) for name, g, s, e in zip(NAMES, got, same, exact, strict=True)}


def plain_attention(problem: Problem, visible: Callable[[int], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """o ``[H, S, D]``, dq, dk, dv under the mask ``visible(head)`` ``[S, S]``, step by step in one dtype.

    Every row needs a visible key.
    """
    group = problem.heads // problem.k.shape[0]
    results: list[list[Tensor]] = [[], [], [], []]
    for kv_head in range(problem.k.shape[0]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q, k, v = (x.to(dtype).detach().requires_grad_() for x in (problem.q[heads], problem.k[kv_head], problem.v[kv_head]))
        seen = torch.stack([visible(head) for head in range(heads.start, heads.stop)])
        with torch.enable_grad():
            o = ((q @ k.mT) * problem.scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v
        gradients = torch.autograd.grad(o, (q, k, v), problem.do[heads].to(dtype))
        for parts, part in zip(results, (o.detach(), gradients[0], gradients[1][None], gradients[2][None]), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in results]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
