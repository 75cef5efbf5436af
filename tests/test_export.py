"""``pervit export``: a trained model in files for other programs, with a card that is true."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pipeline import export, load
from pipeline.errors import UserError, install_extra
from pipeline.inference.trained import read_trained
from pipeline.models.weights.exported import read_exported, read_metadata
from support.ranks import run_forked
from support.runs import train_twice_saved
from support.small_model import write_model

CLASSES = ["cat", "dog", "owl"]


@pytest.fixture(scope="module")
def run(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, evaluated after its second and last step."""
    return train_twice_saved(digits_shards, tmp_path_factory.mktemp("export"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """The command within this process."""

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["pipeline.export", *map(str, arguments)])
        return export.main()

    return call


def rows(card: str) -> dict[str, str]:
    """The first column of a card's tables -> the second."""
    cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in card.splitlines() if line.startswith("| "))
    return {name.strip(): text.strip() for name, text, *_ in cells}


def test_the_card_of_a_run_says_what_the_run_did(run: Path, command, tmp_path: Path, capsys) -> None:
    """Guards against a card with figures of other weights, or with the paths of whoever trained."""
    file = tmp_path / "a.safetensors"
    assert command(run, "--output", file) == 0
    assert "every tensor, read back, is the model's bit for bit" in capsys.readouterr().out
    card = (tmp_path / "a.safetensors.md").read_text()
    evaluated = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in evaluated if row.get("weights") == "ema" and row["step"] == 2]
    expected = f"| {row['count']} of the val split | {row['top1']:.2f} % | {row['correct1']} | {row['top5']:.2f} % | {row['correct5']} |"
    assert expected in card
    found, trained = rows(card), read_trained(run)
    assert found["Model"].startswith("`pervit_t`: PerViT Tiny") and "NeurIPS 2022" in found["Paper"]
    assert found["Weights"] == "moving average (EMA), step 2" and found["Steps"] == "2"
    assert found["Processes"].startswith("1, ZeRO") and "torch " + version("torch") in found["Versions"]
    assert (
        found["Data set"].endswith("fingerprint " + re.search(r"fingerprint (\w+)", card)[1]) and "images" in found["Data set"]
    )
    assert found["Classes"].startswith(f"10: {trained.classes[0]}, ") and "mean [0.4, 0.5, 0.6]" in found["Input"]
    assert "<summary>Recipe</summary>" in card and f"lr: {trained.config.optim.lr}" in card
    assert str(run.parent) not in card and str(Path.home()) + "/" not in card and "## Licence\n\nNot stated." in card
    # The weights alone were evaluated at step 2.
    command(run, "--format", "safetensors", "--output", tmp_path / "first", "--step", 1)
    assert "Not recorded for these weights" in (tmp_path / "first" / "README.md").read_text()
    assert (tmp_path / "first" / "README.md").read_text().startswith("---\nlibrary_name: ")


def test_an_export_of_an_export_keeps_what_is_known(run: Path, command, tmp_path: Path) -> None:
    """Guards against results that are lost on the way, and a damaged record that is taken for none."""
    file = tmp_path / "a.safetensors"
    command(run, "--format", "safetensors", "--output", file)
    command(file, "--format", "safetensors", "--names", "authors", "--output", tmp_path / "b.safetensors")
    cards = [(tmp_path / f"{name}.safetensors.md").read_text() for name in "ab"]
    assert cards[0].partition("## Loading")[0] == cards[1].partition("## Loading")[0]
    first, second = (read_exported(tmp_path / f"{name}.safetensors")[0].state_dict() for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    metadata = read_metadata(file) | {"training": '{"samples": "many"}'}
    save_file(load_file(file), file, metadata)
    with pytest.raises(UserError, match=r"a.safetensors has a damaged record of its training .samples must .*export it again"):
        command(file, "--format", "safetensors", "--output", tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    ("form", "ending"),
    [("safetensors", ".safetensors"), pytest.param("torch-export", ".pt2", marks=pytest.mark.long), ("onnx", ".onnx")],
)
def test_the_lines_of_the_card_give_the_models_scores(
    form: str, ending: str, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a card whose code does not run, or normalizes in another way."""
    if form == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="needs the extra onnx")
    source = write_model(tmp_path / "source.safetensors", CLASSES)
    monkeypatch.chdir(tmp_path)
    noise = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    image = Image.fromarray(noise).resize((90, 64), Image.Resampling.BICUBIC)
    image.save("cat.jpg", quality=95)
    command(source, "--format", form, "--output", "model" + ending)
    snippet = re.search(r"```python\n(.*?)```", Path(f"model{ending}.md").read_text(), re.DOTALL)[1]
    assert len(snippet.splitlines()) == 5
    found: dict = {}
    exec(snippet, found)
    model, transform, _ = load(source)
    with torch.inference_mode():
        expected = model(transform(Image.open("cat.jpg"))[None])[0]
    scores = torch.as_tensor(found["scores"]).detach()
    assert (scores - expected).abs().max() < 0.05 * expected.abs().max()  # the crop differs by parts of a pixel
    assert scores.argmax() == expected.argmax()
    assert command("--verify", "model" + ending) == 0
    with open("model" + ending, "r+b") as file:
        file.seek(-9, 2)
        file.write(b"!")
    assert command("--verify", "model" + ending) == 1


@pytest.fixture(scope="module")
def places(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What can go wrong with a source."""
    folder = tmp_path_factory.mktemp("wrong")
    good = write_model(folder / "good.safetensors", CLASSES)
    cut = folder / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-100])
    weights = load_file(good)
    weights["head.bias"][1] = torch.nan
    save_file(weights, folder / "nan.safetensors", read_metadata(good))
    save_file(weights, folder / "bare.safetensors")
    damaged = Path(shutil.copytree(run, folder / "damaged"))
    part = next((damaged / "checkpoints" / "step-00000002").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-5] + b"12345")
    (folder / "begun" / "checkpoints").mkdir(parents=True)
    (folder / "begun" / "config.yaml").write_text("seed: 0\n")
    (folder / "taken.safetensors").write_text("mine")
    return {"dir": folder, "run": run}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "{dir}/good.safetensors --format onx --output {dir}/a.onnx",
            "--format must be one of safetensors, onnx, .*, got 'onx': did you mean onnx",
        ),
        (
            "{dir}/good.safetensors --format gguf --output {dir}/a",
            "--format must be one of safetensors, onnx, .*, got 'gguf': pass one",
        ),
        ("--format onnx --output {dir}/a.onnx", "CHECKPOINT is required"),
        ("{dir}/good.safetensors --output {dir}/a", "--format is required"),
        ("{dir}/good.safetensors --format onnx", "--output is required"),
        ("{dir}/nowhere --format onnx --output {dir}/a.onnx", "nowhere does not exist"),
        ("{dir}/begun --format torch-export --output {dir}/a.pt2", "begun must have a checkpoint, got no"),
        ("{dir}/damaged --format torch-export --output {dir}/a.pt2", "was changed after it was written"),
        ("{dir}/cut.safetensors --format torch-export --output {dir}/a.pt2", "cut.safetensors cannot be read"),
        ("{dir}/nan.safetensors --format onnx --output {dir}/a.onnx", r"not finite in 1 of \d+ tensors \(head.bias\)"),
        (
            "{dir}/bare.safetensors --format torch-export --output {dir}/a.pt2",
            "bare.safetensors must describe its model",
        ),
        ("{run} --step 9 --format torch-export --output {dir}/a.pt2", r"no checkpoint of step 9, but of \[1, 2\]"),
        ("{dir}/good.safetensors --weights ema --format onnx --output {dir}/a", "has --weights model, not ema"),
        (
            "{dir}/good.safetensors --format safetensors --precision fp16 --output {dir}/a.safetensors",
            "--precision is fp16, but --format safetensors has fp32 alone: leave it out, or pass --format onnx",
        ),
        (
            "{dir}/good.safetensors --format onnx --precision int8 --output {dir}/a.onnx",
            "int8, but --format onnx has fp32 and fp16",
        ),
        (
            "{dir}/good.safetensors --format onnx --names authors --output {dir}/a.onnx",
            "--names authors is for --format safetensors",
        ),
        (
            "{dir}/good.safetensors --format safetensors --output {dir}/taken.safetensors",
            "taken.safetensors exists: choose another",
        ),
        (
            "{dir}/good.safetensors --format safetensors --output {dir}/x/a.safetensors",
            "/x does not exist or cannot be written",
        ),
        ("--verify {dir}/good.safetensors", "good.safetensors has no checksum"),
    ],
)
def test_each_mistake_is_one_sentence(arguments: str, expected: str, places: dict[str, Path], command) -> None:
    """Guards against a traceback, and against half an export."""
    before = sorted(places["dir"].iterdir())
    with pytest.raises(UserError, match=expected) as error:
        command(*arguments.format(**places).split())
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert sorted(places["dir"].iterdir()) == before


def test_a_missing_package_is_named(places: dict[str, Path], command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a ModuleNotFoundError after the model was read and traced."""
    from pipeline.exporting import graph

    monkeypatch.setattr(graph, "find_spec", lambda name: None if name == "onnxruntime" else 1)
    with pytest.raises(UserError, match=re.escape(f"onnxruntime cannot be imported: {install_extra('onnx')}")):
        command(places["dir"] / "good.safetensors", "--format", "onnx", "--output", tmp_path / "a.onnx")
    assert not any(tmp_path.iterdir())


def test_the_command_ends_with_two(places: dict[str, Path]) -> None:
    """Guards against a file system's refusal that ends in a traceback."""
    good = places["dir"] / "good.safetensors"
    result = run_forked("pipeline.export", good, "--format", "safetensors", "--output", "/proc/a.safetensors", check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("error: /proc")
