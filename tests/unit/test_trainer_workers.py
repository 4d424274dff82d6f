"""Rows that are augmented at random while they are read: the same on the ranks of a ring, others on another ring."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import TrainingArguments

from ds_sparse_ring.errors import SparseRingError
from tests.common import DistributedTest
from tests.unit.parity_model import VOCABULARY
from tests.unit.trainer_runs import arguments, ds_config, make_trainer

FORK: dict[str, Any] = {"dataloader_multiprocessing_context": "fork"}
"""Started as the ranks are, each worker would import torch anew: seconds."""
if next(iter(FORK)) not in TrainingArguments.__dataclass_fields__:
    FORK = {}  # an older Transformers


class RandomRows(torch.utils.data.Dataset):
    """Rows whose tokens come from the three random states that augmentation draws from."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [int(torch.randint(1, VOCABULARY, ())), int(np.random.randint(1, VOCABULARY)), random.randrange(1, VOCABULARY)]
        row = torch.tensor(drawn * 40 + [index + 1])
        return {"input_ids": row, "labels": row}


class PartLater(RandomRows):
    """Rows that are the same on all ranks until the third is read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.full((100,), 1 + (dist.get_rank() if index > 1 else 0))
        return {"input_ids": row, "labels": row}


def digests(trainer: Any) -> list[list[int]]:
    """What each rank read in each micro-batch of a training."""
    own: list[int] = []
    step = trainer.training_step

    def watched(model: Any, inputs: Any, *rest: Any) -> Any:
        own.append(inputs["sparse_ring"].digest)
        return step(model, inputs, *rest)

    with patch.object(trainer, "training_step", watched):
        trainer.train()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


class TestRandomRows(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("degree", "workers"), [(2, 0), (2, 2), (1, 2)])
    def test_the_ranks_of_a_ring_read_the_same_in_every_epoch(self, degree: int, workers: int, tmp_path: Path) -> None:
        fork = FORK if workers else {}
        steps = 8 if degree == 2 else 4  # two epochs
        args = arguments(tmp_path, ds_config(2, degree=degree), max_steps=steps, dataloader_num_workers=workers, **fork)
        first, second = digests(make_trainer(args, RandomRows())[0])
        assert len(first) == len(set(first)) == steps, "drawn anew, in the second epoch too"
        if degree == 2:
            assert first == second
        else:
            assert not set(first) & set(second)

    def test_rows_that_part_after_the_first_step_are_found_at_the_next_log_line(self, tmp_path: Path) -> None:
        args = arguments(tmp_path, ds_config(2, degree=2), max_steps=4, logging_steps=2)
        trainer, _ = make_trainer(args, PartLater())
        with pytest.raises(SparseRingError, match="drew different batches"):
            trainer.train()
        assert trainer.state.global_step == 4, "the first two steps have the same rows"
