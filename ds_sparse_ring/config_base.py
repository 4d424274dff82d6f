"""What the parts of the configuration have in common: how strictly they are read, and the size of a block."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

BLOCK_TOKENS = 64
"""Tokens of a block, as in `ds_sparse_ring.layout`, which is not imported here: the configuration is read without torch."""


class Strict(BaseModel):
    """Immutable, no unknown keys, no silent conversion ("2" is not 2, and true is not 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def check_multiple(name: str, tokens: int | None) -> None:
    """Refuse a number of tokens that is not one of whole blocks; None is none.

    Raises:
        ValueError: with the next numbers that are.
    """
    if tokens is not None and tokens % BLOCK_TOKENS:
        below = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        raise ValueError(f"{name} = {tokens} is not a multiple of {BLOCK_TOKENS}: use {below} or {below + BLOCK_TOKENS}")
