"""The page of a run: one file, everything of the log on it, and clear words where there is nothing to show."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.run_log import read_history, read_maps, save_maps
from ds_sparse_ring.select.maps import attention_map

from .reference import bound, global_qkv, random_index


def step(number: int, **values: Any) -> dict[str, Any]:
    per_layer = [{"layer": layer, "density": 0.1 / (1 + layer), "recall": 0.9} for layer in range(3)]
    per_hop = {name: {"compute_s": [0.2, 0.1], "wait_s": [0.05, 0.0]} for name in ("forward", "backward")}
    times = {"step_s": 2.0, "attention_s": 0.9, "exposed_s": 0.1, "index_s": 0.2, "ring_wait_s": 0.1, "columns_s": 0.0}
    figures = {"density": 0.05, "column_density": 0.01, "recall": 0.9, "recall_middle": 0.8, "time_imbalance": 1.01}
    rates = {"tokens_per_s": 1234.5, "mfu_executed": 0.321, "mfu_dense_equivalent": 0.5, "peak_memory_gib": 70.0}
    whole = {"step": number, "loss": 7.0 - number / 10, **times, **figures, **rates, "per_layer": per_layer, "per_hop": per_hop}
    return whole | values


def write(folder: Path, *lines: Any) -> Path:
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def inspect(*words: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.open: list[str] = []
        self.values: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.values += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br", "image", "path", "use"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.values += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "br", "image", "path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of a run that was resumed at step 10, with one recording of attention."""
    folder = tmp_path_factory.mktemp("a run & more")
    job = {"world": 2, "device": "cpu", "sequence_tokens": 900, "sparse_ring": {"selector": {"kind": "price", "price": 0.1}}}
    lines = [{"event": "start", "step": 0, "steps": 20, "job": job}, step(5), step(10), step(15, loss=99.0)]
    lines += [{"event": "start", "step": 10, "steps": 20, "job": job}, step(15), step(20)]
    write(folder, *lines, {"event": "evaluation", "step": 20, "loss": 4.25}, {"event": "saved", "step": 20, "path": "x"})
    _, sequence, context = bound([900], segment_tokens=192)
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    index = random_index(sequence, 2, 1, columns=40, diagonals=4)
    maps = {layer: [attention_map(q, k, index, context, head=head, scale=0.25) for head in (layer % 2,)] for layer in (0, 3)}
    save_maps(folder, 5, maps)
    result = inspect(folder)
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(folder / "inspect.html")
    return Page((folder / "inspect.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_from_outside_and_no_two_pictures_share_an_id(page: Page) -> None:
    assert page.open == [], "every element is closed"
    assert not set(page.tags) & {"script", "link", "iframe", "img"}
    for name, value in page.values:
        assert name.startswith("xmlns") or "://" not in value, f"{name}={value[:80]}"
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,"))
    ids = Counter(value for name, value in page.values if name == "id")
    assert all(count == 1 for count in ids.values()), [name for name, count in ids.items() if count > 1][:3]
    used = {value[1:] for name, value in page.values if name == "xlink:href" and value.startswith("#")}
    used |= {value[len("url(#") : -1] for _, value in page.values if value.startswith("url(#")}
    assert used and used <= set(ids)


def test_colours_of_pictures_are_those_of_the_style_sheet(page: Page) -> None:
    styles = " ".join(value for name, value in page.values if name == "style")
    assert "#0102" not in styles and "var(--series-0)" in styles and "currentColor" in styles


def test_the_page_shows_the_run(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    for part in ("step 20 of 20; 2 ranks (cpu); 900 tokens a sequence; selector price, 0.1", "a run & more"):
        assert part in text
    assert "1,234" in text and "32.1%" in text and "4.250" in text, "tokens/s, MFU, evaluation"
    labels = [value for name, value in page.values if name == "aria-label"]
    for label in ("loss", "time of a step", "density by layer", "hop timeline", "layer 3, head 1, step 5, index"):
        assert label in labels
    assert page.tags["image"] == 2 + 2 + 4, "two maps of layers with their colour bars, two heads twice"
    assert text.count("the index keeps") == 2


def test_of_steps_that_were_done_twice_the_later_ones_count(tmp_path: Path) -> None:
    start = {"event": "start", "steps": 9}
    first = [{**start, "step": 0}, step(3), step(6), {"event": "evaluation", "step": 6, "loss": 1.0}]
    history = read_history(write(tmp_path, *first, {**start, "step": 3}, step(6, loss=2.0)) / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in history.training] == [(3, 6.7), (6, 2.0)]
    assert history.evaluations == [] and history.start["step"] == 3


def test_a_log_of_losses_alone_is_a_page_too(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "grad_norm": None})
    result = inspect(tmp_path / "metrics.jsonl", "--output", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert Page((tmp_path / "page.html").read_text()).tags["svg"] == 1


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    result = inspect(tmp_path)
    assert result.exit_code == 1 and "metrics.jsonl cannot be read: No such file" in result.output
    write(tmp_path, {"event": "start", "step": 0})
    assert "has no logged step" in inspect(tmp_path).output
    write(tmp_path, {"step": 1, "loss": 1.0})
    assert "cannot be written: No such file" in inspect(tmp_path, "--output", tmp_path / "no" / "page.html").output
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "step00000001.npz").write_bytes(b"nothing")
    with pytest.raises(SparseRingError, match="step00000001.npz is no recording"):
        read_maps(tmp_path)
