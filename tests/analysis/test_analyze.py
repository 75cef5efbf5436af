"""The command pipeline.analyze: the same numbers however it is run, what it writes, and its sentences for bad input."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import analyze
from pipeline.analysis import session as choosing
from pipeline.analysis.chapter import Findings, Plot
from pipeline.analysis.measures import mean_attention_distance, nonlocality, query_key_distances
from pipeline.analysis.session import Options
from pipeline.analysis.style import layer_plot
from pipeline.analysis.writing import write_analysis
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.models.common.probe import recorded
from pipeline.models.weights.exported import Description, read_exported, write_exported
from pipeline.shards.shard_set import ShardSet
from support.launching import clean_environment
from support.ranks import run_forked

IMAGES, SEED, SIZE = 21, 3, 48  # no multiple of a batch or of the processes: the last batches are padded; 3 x 3 patches
ABOUT = {
    "model": "deit_t",
    "switches": {},
    "image_size": SIZE,
    "origin": {"checkpoint": "deit_t", "step": None, "weights": "fresh"},
    "images": None,
    "query": None,
    "examples": [],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, digits_shards: Path) -> Path:
    """DeiT-T with the digits' classes, exported, as a training leaves it: its heads prefer some tokens."""
    torch.manual_seed(0)
    model = create_model("deit_t", num_classes=10, image_size=SIZE)
    for block in model.blocks:
        block.attn.qkv.weight.data *= 3
    config, path = Config().data, tmp_path_factory.mktemp("weights") / "deit.safetensors"
    crop = {"mean": list(config.mean), "std": list(config.std), "eval_crop": config.eval_crop}
    classes = ShardSet(digits_shards, "val").classes
    description = Description("deit_t", 10, SIZE, {}, classes, **crop, precision="fp32", step=7, weights="model", names="ours")
    write_exported(path, model.state_dict(), description)
    return path


@pytest.fixture(scope="module")
def analysis(weights: Path, digits_shards: Path) -> Path:
    """Of one process, with all figures."""
    output = weights.parent / "one"
    arguments = (weights, "--data", digits_shards, "--images", IMAGES, "--seed", SEED, "--examples", 2, "--output", output)
    run_forked("pipeline.analyze", *arguments, "--batch-size", 4)
    return output


def numbers(folder: Path) -> dict:
    """``analysis.json``."""
    return json.loads((folder / "analysis.json").read_text())


def arguments_of(*words: object, output: Path) -> argparse.Namespace:
    """The command's arguments, parsed by the command."""
    options: dict = {"output": output, "checkpoints": str(words[0]).split(), "step": None}
    given = {**{name: value for name, value in vars(Options(output=output)).items()}, **options}
    for name, value in zip(words[1::2], words[2::2]):
        given[str(name)] = value
    return argparse.Namespace(**given)


def test_the_numbers_are_those_of_the_images_one_by_one(analysis: Path, weights: Path, digits_shards: Path) -> None:
    """Guards against padding, which must not count, and against images that count twice or are others than chosen: every image
    alone, with the attention softmax(Q Kᵀ) taken apart as PerViT's Appendix D and ConViT's Eq. 8 say. Twelve layers in fp32, whose
    products round otherwise in another batch size, differ by 2e-6; an image too many by 1e-3."""
    model, _ = read_exported(weights)
    split = ShardSet(digits_shards, "val")
    chosen = choosing.choose(len(split), IMAGES, SEED)
    config = Config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"image_size": SIZE})})
    examples = choosing.load_examples(split, chosen, config, World(0, 1, torch.device("cpu"), 1))
    distances, omega, far, average = query_key_distances(3, 3), [], [], []
    for example in examples:
        with recorded("attention") as values, torch.no_grad():
            model.eval()(example.image[None])
        rows = torch.cat(values["attention"]).double()  # (layers, heads, 10, 10), the class token first
        omega.append(nonlocality((rows / rows.amax(-1, keepdim=True))[..., 1:, 1:], distances))
        patches = rows[..., 1:, 1:]
        far.append(mean_attention_distance(patches / patches.sum(-1, keepdim=True), distances))
        average.append(rows[..., 1 + 4, 1:])
    found = numbers(analysis)["measures"]
    for name, values in (("mean_attention_distance", far), ("average_attention", average)):
        expected = torch.stack(values).mean(0)
        torch.testing.assert_close(torch.tensor(found[name]).double().view_as(expected), expected, rtol=1e-5, atol=1e-6)
    expected = torch.stack(omega).mean(0)
    torch.testing.assert_close(torch.tensor(found["nonlocality_in_patches"]["attention"]).double(), expected, rtol=1e-5, atol=0)


def test_processes_do_not_change_a_number(analysis: Path, weights: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against ranks that count padding or an image twice, or draw other images: 2 processes with the batches of 1 give its
    numbers to 1e-9, and the examples and files, too."""
    arguments = (weights, "--data", digits_shards, "--images", IMAGES, "--seed", SEED, "--examples", 2, "--output", tmp_path)
    run_forked("pipeline.analyze", *arguments, "--batch-size", 4, processes=2)
    one, two = numbers(analysis), numbers(tmp_path)
    for name in ("mean_attention_distance", "nonlocality"):
        values = [each["measures"][name] for each in (one, two)]
        np.testing.assert_allclose(*[each["attention"] if name == "nonlocality" else each for each in values], rtol=1e-9)
    for key in one.keys() - {"measures"}:
        assert one[key] == two[key], key


def test_the_file_says_what_its_numbers_are(analysis: Path, weights: Path, digits_shards: Path) -> None:
    """Guards the layout that reports read: a unit for every measure, a file for every figure, the images and the origin."""
    result = numbers(analysis)
    assert result["model"] == "deit_t"
    assert result["origin"] == {"checkpoint": str(weights), "step": 7, "weights": "model"}
    whole = len(ShardSet(digits_shards, "val"))
    images = {"count": IMAGES, "left_out": 0, "of": whole, "data": str(digits_shards), "split": "val", "seed": SEED}
    assert result["images"] == images
    assert np.shape(result["measures"]["nonlocality"]["attention"]) == (12, 3)
    assert np.shape(result["measures"]["attention_maps"]) == (2, 12, 3, 3, 3)
    for name in result["units"]:
        place = result["measures"]
        for part in name.split("."):
            place = place[part]
    listed = {file for figure in result["figures"] for file in figure["files"]}
    assert listed == {f"figures/{path.name}" for path in (analysis / "figures").iterdir()}
    assert {"nonlocality", "attention_distance", "average_maps", "class_attention"} <= {
        each["name"] for each in result["figures"]
    }
    assert sorted(path.name for path in analysis.iterdir()) == ["analysis.json", "figures", "index.html"]


def test_the_choice_of_images_is_a_function_of_size_number_and_seed() -> None:
    """Guards against draws with replacement, and against more images that are others: means would not converge."""
    few, many = choosing.choose(1000, 10, 5), choosing.choose(1000, 300, 5)
    assert len(set(many.tolist())) == 300
    assert many[:10].tolist() == few.tolist()
    assert sorted(choosing.choose(20, 1024, 5).tolist()) == list(range(20))
    assert few.tolist() != choosing.choose(1000, 10, 6).tolist()


def test_examples_are_found_by_key(digits_shards: Path) -> None:
    """Guards against another image than the one that was named."""
    split = ShardSet(digits_shards, "val")
    assert choosing.example_numbers(split, [split.key(5), split.key(2)], 4, 0).tolist() == [5, 2]
    with pytest.raises(UserError, match="no sample 'cat' in val: pass keys such as"):
        choosing.example_numbers(split, ["cat"], 4, 0)


def test_a_damaged_image_is_left_out(copied_shards: Path) -> None:
    """Guards against a sample number of the split where one of the choice is meant: another image would be replaced."""
    split = ShardSet(copied_shards, "val")
    tar = copied_shards / split.info.shards[0].file
    data = bytearray(tar.read_bytes())
    data[int(split.samples["offset"][7]) + 50] ^= 255
    tar.write_bytes(data)
    config = Config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"image_size": SIZE})})
    examples = choosing.load_examples(
        ShardSet(copied_shards, "val"), np.array([9, 7, 8]), config, World(0, 1, torch.device("cpu"), 1)
    )
    assert [each.key for each in examples] == [split.key(9), split.key(8)]


def plots(*names: str) -> Findings:
    findings = Findings(plots=[Plot("<b>&", lambda: layer_plot([[1.0, 2.0]], "x"), title=name, name=name) for name in names])
    findings.measure("a.b", torch.tensor([1.0, float("inf")]), "[head]")
    return findings


def test_a_former_analysis_is_replaced_when_everything_is_there(tmp_path: Path) -> None:
    """Guards against figures of another model beside the new ones, and against half an analysis."""
    write_analysis(tmp_path, ABOUT, plots("one", "two"))
    assert numbers(tmp_path)["measures"] == {"a": {"b": [1.0, None]}}, "JSON has no infinity"
    (tmp_path / "notes.txt").write_text("mine")

    broken = plots("one", "three")
    broken.plots[1] = replace(broken.plots[1], draw=lambda: 1 / 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ZeroDivisionError):
        write_analysis(tmp_path, ABOUT, broken)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    write_analysis(tmp_path, ABOUT, plots("one", "three"))
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["one.png", "one.svg", "three.png", "three.svg"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert "&lt;b&gt;&amp;" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("deit_t", "images", 0), "--images must be at least 1, got 0: "),
        (("deit_t", "example", ["a"]), "--example requires --data"),
        (("nonsense",), "nonsense is neither a file or folder nor a model: "),
        (("missing/run",), "missing/run"),
        (("deit_t", "step", 5), "--step is 5, but deit_t is a model with fresh weights: "),
        (("deit_t", "only", ["gates"]), "deit_t has no figure 'gates', it has attention_distance, "),
        (
            ("deit_t", "only", ["nonlocality"]),
            "none of the figures of --only can be made (nonlocality: It needs images: pass --data)",
        ),
        (("deit_t", "query", (14, 0)), "--query is 14,0, but at 224 pixels there are 14 x 14 patches of 16 pixels: "),
        (("deit_t", "data", Path("missing")), "--data must be a folder, got missing, which does not exist: "),
    ],
)
def test_bad_input_is_one_sentence(words: tuple, sentence: str, tmp_path: Path) -> None:
    """Guards against a traceback, and against an error that comes only after the pass over the images."""
    with pytest.raises(UserError) as error:
        analyze.run(arguments_of(*words, output=tmp_path / "output"))
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_data_and_output_that_do_not_fit_are_one_sentence(weights: Path, digits_images: Path, tmp_path: Path) -> None:
    """Guards against figures of images that mean something else, and against an output that cannot be written in the end."""
    cats = tmp_path / "cats"
    shutil.copytree(
        next((digits_images / "train").iterdir() if (digits_images / "train").is_dir() else digits_images.iterdir()),
        cats / "cat",
    )
    with pytest.raises(UserError, match="got 1 others"):
        analyze.run(arguments_of(weights, "data", cats, output=tmp_path / "output"))
    (tmp_path / "empty" / "0").mkdir(parents=True)
    with pytest.raises(UserError, match="got 0 images in 1 class folders"):
        analyze.run(arguments_of("deit_t", "data", tmp_path / "empty", output=tmp_path / "output"))
    with pytest.raises(UserError, match="--output must be a folder, got the file"):
        analyze.run(arguments_of(weights, output=weights))
    with pytest.raises(UserError, match="cannot be created"):
        analyze.run(arguments_of(weights, output=weights / "below"))


def test_the_page_opens_in_a_browser(analysis: Path, tmp_path: Path) -> None:
    """Guards against errors in the console and pictures that do not load."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000"]
    result = subprocess.run(
        [chromium, *options, "--enable-logging=stderr", "--dump-dom", f"file://{analysis / 'index.html'}"],
        env=clean_environment(HOME=str(tmp_path), TMPDIR=os.environ.get("TMPDIR", "/tmp")),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "Inside deit_t" in result.stdout
    assert result.stdout.count("<img") == len(numbers(analysis)["figures"])
    assert "CONSOLE" not in result.stderr
