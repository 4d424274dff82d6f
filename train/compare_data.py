"""Rows of real text for the comparison of attentions, as one small file that travels to a machine without network.

Python sources, joined per package; a row is a piece of one package. Rows for validation are of packages of the standard library
that no training row is of. Sources are those of the running Python and of PyTorch, which every user of this library has.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train.data import source_documents, standard_library_documents, tokenize_documents
from ds_sparse_ring.train.needles import FactForm

_TABLES = ("# encodings/", "# _sysconfigdata")
"""Documents that hold tables of numbers, not text."""
_MOST_TRAIN, _MOST_VALIDATION = 8, 2
"""Rows that one document gives at most, so that none is most of what is read."""
_LONG_CHARACTERS = 4.2
"""Per token of a row: a document of so many has a row of its own (SmolLM2 reads about 3.6 characters of source a token)."""

Rows = NDArray[np.uint16]


@dataclass(frozen=True)
class Data:
    """What runs read.

    Attributes:
        train, validation: token ids ``[rows, S]``. form: parts of facts and questions. about: where the text is from.
    """

    train: Rows
    validation: Rows
    form: FactForm
    about: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write ``rows.npz`` and ``about.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "rows.npz", train=self.train, validation=self.validation)
        (folder / "about.json").write_text(json.dumps({**self.about, "form": asdict(self.form)}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Data:
        """What `save` has written.

        Raises:
            SparseRingError: it is not there.
        """
        if not (folder / "about.json").is_file():
            raise SparseRingError(f"--data: {folder} has no about.json: write it by --prepare {folder}")
        about = json.loads((folder / "about.json").read_text())
        form = FactForm(**{name: tuple(ids) for name, ids in about.pop("form").items()})
        with np.load(folder / "rows.npz") as rows:
            return cls(rows["train"], rows["validation"], form, about)


def prepare(tokenizer: Any, *, tokens: int, train_rows: int, validation_rows: int) -> Data:
    """Tokenize until there are so many rows of ``tokens`` tokens; whole documents are held out for validation.

    Raises:
        SparseRingError: a vocabulary that 16 bits do not hold, or too little text.
    """
    if len(tokenizer) > np.iinfo(np.uint16).max + 1:
        raise SparseRingError(
            f"tokenizer: {len(tokenizer)} words do not fit 16 bits: take a smaller vocabulary, such as SmolLM2's"
        )
    library = _long([text for text in standard_library_documents() if not text.startswith(_TABLES)], tokens)
    more = _long(source_documents(Path(torch.__file__).parent), tokens)
    validation, held_out = _rows(tokenizer, library, tokens, validation_rows, _MOST_VALIDATION)
    train, read = _rows(tokenizer, library[len(held_out) :] + more, tokens, train_rows, _MOST_TRAIN)
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokens": tokens,
        "validation": held_out,
        "train": read,
    }
    return Data(train, validation, FactForm.of_tokenizer(tokenizer), about)


def _long(documents: list[str], tokens: int) -> list[str]:
    """Those that have a row of their own, shuffled."""
    long = [text for text in documents if len(text) >= _LONG_CHARACTERS * tokens]
    return [long[i] for i in np.random.default_rng(0).permutation(len(long))]


def _rows(tokenizer: Any, documents: list[str], tokens: int, count: int, most: int) -> tuple[Rows, dict[str, int]]:
    """``count`` whole rows of documents in their order, ``most`` of each, and how many each gave by its first file's name."""
    rows: list[NDArray[np.int32]] = []
    names: dict[str, int] = {}
    for text in documents:
        wanted = min(most, count - len(rows))
        if not wanted:
            break
        ids = tokenize_documents([text[: 8 * wanted * tokens]], tokenizer)[0]
        whole = min(wanted, len(ids) // tokens)
        names[text.partition("\n")[0].removeprefix("# ")] = whole
        rows.extend(ids[: whole * tokens].reshape(whole, tokens))
    if len(rows) < count:
        raise SparseRingError(f"text: it gives {len(rows)} rows of {tokens} tokens, {count} are wanted: ask for fewer")
    return np.stack(rows).astype(np.uint16), names
