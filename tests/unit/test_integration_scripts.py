"""train/pretrain.py and train/finetune.py from end to end, on tiny models and texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import full_state_dict, save_pretrained
from ds_sparse_ring.run_log import read_maps, read_run
from ds_sparse_ring.train.finetune import DataArguments, ModelArguments, build_trainer, checkpoint_to_resume
from ds_sparse_ring.train.model import build_model, load_config, load_tokenizer
from ds_sparse_ring.train.pretrain import PretrainArguments, Pretraining
from ds_sparse_ring.train.recipes import RECIPES, Recipe
from tests.common import DistributedTest, rank_device
from tests.unit.parity_model import CHECKPOINTING, VOCABULARY, section, word_tokenizer

from .corpus import FRESH


def write_config(folder: Path, stage: int, selector: str = "price", **ring: Any) -> str:
    """A DeepSpeed file in the form of ds_configs/, the same from every rank."""
    adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "sparse_ring": section(selector, log_steps=2, **ring),
    }
    path = folder / f"ds_{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    return str(path)


def options(corpus: Path, config: str, output: Path, **values: Any) -> PretrainArguments:
    return PretrainArguments(
        deepspeed=config,
        fresh_config=json.dumps(FRESH),
        tokenizer=str(corpus / "model"),
        text=[str(corpus / "text")],
        output=str(output),
        **{"sequence_tokens": 192, "steps": 6, "learning_rate": 3e-3, "evaluation_sequences": 3, **values},
    )


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class TestPretrain(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("stage", "degree"), [(1, 2), (3, 2), (3, 1)])
    @pytest.mark.slow(stage=[3], degree=[1])
    def test_a_resumed_run_equals_one_that_was_not_stopped(self, stage: int, degree: int, corpus: Path, tmp_path: Path) -> None:
        # with two rings, layers in chunks and a stream of rows, which goes through several epochs
        in_chunks: dict[str, Any] = {"layer_chunk_tokens": 70} if degree == 1 else {}
        moving: dict[str, Any] = {"schedule": {"target_density": 0.4, "gain": 1.0}} if stage == 1 else {}
        config = write_config(tmp_path, stage, degree=degree, **in_chunks, **moving)
        values: dict[str, Any] = {
            "accumulation": 2,
            "save_steps": 3,
            "evaluation_steps": 4,
            "gradient_checkpointing": True,
            "streaming": degree == 1,
        }
        whole = Pretraining(options(corpus, config, tmp_path / "whole", **values))
        whole.run()
        expected = full_state_dict(whole.engine)
        latest = tmp_path / "whole" / "checkpoints" / "latest"
        if dist.get_rank() == 0:
            assert latest.read_text() == "step6"
            latest.write_text("step3")  # as if it had been stopped there
            (tmp_path / "whole" / "checkpoints").rename(tmp_path / "checkpoints")
            (tmp_path / "resumed").mkdir()
            (tmp_path / "checkpoints").rename(tmp_path / "resumed" / "checkpoints")
        dist.barrier()
        resumed = Pretraining(options(corpus, config, tmp_path / "resumed", resume=True, **values))
        resumed.run()
        actual = full_state_dict(resumed.engine)
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-7)
        if dist.get_rank() == 0:
            self.check_logs(log_lines(tmp_path / "whole"), log_lines(tmp_path / "resumed"))

    def check_logs(self, whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
        training = [line for line in whole if "event" not in line]
        assert [line["step"] for line in training] == [2, 4, 6]
        wanted = """loss grad_norm learning_rate tokens_per_s density recall column_density pair_imbalance time_imbalance
            hop_imbalance head_imbalance index_s attention_s exposed exposed_s host_us_per_hop per_layer per_hop"""
        assert all(set(wanted.split()) <= set(line) for line in training)
        assert training[-1]["loss"] < training[0]["loss"]
        assert [line["step"] for line in whole if line.get("event") == "evaluation"] == [4, 6]
        assert [line["step"] for line in resumed if line.get("event") == "start"] == [3]
        again = [line for line in resumed if "event" not in line]
        assert [line["step"] for line in again] == [4, 6]
        # the line of step 4 is a mean over steps 3 and 4 in the one log, of step 4 in the other
        assert again[-1]["loss"] == pytest.approx(training[-1]["loss"], rel=1e-6)
        assert [line["price"] for line in again] == [line["price"] for line in training[1:]]
        evaluations = [[line["loss"] for line in log if line.get("event") == "evaluation"] for log in (whole, resumed)]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)

    def test_the_loss_does_not_depend_on_how_ranks_are_divided(self, corpus: Path, tmp_path: Path) -> None:
        # two rows a step: on two rings of one rank, or one after the other on one ring of two, which reads prepared rows
        losses = []
        for degree, accumulation in ((1, 1), (2, 2)):
            config = write_config(tmp_path, 2, "full", degree=degree)
            arguments = options(corpus, config, tmp_path / f"out{degree}", accumulation=accumulation, steps=4)
            if degree == 2:
                arguments.data, arguments.text, arguments.tokenizer, arguments.sequence_tokens = (
                    str(corpus / "data"),
                    [],
                    None,
                    4096,
                )
            run = Pretraining(arguments)
            run.run()
            if dist.get_rank() == 0:
                losses.append([line["loss"] for line in log_lines(Path(arguments.output)) if "loss" in line])
        if dist.get_rank() == 0:
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_the_saved_model_loads_in_plain_transformers_and_generates(self, corpus: Path, tmp_path: Path) -> None:
        run = Pretraining(options(corpus, write_config(tmp_path, 3, eval_full_index=True), tmp_path / "out", steps=2))
        run.run()
        expected = run.evaluate(2)
        unset_hf_deepspeed_config()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
        assert model.config._attn_implementation == "sdpa"
        assert expected == pytest.approx(plain_loss(model, run.evaluation_rows), rel=1e-5)
        prompt = tokenizer("def f1(x):", return_tensors="pt")
        generated = model.generate(**prompt, max_new_tokens=5, do_sample=False)
        assert generated.shape[1] > prompt["input_ids"].shape[1]

    def test_a_run_is_compared_with_its_simulation_from_its_log_alone(self, corpus: Path, tmp_path: Path) -> None:
        values: dict[str, Any] = {"steps": 3, "evaluation_sequences": 0, "sequence_tokens": 960}
        config = write_config(tmp_path, 2, maps={"every": 2})
        Pretraining(options(corpus, config, tmp_path / "out", **values)).run()
        if dist.get_rank() != 0:
            return
        log = tmp_path / "out" / "metrics.jsonl"
        result = CliRunner().invoke(app, ["plan", "--compare", str(log.parent)])
        assert result.exit_code == 0, result.output
        run = read_run(log)
        assert (run.job.world, run.job.model.num_hidden_layers, run.job.sequence_tokens) == (2, 2, 960)
        (line,) = run.lines
        assert line["step"] == 3, "the line of steps 1 and 2 is left out"
        for label, key in (("step s", "step_s"), ("attention s", "attention_s"), ("worker imbalance", "time_imbalance")):
            shown = re.search(rf"{label} *[|│] *([\d.e-]+) *[|│] *([\d.e-]+)", result.output)
            assert shown is not None, result.output
            assert float(shown[1]) == pytest.approx(line[key], rel=1e-3) and float(shown[2]) > 0
        assert 0 < line["attention_s"] < line["step_s"] and 0 < line["column_density"] < line["density"]
        assert 0 < line["causal_share"] < 1, "a row has several documents"
        assert min(line["sent_inner_bytes"], line["sent_columns_bytes"]) > 0 == line["sent_heads_bytes"]
        for what in ("inner", "columns"):
            assert re.search(rf"sent {what} GiB *[|│] *[\de.-]+ *[|│] *[\de.-]+", result.output), result.output
        assert read_maps(log.parent).keys() == {2}, "of two logged steps the first"
        result = CliRunner().invoke(app, ["inspect", str(log.parent)])
        assert result.exit_code == 0, result.output
        assert "layer 1, head 2" in (log.parent / "inspect.html").read_text(), "the last layer, the head in the middle"

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.slow(stage=[1, 2])
    def test_bf16(self, stage: int, corpus: Path, tmp_path: Path) -> None:
        arguments = options(corpus, write_config(tmp_path, stage), tmp_path / "out", steps=4, bf16=True, learning_rate=1e-2)
        run = Pretraining(arguments)
        run.run()
        assert all(state.dtype == torch.bfloat16 for state in full_state_dict(run.engine).values())
        if dist.get_rank() == 0:
            losses = [line["loss"] for line in log_lines(tmp_path / "out") if "event" not in line]
            assert losses[-1] < losses[0]

    def test_arguments_must_agree_with_the_file(self, corpus: Path, tmp_path: Path) -> None:
        config = json.loads(Path(write_config(tmp_path, 1)).read_text())
        config["gradient_accumulation_steps"] = 4
        path = tmp_path / f"other_{dist.get_rank()}.json"
        path.write_text(json.dumps(config))
        with pytest.raises(SparseRingError, match="gradient_accumulation_steps is 4"):
            Pretraining(options(corpus, str(path), tmp_path / "out"))


QUICK_RECIPES = ("qwen2.5-3b-512k-1gpu", "llama-3.1-8b-1m-2gpu", "qwen3-8b-512k-8gpu")
"""Each architecture once, on one, two and eight GPUs; the others train by `make test-slow`."""


class TestRecipes(DistributedTest):
    world_size = 2
    timeout_s = 420  # offload compiles DeepSpeed's CPU Adam when it is first used

    @pytest.mark.slow(recipe=[r for r in RECIPES if r.name not in QUICK_RECIPES])
    @pytest.mark.parametrize("recipe", [r for r in RECIPES if "inner_degree" not in r.ring], ids=lambda recipe: recipe.name)
    def test_a_recipe_trains_a_small_model(self, recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
        self.check(recipe, corpus, tmp_path)

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("recipe", [r for r in RECIPES if "inner_degree" in r.ring], ids=lambda recipe: recipe.name)
    def test_a_recipe_for_united_nodes_trains_a_small_model(self, recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
        self.check(recipe, corpus, tmp_path)

    def check(self, recipe: Recipe, corpus: Path, folder: Path) -> None:
        """It trains at a thousandth of its lengths and on the ranks that there are; everything else as in the file."""
        config, kinds = recipe.config(), {"qwen2.5-3b": "qwen2", "llama-3.1-8b": "llama", "qwen3-8b": "qwen3"}
        section = config["sparse_ring"]
        section |= {"layer_chunk_tokens": 64, "segment_tokens": 64, "log_steps": 1}
        section["selector"]["price"] = 0.3  # fresh weights look at all keys alike, and rows have few blocks
        for degree in {"ulysses_degree", "inner_degree"} & section.keys():
            section[degree] = min(2, section[degree])
        if "offload" in section:
            section["offload"]["host_gib"] /= 1000
        path = folder / f"recipe_{dist.get_rank()}.json"
        path.write_text(json.dumps(config))
        tokens, yarn_from = recipe.tokens >> 10, recipe.yarn_from >> 10
        fresh = json.dumps({**FRESH, "model_type": kinds[recipe.model], "head_dim": 8})
        arguments = options(corpus, str(path), folder / "out", steps=3, sequence_tokens=tokens, yarn_from=yarn_from, bf16=True)
        arguments.fresh_config, arguments.loss_tile_tokens = fresh, 64
        arguments.learning_rate, arguments.evaluation_sequences = 1e-2, 0
        Pretraining(arguments).run()
        if dist.get_rank() == 0:
            lines = [line for line in log_lines(folder / "out") if "event" not in line]
            assert lines[-1]["loss"] < lines[0]["loss"]
            assert all(0.1 < line["density"] < 0.9 for line in lines)
            saved = json.loads((folder / "out" / "model" / "config.json").read_text())
            assert saved["rope_parameters"]["factor"] == tokens / yarn_from and saved["max_position_embeddings"] == tokens


def plain_loss(model: Any, rows: Any) -> float:
    """Mean loss over the targets of packed rows, each document by itself."""
    loss_sum, count = 0.0, 0
    for row in rows:
        tokens, positions = torch.tensor(row["input_ids"]), torch.tensor(row["position_ids"])
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for begin, end in zip(starts, starts[1:], strict=False):
            if end - begin > 1:
                with torch.no_grad():
                    logits = model(tokens[None, begin:end]).logits[0, :-1]
                targets = tokens[begin + 1 : end]
                loss_sum += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
                count += end - begin - 1
    return loss_sum / count


class TestFinetune(DistributedTest):
    world_size = 2

    def test_train_evaluate_save_and_resume(self, corpus: Path, tmp_path: Path) -> None:
        config = write_config(tmp_path, 3, dense_warmup_steps=1, eval_full_index=True)
        command = f"""--deepspeed {config} --tokenizer {corpus / "model"} --text {corpus / "text"} --sequence_tokens 192
            --evaluation_sequences 3 --output_dir {tmp_path / "out"} --max_steps 4 --save_steps 2 --logging_steps 1
            --learning_rate 3e-3 --report_to none --disable_tqdm true --{CHECKPOINTING}
            --per_device_eval_batch_size 1 --resume_from_checkpoint last --streaming"""
        words = [*command.split(), "--fresh_config", json.dumps(FRESH)]
        words += ["--use_cpu"] if rank_device().type == "cpu" else []
        trainer = self.train(words)
        assert trainer.state.global_step == 4
        expected = full_state_dict(trainer.deepspeed)
        loss = trainer.evaluate()["eval_loss"]
        save_pretrained(trainer.deepspeed, tmp_path / "model", trainer.processing_class)
        if dist.get_rank() == 0:
            for path in (tmp_path / "out" / "checkpoint-4").rglob("*"):
                path.unlink() if path.is_file() else None
            (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "gone")
        dist.barrier()
        again = self.train(words)
        actual = full_state_dict(again.deepspeed)
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-7)
        unset_hf_deepspeed_config()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert loss == pytest.approx(plain_loss(model, again.eval_dataset), rel=1e-5)

    def train(self, words: list[str]) -> Any:
        classes: Any = (ModelArguments, DataArguments, TrainingArguments)
        model_args, data_args, args = HfArgumentParser(classes).parse_args_into_dataclasses(words)
        trainer, _ = build_trainer(model_args, data_args, args)
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(args))
        return trainer


class TestModelsOfARun:
    def test_sizes_that_the_data_knows_are_filled_in(self) -> None:
        config = load_config(None, json.dumps(FRESH), word_tokenizer(), sequence_tokens=777)
        assert (config.vocab_size, config.max_position_embeddings) == (VOCABULARY, 777)
        assert config.pad_token_id == 0
        model = build_model(config, None, dtype=torch.bfloat16)
        assert next(model.parameters()).dtype == torch.bfloat16

    def test_a_folder_without_weights_is_a_fresh_model(self, tmp_path: Path) -> None:
        load_config(None, json.dumps(FRESH), word_tokenizer(), sequence_tokens=64).save_pretrained(tmp_path)
        config = load_config(str(tmp_path), None, word_tokenizer(), sequence_tokens=64)
        assert build_model(config, str(tmp_path), dtype=torch.float32).config.hidden_size == 32

    def test_weights_in_a_folder_are_loaded(self, tmp_path: Path) -> None:
        config = load_config(None, json.dumps(FRESH), word_tokenizer(), sequence_tokens=64)
        saved = build_model(config, None, dtype=torch.float32)
        saved.save_pretrained(tmp_path)
        config = load_config(str(tmp_path), None, word_tokenizer(), sequence_tokens=64)
        loaded = build_model(config, str(tmp_path), dtype=torch.float32)
        assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)

    @pytest.mark.parametrize(
        ("model", "fresh", "message"),
        [(None, None, "either"), ("a", "{}", "either"), (None, "{}", "model_type"), (None, "[]", "not an object")],
    )
    def test_unclear_models_are_refused(self, model: str | None, fresh: str | None, message: str) -> None:
        with pytest.raises(SparseRingError, match=message):
            load_config(model, fresh, word_tokenizer(), sequence_tokens=64)

    def test_a_tokenizer_larger_than_the_model_is_refused(self) -> None:
        with pytest.raises(SparseRingError, match="vocabulary"):
            load_config(None, json.dumps({**FRESH, "vocab_size": 10}), word_tokenizer(), sequence_tokens=64)

    def test_a_missing_tokenizer_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(SparseRingError, match="train_tokenizer"):
            load_tokenizer(None, str(tmp_path))
