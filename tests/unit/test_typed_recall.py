"""The retrieval task asks what it says it asks, and its evaluation counts answers at the right places."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ds_sparse_ring.config import FullSelector, PriceSelector, SparseRingConfig
from ds_sparse_ring.train.data import IGNORED
from ds_sparse_ring.train.typed_recall import (
    BYTES,
    KEYS,
    TAIL_TOKENS,
    VALUES,
    VOCAB_SIZE,
    Learner,
    Result,
    Stage,
    Task,
    _orthogonalised,
    markdown,
    python_source,
)


@pytest.fixture(scope="module")
def haystack() -> np.ndarray:
    return python_source()


@pytest.fixture
def task(haystack: np.ndarray) -> Task:
    return Task(haystack, 0)


def is_value_of(token: int, key: int) -> bool:
    first = BYTES + KEYS + (key - BYTES) * VALUES
    return first <= token < first + VALUES


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_every_question_has_its_fact_in_the_first_half(task: Task, tokens: int) -> None:
    questions = task.questions(5, tokens)
    tail = tokens - min(TAIL_TOKENS, tokens // 4)
    for ids, labels, middle in zip(questions.input_ids, questions.labels, questions.middle, strict=True):
        answers = (labels != IGNORED).nonzero().flatten()
        keys = ids[answers - 1]
        assert sorted(keys.tolist()) == list(range(BYTES, BYTES + KEYS))  # each key is asked once
        for place, key in zip(answers.tolist(), keys.tolist(), strict=True):
            value = int(labels[place])
            fact = (ids[: tokens // 2] == key).nonzero().flatten()
            assert len(fact) == 1 and int(ids[fact[0] + 1]) == value and is_value_of(value, key)
            assert int((ids == value).sum()) == 1  # the value stands nowhere else, least of all behind the question
            assert bool(middle[place]) == (place - 1 < tail) and place - 1 >= tokens // 2
        assert int(middle.sum()) == KEYS // 2
    assert int(questions.input_ids.max()) < VOCAB_SIZE


def test_same_seed_makes_the_same_documents(haystack: np.ndarray) -> None:
    first, second, other = (Task(haystack, seed).questions(2, 256).input_ids for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_muon_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(_orthogonalised(x))
    assert float(singular.max()) < 1.3 and float(singular.median()) > 0.6
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert float((_orthogonalised(x) * (u @ v)).sum()) > 0.8 * min(shape)  # the same directions


def answering(ids: torch.Tensor, offset: int) -> torch.Tensor:
    """Logits that name, at each lone key, the value of its fact plus ``offset``."""
    logits = torch.zeros(1, ids.shape[1], VOCAB_SIZE)
    for place, token in enumerate(ids[0].tolist()):
        if BYTES <= token < BYTES + KEYS:
            value = next(t for t in ids[0].tolist() if is_value_of(t, token))
            logits[0, place, value + offset] = 1
    return logits


@pytest.mark.parametrize(("offset", "recall"), [(0, 1.0), (1, 0.0)])
def test_evaluation_counts_answers_at_the_key(task: Task, offset: int, recall: float) -> None:
    learner = Learner(SparseRingConfig(selector=FullSelector()), seed=0)
    model = learner.model

    def answer(**batch: torch.Tensor) -> SimpleNamespace:
        model(**batch)  # so that the meter has something to say
        return SimpleNamespace(logits=answering(batch["input_ids"], offset))

    learner.model = answer
    density, tail, middle = learner.evaluate(task, 1, 128, 2)
    assert (density, tail, middle) == (1.0, recall, recall)


def test_training_learns_under_a_sparse_index(task: Task) -> None:
    config = SparseRingConfig(selector=PriceSelector(price=1e-3), segment_tokens=64)
    losses: list[str] = []
    learner = Learner(config, seed=0)
    first = learner.step(task.questions(4, 64), 0.0)
    last = learner.train(task, (Stage(64, 4, 40),), losses.append)
    assert first > 5.5 and last < 0.7 * first  # 6.3 is chance over the vocabulary
    assert len(losses) == 2


def test_table_compares_with_dense() -> None:
    results = [Result("dense", 1.0, 1.0, 0.8, 0.1, 1), Result("sparse", 0.5, 0.9, 0.4, 0.2, 1)]
    assert "| sparse | 0.50 | 0.900 (90% of dense) | 0.400 (50%) | 0.200 |" in markdown(results)
