"""What members of ``report_to`` are given: every figure of a step, those of each layer, and those of an evaluation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from transformers.integrations import integration_utils

from tests.common import DistributedTest
from tests.unit.trainer_runs import Recorder, arguments, ds_config, make_rows, make_trainer

STEP = ("loss", "tokens_per_s", "step_s", "density", "recall", "column_density", "pair_imbalance", "time_imbalance", "exposed")
LAYERS = tuple(f"{key}_layer_{layer:02}" for key in ("density", "recall") for layer in range(2))
EVALUATION = ("loss", "density", "recall")


class Board(Recorder):
    """A member of ``report_to`` that keeps what it is given."""

    lines_of_all: list[dict[str, float]] = []

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        super().on_log(*args, **kwargs)
        self.lines_of_all.append(self.lines[-1])


def train_and_evaluate(folder: Path, board: str, **values: Any) -> Recorder:
    """Two steps and an evaluation, reported to ``board``; what the log had."""
    rows = make_rows([200] * 2)
    args = arguments(folder, ds_config(selector="price"), report_to=[board], run_name="tiny", **values)
    trainer, recorder = make_trainer(args, rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    return recorder


def reported(recorder: Recorder, prefix: str, separator: str) -> dict[str, list[float]]:
    """What a board must hold, under its names."""
    step = {f"{prefix}{key}": recorder.of(key) for key in STEP}
    return step | {f"eval{separator}{key}": recorder.of(f"eval_{key}") for key in EVALUATION}


class TestAnyBoard(DistributedTest):
    world_size = 2

    def test_any_member_of_report_to_gets_every_figure(self, tmp_path: Path) -> None:
        with patch.dict(integration_utils.INTEGRATION_TO_CALLBACK, {"board": Board}):
            recorder = train_and_evaluate(tmp_path, "board")
        lines = Board.lines_of_all
        for key, values in reported(recorder, "", "_").items():
            assert [line[key] for line in lines if key in line] == values and values, key
        for key in LAYERS:
            assert sum(key in line for line in lines) == 2, key
            assert not recorder.of(key), "of each layer the screen shows nothing"


class TestBoards(DistributedTest):
    world_size = 2
    fresh = True  # both libraries keep a service and a run of the process

    @pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
    def test_weights_and_biases_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb: Any = import_module("wandb")
        for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CONSOLE": "off"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        recorder = train_and_evaluate(tmp_path, "wandb")
        if dist.get_rank() == 0:
            summary = dict(wandb.run.summary)  # the last value of each name
            for key, values in reported(recorder, "train/", "/").items():
                assert summary[key] == pytest.approx(values[-1]), key
            assert {f"train/{key}" for key in LAYERS} <= set(summary)
            wandb.finish()
            assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

    @pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
    def test_trackio(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        trackio: Any = import_module("trackio")
        storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
        recorder = train_and_evaluate(tmp_path, "trackio", project="rings")
        if dist.get_rank() == 0:
            trackio.finish()  # writes what is left
            lines = storage.get_logs("rings", "tiny")
            for key, values in reported(recorder, "train/", "/").items():
                assert [line[key] for line in lines if key in line] == pytest.approx(values), key
            assert {f"train/{key}" for key in LAYERS} <= {key for line in lines for key in line}
