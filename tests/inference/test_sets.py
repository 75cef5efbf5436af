"""``pervit evaluate --set`` and ``--classes``: sets in their published form, against counts from the scores of ``load``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import load
from pipeline.shards.shard_set import ShardSet
from support.launching import run_script
from support.ranks import run_forked
from support.small_model import write_model

SYNSETS = [f"n{number:08d}" for number in range(1_000_000, 9_000_000, 8_000)]  # 1,000, sorted
OF_A = SYNSETS[3::5]  # 200
VAL = {3: SYNSETS[0], 7: SYNSETS[999], 8: SYNSETS[0], 21: SYNSETS[8], 500: SYNSETS[8], 50_000: SYNSETS[13]}  # number -> synset


def write_image(path: Path, rng: np.random.Generator) -> None:
    """Coarse random colours, so that scores differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)).resize((40, 36), Image.Resampling.BICUBIC).save(
        path, quality=95
    )


class Published:
    """Small copies of the sets, with images of some classes, a model, and its scores of every image."""

    def __init__(self, folder: Path) -> None:
        self.folder, rng = folder, np.random.default_rng(0)
        for name, classes in (
            ("val", SYNSETS),
            ("v2", map(str, range(1000))),
            ("a", OF_A),
        ):  # a folder without images is a class
            for each in classes:
                (folder / name / each).mkdir(parents=True)
        for number, synset in VAL.items():
            write_image(folder / "val" / synset / f"ILSVRC2012_val_{number:08d}.JPEG", rng)
        for synset in OF_A:
            write_image(folder / "a" / synset / "0.001_digital clock _ digital clock_0.865662.jpg", rng)
        for number in range(12):
            write_image(folder / "new" / f"{number}.jpeg", rng)
        self.model = write_model(folder / "model.safetensors", SYNSETS)
        model, transform, _ = load(self.model)
        files = [path for name in ("val", "new", "a") for path in sorted((folder / name).rglob("*.[jJ]*"))]
        with torch.inference_mode():
            scores = model(torch.stack([transform(Image.open(path)) for path in files])).numpy()
        self.scores = dict(zip(files, scores))
        for number, path in enumerate(sorted((folder / "new").iterdir())):  # V2, of which the model knows all but three
            own = folder / "v2" / str((self.best(path)[0] + (number < 3)) % 1000) / f"{number:040x}.jpeg"
            self.scores[path.rename(own)] = self.scores.pop(path)

    def best(self, path: Path, among: list[int] | None = None) -> list[int]:
        """The five best classes of an image, by output, best first."""
        among = list(range(1000)) if among is None else among
        return sorted(among, key=lambda output: -self.scores[path][output])[:5]

    def counts(self, right: dict[Path, set[int]], among: list[int] | None = None) -> dict[str, int]:
        """What an evaluation counts, if these classes are right for these images."""
        best = {path: self.best(path, among) for path in right}
        first = sum(best[path][0] in classes for path, classes in right.items())
        return {
            "count": len(right),
            "correct1": first,
            "correct5": sum(bool(classes & {*best[path]}) for path, classes in right.items()),
        }

    def evaluate(self, *arguments: object, check: bool = True, processes: int = 1) -> tuple[list[dict], str]:
        """Rows, and what was said."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        done = run_forked(
            "pipeline.evaluate", "--checkpoint", self.model, *arguments, "--json", result, check=check, processes=processes
        )
        rows = json.loads(result.read_text()) if done.returncode == 0 else []
        return rows if isinstance(rows, list) else [rows], done.stdout + done.stderr


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("sets"))


def found(row: dict) -> dict[str, int]:
    return {key: row[key] for key in ("count", "correct1", "correct5")}


def test_published_sets_in_one_table(sets: Published) -> None:
    """Guards against V2's folder 10 as the third class, ReaL's images in the order of their folders, an image without labels that
    counts as wrong, ImageNet-A among 1,000 classes, and an image that two processes count twice."""
    val = {next((sets.folder / "val").rglob(f"*{number:08d}.JPEG")): number for number in VAL}
    labels: list[list[int]] = [[] for _ in range(50_000)]
    for path, number in val.items():
        labels[number - 1] = [sets.best(path)[0], 5] if number in (3, 500) else [sets.best(path)[3]]
    labels[7], labels[20] = [], [SYNSETS.index(VAL[21])]
    (sets.folder / "real.json").write_text(json.dumps(labels))
    run_script(
        "data_prep/shard_imagenet.py", "--source", sets.folder / "a", "--split", "val", "--output", sets.folder / "a_shards"
    )
    v2 = {path: {int(path.parent.name)} for path in sets.scores if path.is_relative_to(sets.folder / "v2")}
    a = {path: {SYNSETS.index(path.parent.name)} for path in sets.scores if path.is_relative_to(sets.folder / "a")}
    expected = [
        sets.counts({path: {SYNSETS.index(path.parent.name)} for path in val}),
        sets.counts({path: {*labels[number - 1]} for path, number in val.items() if labels[number - 1]}),
        sets.counts(v2),
        sets.counts(a, [SYNSETS.index(synset) for synset in OF_A]),
    ]
    assert (expected[1]["count"], expected[1]["correct1"] >= 2) == (5, True)
    assert expected[3] != sets.counts(a) and expected[2]["correct1"] == 9
    others = [f"real={sets.folder / 'real.json'}", f"v2={sets.folder / 'v2'}", f"a={sets.folder / 'a_shards'}"]
    rows, said = sets.evaluate(
        "--data", sets.folder / "val", *(word for each in others for word in ("--set", each)), processes=2
    )
    assert [found(row) for row in rows] == expected
    assert [row["classes"] for row in rows] == [1000, 1000, 1000, 200] and rows[1]["loss"] is None and rows[3]["loss"] > 0
    assert [line.split(" of ")[-1] for line in said.splitlines()[4:8]] == [
        str(sets.folder / "val"),
        *(row["set"] for row in rows[1:]),
    ]


def test_shards_know_the_names_that_images_had(digits_images: Path, digits_shards: Path) -> None:
    """Guards against ReaL's labels, which go by these names, for the image before or after."""
    shards = ShardSet(digits_shards, "val")
    names = list(shards.source_names(range(len(shards))))
    for index in (0, 17, len(shards) - 1):
        image = digits_images / "val" / shards.classes[shards.labels[index]] / Path(names[index]).name
        assert image.read_bytes() == shards.read(index).tobytes()


def test_some_classes_by_name(sets: Published) -> None:
    """Guards against images of other classes that count as wrong, other classes that win, and a name that is passed over."""
    few = [SYNSETS[index] for index in (13, 8, 500)]
    (sets.folder / "few.txt").write_text("\n".join([*few, ""]))
    val = [path for path in sets.scores if path.is_relative_to(sets.folder / "val") and path.parent.name in few]
    (row,), _ = sets.evaluate(
        "--data", sets.folder / "val", "--classes", sets.folder / "few.txt", "--predictions", sets.folder / "p.jsonl"
    )
    among = sorted(SYNSETS.index(name) for name in few)
    assert found(row) == sets.counts({path: {SYNSETS.index(path.parent.name)} for path in val}, among)
    assert row["classes"] == 3 and row["class_count"] == [2, 1, 0]
    lines = [json.loads(line) for line in (sets.folder / "p.jsonl").read_text().splitlines()]
    assert [(line["file"], line["top1_name"]) for line in lines] == [
        (str(path.relative_to(sets.folder / "val")), SYNSETS[sets.best(path, among)[0]]) for path in sorted(val)
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--data {}/val --set b={}/a", "--set must be NAME=PLACE, each name once, of real, v2, a, r, sketch, got 'b="),
        ("--set real={}/real.json", "--data is required with --set real: add --data with the validation set"),
        ("--set a={}/val", "must have the 200 classes of a, got 1000: pass all class folders"),
        ("--set sketch={}/v2", "must be the model's (n01000000, n01008000, n01016000, ...), got 1000 others (0, 1, 10, ...)"),
        ("--set a={}/a --classes n01000000", "--classes must name classes of a too, got none of its 200"),
        (
            "--data {}/val --classes tench",
            "--classes must be classes of the model (n01000000, n01008000, n01016000, ...), got tench",
        ),
        ("--data {}/val --set real={}/few.json", "few.json must hold a list of 50,000 lists of labels below 1,000"),
        ("--data {}/v2val --set real={}/few.json", "ILSVRC2012_val_00000001 and so on, which 1 images of"),
    ],
)
def test_what_is_not_the_set_is_said(words: str, sentence: str, sets: Published) -> None:
    """Guards against a traceback, and an accuracy on part of a set that looks like the set's."""
    (sets.folder / "few.json").write_text("[[1], [2]]")
    write_image(sets.folder / "v2val" / SYNSETS[0] / "dog.jpg", np.random.default_rng(0))
    _, said = sets.evaluate(*words.format(*[sets.folder] * 2).split(), check=False)
    assert sentence in said and said.count("error: ") == 1 and "Traceback" not in said
