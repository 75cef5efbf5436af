"""Results per image: read from all forms, and counted per class and per pair of classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.reports.predictions import Predictions, read_predictions

ROWS = [  # file, label, top1, top5, probabilities, label_probability
    ("a", 0, 0, [0, 1, 2], [0.9, 0.05, 0.05], 0.9),
    ("b", 0, 1, [1, 0, 2], [0.8, 0.1, 0.1], 0.1),
    ("c", 1, 2, [2, 0, 3], [0.99, 0.01, 0.0], 0.0),
    ("d", 1, 1, [1, 0, 2], [0.4, 0.3, 0.3], 0.4),
    ("e", 0, 1, [1, 2, 0], [0.6, 0.3, 0.1], 0.1),
]


def write(path: Path) -> Path:
    names = ["file", "label", "top1", "top5", "probabilities", "label_probability"]
    if path.suffix == ".csv":
        cells = [[" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row] for row in ROWS]
        path.write_text("\n".join(",".join(row) for row in [names, *cells]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, row))) + "\n" for row in ROWS))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.table(dict(zip(names, map(list, zip(*ROWS))))), path)
    return path


@pytest.mark.parametrize("name", ["predictions.csv", "predictions.parquet", "predictions.jsonl"])
def test_what_results_say(name: str, tmp_path: Path) -> None:
    """Guards against accuracies and confusions that are not those of the rows; counted here by hand."""
    found: Predictions = read_predictions(write(tmp_path / name))
    assert found.by_class() == [(0, 3, 1, 3), (1, 2, 1, 1)]
    assert found.confusions() == [(0, 1, 2, 2 / 3), (1, 2, 1, 1 / 2)]
    assert [found.files[i] for i in found.ranked(False, 2)] == ["c", "b"]
    assert [found.files[i] for i in found.ranked(True, 5)] == ["d", "a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,label\n", "got no 'top1'"),
        ("file,label,top1,top5,probabilities,label_probability\n", "at least 1 image, got 0"),
        ("file,label,top1,top5,probabilities,label_probability\na,-1,0,0,1,1\n", "out of range"),
        ("file,label,top1,top5,probabilities,label_probability\na,1,0,0 1,1,1\n", "differ in length"),
        ("file,label,top1,top5,probabilities,label_probability\na,1,0,0,nan,1\n", "not finite"),
        ("file,label,top1,top5,probabilities,label_probability\na,1\n", "differ in their number of columns"),
    ],
)
def test_damaged_results_are_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    """Guards against a traceback over a file of another program."""
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read_predictions(path)
    assert str(path) in str(error.value)
    (tmp_path / "p.parquet").write_bytes(b"PAR1 junk")
    with pytest.raises(UserError, match="cannot be read"):
        read_predictions(tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text('{"file": "a"}\n[1]\n')
    with pytest.raises(UserError, match="cannot be read"):
        read_predictions(tmp_path / "p.jsonl")


def test_a_hundred_thousand_classes() -> None:
    """Guards against a page that takes hours, as each class's images are looked for among all."""
    label = np.random.default_rng(0).permutation(np.repeat(np.arange(100_000), 2))
    top1 = np.where(label % 3, label, label + 1)
    top5 = np.stack([top1, label, label + 2, label + 3, label + 4], axis=1)
    found = Predictions(Path("p.csv"), [""] * len(label), label, top1, top5, np.ones(top5.shape), np.ones(len(label)))
    classes, confused = found.by_class(), found.confusions()
    assert classes[:4] == [(0, 2, 0, 2), (1, 2, 2, 2), (2, 2, 2, 2), (3, 2, 0, 2)] and len(classes) == 100_000
    assert len(confused) == 33_334 and confused[0] == (0, 1, 2, 1.0)
