"""Data loading along the data axis: all ranks of a ring draw the same rows, every ring as many batches as the others.

The loaders are those that Trainer and accelerate prepare; they are told to count rings instead of processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.trainer_utils import seed_worker

from ds_sparse_ring.batch import IGNORE
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.errors import SparseRingError

PRESENT_ROWS = "present_rows"
"""Entry of an evaluation batch in which rows are missing: how many there are."""


@dataclass(frozen=True)
class Absent:
    """A row that evaluation data lacks; ``row`` is any row of the dataset, to have the right form."""

    row: Any


class CompleteRows(Dataset):
    """A dataset made longer by absent rows, up to a multiple of ``rows``.

    All rings then run equally many batches, as collectives need, and no row counts twice (stock loaders repeat rows).
    """

    def __init__(self, dataset: Any, rows: int, columns: frozenset[str] | None = None) -> None:
        self.dataset = dataset
        self.present = len(dataset)
        self._length = -(-self.present // rows) * rows
        self._columns = columns

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] if index < self.present else _absent(self.dataset[0], self._columns)


class Stream(IterableDataset):
    """An iterable dataset that accelerate leaves whole. (It would give each process shards of a dataset of files.)"""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        yield from self.dataset

    def set_epoch(self, epoch: int) -> None:
        """Passed on, for datasets that shuffle."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class CompleteStream(Stream):
    """`CompleteRows` for an iterable dataset."""

    def __init__(self, dataset: Any, rows: int, columns: frozenset[str] | None = None) -> None:
        super().__init__(dataset)
        self._rows = rows
        self._columns = columns
        self.present: int | None = None

    def __iter__(self) -> Iterator[Any]:
        first, count = None, 0
        for row in self.dataset:
            first, count = row if count == 0 else first, count + 1
            yield row
        self.present = count
        for _ in range(-count % self._rows):
            yield _absent(first, self._columns)


def _absent(row: Any, columns: frozenset[str] | None) -> Absent:
    # Trainer's collator takes unused columns out of rows, but cannot look into this one.
    if columns is None or not isinstance(row, dict):
        return Absent(row)
    return Absent({key: value for key, value in row.items() if key in columns})


def present_rows(dataset: Any) -> int | None:
    """Rows of an evaluation dataset without the absent ones; None if it is another dataset or was not read here."""
    while dataset is not None and not isinstance(dataset, CompleteRows | CompleteStream):
        dataset = getattr(dataset, "dataset", None)
    return None if dataset is None else dataset.present


@dataclass(frozen=True)
class BatchCollator:
    """The sharding collator; absent rows are left out, and a batch of nothing else has no targets."""

    collate: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, rows: SequenceOf[Any]) -> dict[str, Any]:
        present = [row for row in rows if not isinstance(row, Absent)]
        if len(present) == len(rows):
            return self.collate(present)
        batch = self.collate(present or [rows[0].row])
        if not present:
            for key in ("labels", "shift_labels"):
                if key in batch:
                    batch[key] = torch.full_like(batch[key], IGNORE)
        return {**batch, PRESENT_ROWS: len(present)}


def follow_data_axis(loader: DataLoader, axes: Axes, *, is_training: bool) -> DataLoader:
    """Make a loader that accelerate has prepared give each ring, not each process, batches of its own.

    Raises:
        SparseRingError: a loader of another kind, which would give the ranks of a ring different rows.
    """
    shards = [s for s in (loader.batch_sampler, loader.dataset) if isinstance(s, BatchSamplerShard | IterableDatasetShard)]
    for shard in shards:
        shard.num_processes, shard.process_index = axes.data_size, axes.data_rank
        if isinstance(shard, BatchSamplerShard) and axes.data_size == 1:
            shard.even_batches = False  # nothing to even out: the last batch is as short as on one process
    if axes.world_size > 1 and not shards:
        raise SparseRingError(
            f"data loader: {type(loader).__name__} does not shard as accelerate's DataLoaderShard does; let Trainer make it"
        )
    if is_training and loader.num_workers:
        base = getattr(loader, "base_dataloader", loader)
        # seeded by rank, workers of one ring would augment the same rows differently
        base.worker_init_fn = functools.partial(seed_worker, num_workers=loader.num_workers, rank=axes.data_rank)
    return loader


def check_same_batch(digest: int, axes: Axes, device: torch.device) -> None:
    """Compare the batches that the ranks of a ring drew. Collective over the ring.

    Args:
        digest: `Sequence.digest` of a batch, or a checksum of those of several.

    Raises:
        SparseRingError: on all ranks of the ring, if they differ.
    """
    digests = axes.sequence_gather(torch.tensor(digest, device=device))
    if any(int(other) != digest for other in digests):
        raise SparseRingError(
            f"the {axes.sequence_size} ranks of a ring drew different batches, but they share each sequence: seed "
            "shuffling and augmentation by the data axis (axes.data_rank), not by the rank, and do not split the "
            "dataset by rank"
        )


def gather_rows(values: Any, axes: Axes) -> Any:
    """Rows of all rings, in the order of the data axis. Collective over the data axis.

    Args:
        values: a tensor ``[rows, ...]``, or tuples and lists of such. Rows may differ over rings, other dims not.
    """
    if isinstance(values, tuple | list):
        return type(values)(gather_rows(value, axes) for value in values)
    if axes.data_size == 1:
        return values
    rows: Tensor = values
    count = torch.tensor(rows.shape[0], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(axes.data_size)]
    dist.all_gather(counts, count, group=axes.data_group)
    padded = rows.new_zeros(max(int(c) for c in counts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=axes.data_group)
    return torch.cat([part[: int(c)] for part, c in zip(parts, counts, strict=True)])
