"""Random numbers without a state: hashes of what they are for, the same on every rank, device and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BITS = 32
_MASK = (1 << _BITS) - 1


def hashed(*parts: int | Tensor) -> Tensor:
    """Integers below 2**32 from integers below 2**32 (broadcast together), int64."""
    state: Any = 0  # stays a number of the host until the first tensor
    for part in parts:
        state = _mixed((state + 0x9E3779B9 + part) & _MASK)
    return torch.as_tensor(state)


def _mixed(x: Any) -> Any:
    """A bijection of 32-bit integers; both factors are below 2**31, so that no product leaves int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def drawn(hashes: Tensor, turn: Tensor, number: Tensor, count: Tensor, total: Tensor) -> Tensor:
    """Random number ``number`` of ``count`` distinct integers of ``[0, total)``, each of which is as likely as any other.

    One from each of ``count`` parts, as equal as possible, of the range, which is then turned by a random distance: they spread
    more evenly than free draws. They are not in order.

    Args:
        hashes: int64 below 2**32, one for each; turn: the same for all numbers of a range. ``count`` is between 1 and ``total``.
    """
    low, high = number * total // count, (number + 1) * total // count
    return (low + ((hashes * (high - low)) >> _BITS) + ((turn * total) >> _BITS)) % total
