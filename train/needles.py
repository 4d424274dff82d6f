"""Facts in a row of text and questions about them far behind: retrieval as code, which a small pretrained model can do at once.

A fact is a line ``token_ation_ment = "48213"``, its question a line ``assert token_ation_ment == "48213"``: a key of two words, a
value of five digits. They replace tokens of the text, so that a row keeps its length. Facts lie in the first 40 % of a row.
Questions *at the tail* lie in its last 3 % (or as much as they need in short rows), those *in the middle* before: what the last
queries of a sequence look for says nothing about them. A value counts as found if all its digits are the most likely ones.

Everything is made of token ids, so that a run needs no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_sparse_ring.errors import SparseRingError

VALUE_DIGITS = 5
FACTS_END, TAIL = 0.4, 0.03
"""Shares of a row: where facts end, and what the tail is at least."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class FactForm:
    """Token ids of the parts of facts and questions.

    Attributes:
        fact, question: what stands before the key; joint: between its words; fact_value, question_value: between key and value.
        end: behind the value. digits: of "0" to "9". words: that keys are made of, one token each.
    """

    fact: tuple[int, ...]
    question: tuple[int, ...]
    joint: tuple[int, ...]
    fact_value: tuple[int, ...]
    question_value: tuple[int, ...]
    end: tuple[int, ...]
    digits: tuple[int, ...]
    words: tuple[int, ...]

    @classmethod
    def of_tokenizer(cls, tokenizer: Any, words: int = 512) -> FactForm:
        """With the first lower-case words of a vocabulary that stay one token between the other parts.

        Raises:
            SparseRingError: a tokenizer that joins digits, or lacks such words.
        """

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        fact, joint, value, end = encode("\ntoken_"), encode("_"), encode(' = "'), encode('"\n')
        digits = tuple(token for digit in "0123456789" for token in encode(digit))
        candidates = sorted((number, word) for word, number in tokenizer.get_vocab().items() if re.fullmatch("[a-z]{4,8}", word))
        kept: list[int] = []
        for number, word in candidates:
            whole = (*fact, number, *joint, number, *value, *digits[:2], *end)
            if encode(f'\ntoken_{word}_{word} = "01"\n') == whole:
                kept.append(number)
            if len(kept) == words:
                break
        if len(digits) != 10 or len(kept) < min(words, 16):
            raise SparseRingError(
                f"tokenizer: it has {len(digits)} tokens for ten digits and {len(kept)} words that stay one token in a key: "
                "take one that splits digits, such as SmolLM2's"
            )
        return cls(fact, encode("\nassert token_"), joint, value, encode(' == "'), end, digits, tuple(kept))

    @property
    def fact_tokens(self) -> int:
        """Of a fact's line."""
        return len(self.fact) + 2 + len(self.joint) + len(self.fact_value) + VALUE_DIGITS + len(self.end)

    @property
    def question_tokens(self) -> int:
        """Of a question's line."""
        return len(self.question) + 2 + len(self.joint) + len(self.question_value) + VALUE_DIGITS + len(self.end)

    def line(self, key: Sequence[int], value: Sequence[int], *, question: bool) -> list[int]:
        """A fact's or a question's line."""
        before, between = (self.question, self.question_value) if question else (self.fact, self.fact_value)
        return [*before, key[0], *self.joint, key[1], *between, *value, *self.end]


@dataclass(frozen=True)
class Planted:
    """A row with facts and questions.

    Attributes:
        ids: ``[S]``. facts: where the values of facts begin, ``[N]``. answers: places of the asked values' tokens,
            ``[N, VALUE_DIGITS]``, fact by fact. at_tail: bool ``[N]``; the others are in the middle.
    """

    ids: Ids
    facts: Ids
    answers: Ids
    at_tail: NDArray[np.bool_]


def plant(
    text: NDArray[Any], form: FactForm, random: np.random.Generator, *, middle: int, tail: int, middle_end: float = 1.0
) -> Planted:
    """Facts, each asked once.

    Args:
        text: ids ``[S]``, left as it is. middle, tail: how many are asked there. middle_end: share of the row where the middle
            ends, at most where the tail begins.

    Raises:
        SparseRingError: a row too short for them.
    """
    ids, count = text.astype(np.int64), middle + tail
    tokens, step = len(ids), form.question_tokens
    tail_begin = tokens - max(round(TAIL * tokens), tail * step)
    facts_end = round(FACTS_END * tokens)
    facts = _places(0, facts_end, form.fact_tokens, count, random)
    asked_middle = _places(facts_end, min(tail_begin, round(middle_end * tokens)), step, middle, random)
    asked = np.concatenate([asked_middle, _places(tail_begin, tokens, step, tail, random)])
    keys = random.choice(len(form.words) ** 2, count, replace=False)
    words, digits = np.array(form.words), np.array(form.digits)
    values = digits[random.integers(10, size=(count, VALUE_DIGITS))]
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        pair = (int(words[key // len(words)]), int(words[key % len(words)]))
        for place, question in ((facts[number], False), (asked[number], True)):
            line = form.line(pair, value.tolist(), question=question)
            ids[place : place + len(line)] = line
    to_value = step - len(form.end) - VALUE_DIGITS
    answers = asked[:, None] + to_value + np.arange(VALUE_DIGITS)
    return Planted(ids, facts + form.fact_tokens - len(form.end) - VALUE_DIGITS, answers, np.arange(count) >= middle)


def _places(begin: int, end: int, tokens: int, count: int, random: np.random.Generator) -> Ids:
    """Beginnings of ``count`` lines of so many tokens, in any order, none over another."""
    room = (end - begin) // tokens
    if room < count:
        raise SparseRingError(
            f"needles: {count} lines of {tokens} tokens do not fit between tokens {begin} and {end}: use longer rows, fewer facts"
        )
    places: Ids = begin + tokens * random.choice(room, count, replace=False)
    return places
