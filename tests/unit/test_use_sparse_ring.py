"""One call puts a stock Trainer on a ring, and says so if it comes too late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.trainer import SparseRingMixin, SparseRingTrainer, use_sparse_ring
from ds_sparse_ring.runtime import SparseRing
from tests.common import DistributedTest
from tests.unit.parity_model import section, tiny_model
from tests.unit.test_integration_trainer import Endless
from tests.unit.trainer_runs import Recorder, arguments, ds_config, make_rows, make_trainer


class Halving(Trainer):
    """A user's subclass that changes the loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss / 2


def stock(args: Any, rows: Any, kind: type[Trainer] = Trainer, **values: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    values = {"model": tiny_model(), **values}
    return kind(args=args, train_dataset=rows, eval_dataset=rows, callbacks=[recorder], **values), recorder


class TestStockTrainer(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("degree", [1, 2])
    def test_trains_and_evaluates_as_ours_does(self, degree: int, tmp_path: Path) -> None:
        rows = make_rows([150, 201, 64, 97])
        config = ds_config(selector="price", degree=degree)
        ours, expected = make_trainer(arguments(tmp_path, config), rows, eval_dataset=rows)
        ours.train()
        trainer, recorder = stock(arguments(tmp_path, config), rows)
        use_sparse_ring(trainer)
        assert type(trainer) is SparseRingTrainer
        trainer.train()
        assert recorder.of("loss") == expected.of("loss") and len(recorder.of("loss")) == 2
        assert recorder.of("grad_norm") == expected.of("grad_norm") and recorder.of("density") == expected.of("density")
        assert trainer.evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]

    def test_a_stream_of_rows_and_a_model_that_is_made_later(self, tmp_path: Path) -> None:
        # of streams rank 0 would read for everyone: accelerate's own choice, which is undone in a Trainer that is made already
        rows = make_rows([150, 201, 64, 97])
        ours, expected = make_trainer(arguments(tmp_path), rows)
        ours.train()
        trainer, recorder = stock(arguments(tmp_path), Endless(rows), model=None, model_init=lambda: tiny_model())
        use_sparse_ring(trainer)
        trainer.train()
        assert recorder.of("loss") == pytest.approx(expected.of("loss"), rel=1e-6)

    def test_a_subclass_keeps_what_it_changes(self, tmp_path: Path) -> None:
        rows = make_rows([150, 201])
        ours, expected = make_trainer(arguments(tmp_path, max_steps=1), rows)
        ours.train()
        trainer, recorder = stock(arguments(tmp_path, max_steps=1), rows, Halving)
        use_sparse_ring(trainer)
        assert isinstance(trainer, Halving) and isinstance(trainer, SparseRingMixin)
        trainer.train()
        assert recorder.of("loss") == pytest.approx([expected.of("loss")[0] / 2], rel=1e-5)

    def test_a_call_that_comes_too_late_is_refused(self, tmp_path: Path) -> None:
        rows = make_rows([50, 60])
        trainer, _ = stock(arguments(tmp_path, max_steps=1), rows)
        use_sparse_ring(trainer)
        with pytest.raises(SparseRingError, match="SparseRingTrainer is on a ring already"):
            use_sparse_ring(trainer)
        for begin in (Trainer.train, Trainer.evaluate):
            trainer, _ = stock(arguments(tmp_path, max_steps=1), rows)
            begin(trainer)
            with pytest.raises(SparseRingError, match="has begun .* call use_sparse_ring right after it is made"):
                use_sparse_ring(trainer)
        assert type(trainer) is Trainer

    @pytest.mark.parametrize(
        ("section_name", "values", "loss", "message"),
        [
            ("other", {}, None, r'add "sparse_ring"'),
            ("sparse_ring", {"average_tokens_across_devices": False}, None, "average_tokens_across_devices"),
            ("sparse_ring", {}, print, "override compute_loss"),
        ],
    )
    def test_arguments_are_checked_as_those_of_our_trainer(
        self, section_name: str, values: dict[str, Any], loss: Any, message: str, tmp_path: Path
    ) -> None:
        config = ds_config()
        config[section_name] = config.pop("sparse_ring")
        trainer, _ = stock(arguments(tmp_path, config, **values), make_rows([50]), compute_loss_func=loss)
        with pytest.raises(SparseRingError, match=message):
            use_sparse_ring(trainer)
        assert type(trainer) is Trainer, "left as it was"

    def test_only_a_trainer_that_is_made_is_taken(self) -> None:
        with pytest.raises(SparseRingError, match="takes an instance of transformers.Trainer, not type"):
            use_sparse_ring(Trainer)  # type: ignore[arg-type]

    def test_a_ring_of_ones_own_without_deepspeed(self, tmp_path: Path) -> None:
        args = arguments(tmp_path, deepspeed=None, max_steps=1)
        _ = args.device
        trainer, recorder = stock(args, make_rows([150]))
        use_sparse_ring(trainer, SparseRing(SparseRingConfig(**section())))
        trainer.train()
        assert trainer.ring.axes.sequence_size == dist.get_world_size() and recorder.of("density") == [1.0]
