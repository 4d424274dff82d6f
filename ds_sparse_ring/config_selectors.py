"""The kinds of selectors, by what they choose and with which numbers; `ds_sparse_ring.select` has what they do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_sparse_ring.config_base import BLOCK_TOKENS, Strict, check_multiple


class PriceSelector(Strict):
    """One price for all heads, layers and segments: columns first, then diagonals on what is left."""

    kind: Literal["price"] = "price"

    price: float = Field(default=1.5e-4, gt=0, lt=1)
    """The least mean probability an entry must carry, per query row; above 0, below 1. Lower keeps more."""


class TopPSelector(Strict):
    """Columns and token diagonals chosen apart, each by top-p of its own mass (MTraining, arXiv 2510.18830)."""

    kind: Literal["top_p"] = "top_p"

    p: float = Field(default=0.9, gt=0, le=1)
    """Share of the probe's mass that columns, and again diagonals, must reach; above 0, at most 1."""

    min_columns: int = Field(default=0, ge=0)
    """Columns kept at least, per pattern head and segment; tokens."""

    max_columns: int | None = Field(default=None, ge=0)
    """Columns kept at most, per pattern head and segment; tokens; null is no bound."""

    min_slashes: int = Field(default=0, ge=0)
    """Token diagonals kept at least, per pattern head and segment."""

    max_slashes: int | None = Field(default=None, ge=0)
    """Token diagonals kept at most, per pattern head and segment; null is no bound."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> TopPSelector:
        for what in ("columns", "slashes"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if high is not None and low > high:
                raise ValueError(f"min_{what} = {low} is above max_{what} = {high}: lower the one or raise the other")
        return self


class FixedSelector(Strict):
    """The same number of columns and token diagonals for every pattern head and segment, those of most mass."""

    kind: Literal["fixed"] = "fixed"

    columns: int = Field(default=1000, ge=0)
    """Columns per pattern head and segment; tokens."""

    slashes: int = Field(default=6096, ge=0)
    """Token diagonals per pattern head and segment."""


class FullSelector(Strict):
    """The full causal index: dense attention, on the same ring."""

    kind: Literal["full"] = "full"


class CompleteSelector(Strict):
    """Of the selectors that say all that is active: no local blocks and no first tokens are added to what they name."""


class WindowSelector(CompleteSelector):
    """The nearest blocks and the first tokens of a document (StreamingLLM, arXiv 2309.17453)."""

    kind: Literal["window"] = "window"

    window_blocks: int = Field(default=32, ge=1)
    """Blocks of 64 tokens that a query block reads, its own and those before it."""

    sink_tokens: int = Field(default=4, ge=0)
    """First tokens of each document that all its later blocks read; tokens."""


class LongformerSelector(CompleteSelector):
    """The nearest blocks, and tokens that all later ones read (Longformer, arXiv 2004.05150, causal: global tokens are keys)."""

    kind: Literal["longformer"] = "longformer"

    window_blocks: int = Field(default=8, ge=1)
    """Blocks of 64 tokens that a query block reads, its own and those before it."""

    global_tokens: int = Field(default=64, ge=0)
    """First tokens of each document that are global; tokens."""

    global_every: int | None = Field(default=512, ge=1)
    """One more global token after every so many tokens of a document; tokens; null is none."""


class BigBirdSelector(CompleteSelector):
    """The nearest blocks, the first ones and random ones between them (BigBird, arXiv 2007.14062, causal)."""

    kind: Literal["bigbird"] = "bigbird"

    window_blocks: int = Field(default=3, ge=1)
    """Blocks of 64 tokens that a query block reads, its own and those before it."""

    sink_blocks: int = Field(default=1, ge=0)
    """First blocks of 64 tokens of each document that all its later blocks read."""

    random_blocks: int = Field(default=3, ge=0)
    """Random blocks of 64 tokens per query block, others for each pattern head and layer, the same in all steps."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the random blocks; 0 to 2**32 - 1."""


class RandomDiagonalsSelector(CompleteSelector):
    """The nearest block diagonals and random ones: what choosing by attention mass must beat."""

    kind: Literal["random_diagonals"] = "random_diagonals"

    density: float = Field(default=0.05, gt=0, le=1)
    """Share of each segment's causal pairs that the diagonals hold, the nearest ones included; above 0, at most 1."""

    window_blocks: int = Field(default=2, ge=1)
    """Nearest diagonals of 64-token blocks, kept even if they exceed the density."""

    sink_tokens: int = Field(default=4, ge=0)
    """First tokens of each document that all its later blocks read, beside the density; tokens."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the random diagonals, others for each segment, pattern head and layer, the same in all steps; 0 to 2**32 - 1."""


class EveryQuerySelector(CompleteSelector):
    """Columns that any query of a segment wants, each for itself, the nearest blocks and the first tokens.

    All queries score all keys, half the work of a dense forward pass. Use short segments (256 to 1024 tokens), and one pattern
    for all query heads of a KV head.
    """

    kind: Literal["every_query"] = "every_query"

    price: float = Field(default=0.02, gt=0, lt=1)
    """Share of a query's attention from which on a key is kept in any case, above 0, below 1; lower keeps more. It is compared
    with a sum of the largest exponential of each key block, so that keys of less than it are kept, too."""

    window_blocks: int = Field(default=2, ge=1)
    """Blocks of 64 tokens that a query block reads, its own and those before it."""

    sink_tokens: int = Field(default=4, ge=0)
    """First tokens of each document that all its later blocks read; tokens."""


class MobaSelector(CompleteSelector):
    """Key blocks whose mean key fits best to the mean query of 64 tokens (MoBA, arXiv 2502.13189)."""

    kind: Literal["moba"] = "moba"

    top_k: int = Field(default=12, ge=1)
    """Key blocks of block_tokens that a query block reads, the one that it lies in included."""

    block_tokens: int = Field(default=512, ge=BLOCK_TOKENS)
    """Tokens of a key block, counted from the document's first; a multiple of 64."""

    @model_validator(mode="after")
    def _whole_blocks(self) -> MobaSelector:
        check_multiple("block_tokens", self.block_tokens)
        return self


class XAttentionSelector(CompleteSelector):
    """The fewest key blocks of 64 tokens that hold a share of the mass by antidiagonal scores (after arXiv 2503.16428)."""

    kind: Literal["xattention"] = "xattention"

    threshold: float = Field(default=0.9, gt=0, le=1)
    """Share of a query block's estimated mass that its key blocks must reach; above 0, at most 1."""

    stride: Literal[1, 2, 4, 8, 16, 32, 64] = 16
    """Every so many antidiagonals of a block are scored; tokens. The ring gathers stride sums of keys per block of 64."""


class NormSelector(CompleteSelector):
    """Columns by the norm of their keys alone, the nearest blocks and the first tokens: activation-norm top-k."""

    kind: Literal["norm"] = "norm"

    columns: int = Field(default=1024, ge=0)
    """Columns per pattern head and segment; tokens."""

    order: Literal["largest", "smallest"] = "largest"
    """Which norms are taken; "smallest" after arXiv 2406.11430, by which keys of small norm draw attention."""

    window_blocks: int = Field(default=2, ge=1)
    """Blocks of 64 tokens that a query block reads, its own and those before it."""

    sink_tokens: int = Field(default=4, ge=0)
    """First tokens of each document that all its later blocks read, beside the columns; tokens."""


Selector = Annotated[
    PriceSelector
    | TopPSelector
    | FixedSelector
    | FullSelector
    | WindowSelector
    | LongformerSelector
    | BigBirdSelector
    | RandomDiagonalsSelector
    | EveryQuerySelector
    | MobaSelector
    | XAttentionSelector
    | NormSelector,
    Field(discriminator="kind"),
]
"""One of the kinds, by its key ``"kind"``."""

PricedSelector = PriceSelector | EveryQuerySelector
"""Kinds whose budget is a price, which a controller can move."""
