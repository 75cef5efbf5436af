"""A trained model is used: in five lines, by the evaluation of a plain folder, and as the beginning of another training."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file

from pipeline import evaluate as evaluate_command
from pipeline import load
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.config import config_from_dict
from pipeline.errors import UserError
from pipeline.inference.evaluation import evaluate, evaluation_loader
from pipeline.inference.teacher import load_teacher
from pipeline.inference.trained import EvalTransform, read_trained
from pipeline.models.weights.exported import read_tensors, write_exported
from pipeline.shards.image_folder import ImageFolder
from pipeline.shards.shard_set import ShardSet
from pipeline.training.building import build_model
from support.launching import REPOSITORY, run_script
from support.photos import write_photos
from support.ranks import run_forked
from support.runs import export_weights, train_twice_saved

WORLD = World(rank=0, size=1, device=torch.device("cpu"), cpu_threads=1)


@pytest.fixture(scope="module")
def run(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that keeps an average, with checkpoints of steps 1 and 2, evaluated after the second."""
    return train_twice_saved(digits_shards, tmp_path_factory.mktemp("use"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("exported") / "weights.safetensors"
    export_weights(run, file)
    return file


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "images")


@pytest.fixture(scope="module")
def other_shards(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photos as a shard set, of three classes then."""
    folder = tmp_path_factory.mktemp("three")
    run_script("data_prep/shard_imagenet.py", "--source", photos, "--output", folder, "--split", "val", "--max-rejected", 1)
    return folder


def result_of(*arguments: object, tmp: Path, processes: int = 1) -> tuple[dict, object]:
    done = run_forked("pipeline.evaluate", *arguments, "--json", tmp / "result.json", processes=processes)
    return json.loads((tmp / "result.json").read_text()), done


def test_a_folder_of_images_evaluates_as_its_shards(
    run: Path, exported: Path, photos: Path, other_shards: Path, tmp_path: Path
) -> None:
    """Guards against another data path for plain folders, with other pixels, other labels or images that are counted as wrong."""
    trained = read_trained(run)
    shards = ShardSet(other_shards, "val")
    config = trained.config.model_copy(update={"eval": trained.config.eval.model_copy(update={"batch_size": 4})})
    seen = {}
    for name, images in (("shards", shards), ("folder", ImageFolder(photos, "val", trained.classes))):
        loader = evaluation_loader(images, config, WORLD)
        batches = [next(loader) for _ in range(len(loader.batches))]
        loader.close()
        label = {index: images.classes[row["label"]] for index, row in enumerate(images.samples[np.arange(len(images))])}
        seen[name] = sorted(
            (label[index], image.numpy().tobytes())
            for batch in batches
            for index, image, valid in zip(batch.request.index.tolist(), batch.images, batch.valid)
            if valid
        )
    assert len(seen["folder"]) == 15 and seen["folder"] == seen["shards"]

    alone, done = result_of("--checkpoint", exported, "--data", photos, "--batch-size", 4, tmp=tmp_path)
    for image in ("2/broken.jpg cannot be used: not an image", "5/cut.jpg cannot be used: a JPEG that is cut off"):
        assert done.stderr.count(image) == 1 and "replaces it" not in done.stderr
    assert alone["count"] == 15 and alone["left_out"] == 2 and f"15 of {photos}, 2 left out\n" in done.stdout
    assert alone["split"] is None, "a plain folder is not a split"
    (tmp_path / "tree").mkdir()
    shutil.copytree(photos, tmp_path / "tree" / "val")
    both, _ = result_of("--checkpoint", run, "--data", tmp_path / "tree", "--batch-size", 3, tmp=tmp_path, processes=2)
    assert [alone[key] for key in ("correct1", "correct5", "count")] == [both[key] for key in ("correct1", "correct5", "count")]
    assert alone["loss"] == pytest.approx(both["loss"], abs=1e-5) and both["weights"] == alone["weights"] == "ema"
    assert both["split"] == "val"


def test_folders_that_are_no_class_are_refused(photos: Path, tmp_path: Path) -> None:
    """Guards against labels by alphabet, which are another model's as soon as a class is missing or spelled otherwise."""
    images = ImageFolder(photos, "val", [*"0123456789"])
    assert sorted(set(images.samples[np.arange(len(images))]["label"].tolist())) == [2, 5, 8]
    with pytest.raises(UserError, match=r"must be classes of the model \(2: 2, 5\), got 1 others \(8\)"):
        ImageFolder(photos, "val", ["2", "5"])
    with pytest.raises(UserError, match="must have a manifest.json or images, got 0 images in 0 class folders"):
        ImageFolder(tmp_path, "val", ["2"])
    with pytest.raises(UserError, match="must be a folder, got .*: pass a folder with shards, or"):
        ImageFolder(tmp_path / "nowhere", "val", ["2"])


def test_the_transform_is_that_of_the_evaluation(run: Path, exported: Path, photos: Path) -> None:
    """Guards against inference on other pixels than those the accuracy was measured on."""
    model, transform, classes = load(exported)
    assert not model.training and classes == [*"0123456789"]
    images = ImageFolder(photos, "val", classes)
    trained = read_trained(run)
    loader = evaluation_loader(images, trained.config, WORLD)
    batch = next(loader)
    loader.close()
    levels = np.array(trained.config.data.std)[:, None, None] * 255
    for index, expected in zip(batch.request.index[:17].tolist(), batch.images):
        file = photos / images.key(index)
        if file.suffix == ".jpg" and file.stem in ("a", "gray"):  # what needs no new encoding
            image = transform(Image.open(file))
            assert image.shape == (3, 32, 32) and image.dtype == torch.float32
            assert np.abs((image - expected).numpy() * levels).max() < 1.01, f"{file}, of 255 levels"
    with pytest.raises(TypeError, match="takes a PIL image, not str"):
        transform("cat.jpg")


def test_the_transform_on_photographs(imagenet_samples: Path, imagenet_shards: Path) -> None:
    """Guards against a resize or crop that differs only for large, uneven sizes."""
    config = config_from_dict({"model": {"image_size": 224}, "eval": {"batch_size": 40}}, source="")
    transform = EvalTransform(224, config.data.eval_crop, config.data.mean, config.data.std)
    shards = ShardSet(imagenet_shards, "val")
    loader = evaluation_loader(shards, config, WORLD)
    batch = next(loader)
    loader.close()
    for index, expected in zip(batch.request.index.tolist(), batch.images):
        image = transform(Image.open(io.BytesIO(shards.read(index).tobytes())))
        difference = np.abs((image - expected).numpy() * np.array(config.data.std)[:, None, None] * 255)
        assert difference.max() < 1.01, f"image {index}, of 255 levels"


def test_the_readmes_five_lines(exported: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an example that nobody has run."""
    text = (REPOSITORY / "README.md").read_text()
    block = next(part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "= load(" in part)
    shutil.copy(exported, tmp_path / "pervit_t.safetensors")
    shutil.copy(photos / "2" / "a.jpg", tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    printed: list = []
    names = {"print": lambda *values: printed.append(values)}
    exec(block, names)
    assert not names["scores"].requires_grad, "gradients would keep the memory of every layer"
    assert printed[0][0] in [*"0123456789"] and 0.1 <= printed[0][1] <= 1


def test_every_command_means_the_same_weights(run: Path, exported: Path, tmp_path: Path) -> None:
    """Guards against averaged weights here and plain ones there, when nobody says which."""
    saved = read_weights(run)
    assert saved.ema is not None and saved.default == "ema"
    ema = saved.ema["head.weight"]
    assert not torch.equal(ema, saved.model["head.weight"])
    for found in (read_trained(run).weights, load_file(exported), read_trained(step_folder(run, 2)).weights):
        assert torch.equal(found["head.weight"], ema)
    best = read_weights(run, "best")
    assert best.state.step == 2 and best.default == best.state.best["weights"]
    first = read_weights(step_folder(run, 1))
    assert first.state.step == 1 and not torch.equal(first.ema["head.weight"], ema)
    export_weights(run, tmp_path / "a.safetensors", "best")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["head.weight"], best.choose()["head.weight"])


def head_after(source: Path, run: Path, classes: list[str]) -> torch.Tensor:
    """The head's first weights of a run that begins with ``source``."""
    config = read_trained(run).config
    train = config.train.model_copy(update={"init_from": str(source)})
    model = build_model(config.model_copy(update={"train": train, "seed": 1}), WORLD, classes, fresh=True)
    return model.state_dict()["head.weight"]


def test_a_head_is_kept_only_for_the_same_classes(run: Path, exported: Path, tmp_path: Path, capsys) -> None:
    """Guards against a fine-tuning that goes on with another data set's head because the number of classes agrees."""
    ema, digits = read_weights(run).ema["head.weight"], [*"0123456789"]
    plain = tmp_path / "plain.pt"
    torch.save(read_weights(run).model, plain)
    for source, step in ((run, 2), (exported, 2), (step_folder(run, 1), 1)):
        kept = head_after(source, run, digits)
        out = capsys.readouterr().out
        assert f"init_from: ema weights of step {step} of {source}\n" in out and "from scratch" not in out
        assert "init_from: the head is kept: its classes are the same\n" in out
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d init_from: ", line) for line in out.splitlines())
        assert torch.equal(kept, ema) == (step == 2)
        fresh = head_after(source, run, digits[::-1])
        out = capsys.readouterr().out
        assert (
            "head.weight is initialized from scratch: other classes (10 and 10, first different at index 0: '0' and '9')" in out
        )
        assert "kept" not in out
        assert torch.nn.functional.cosine_similarity(fresh.flatten(), ema.flatten(), dim=0) < 0.5
    assert torch.equal(head_after(plain, run, digits), read_weights(run).model["head.weight"])
    out = capsys.readouterr().out
    assert "the head is loaded, although train.init_from" in out and "does not name its classes" in out
    export_weights(run, tmp_path / "theirs.safetensors", names="authors")
    assert torch.equal(head_after(tmp_path / "theirs.safetensors", run, digits), ema)
    out = capsys.readouterr().out
    assert "init_from: they have the names of the authors' code\n" in out and "the head is kept" in out
    for path in (tmp_path / "nowhere", tmp_path):  # a run that goes on does not look at what it began with
        config = read_trained(run).config
        train = config.train.model_copy(update={"init_from": str(path)})
        build_model(config.model_copy(update={"train": train}), WORLD, digits, fresh=False)


def test_a_teacher_knows_the_same_classes(run: Path, exported: Path) -> None:
    """Guards against decisions of a teacher whose classes mean something else; an exported file teaches as its run does."""
    config = read_trained(run).config
    images, scores = torch.rand(2, 3, 32, 32), []
    for teacher in (run, exported):
        train = config.train.model_copy(update={"teacher": str(teacher)})
        taught = config.model_copy(update={"train": train})
        scores.append(load_teacher(taught, WORLD.device, [*"0123456789"])(images))
        load_teacher(taught, WORLD.device)  # a run that goes on
        with pytest.raises(
            UserError,
            match="must have the data set.s classes, got other classes .10 and 10, first different at index 0: '0' and '9'",
        ):
            load_teacher(taught, WORLD.device, [*"9876543210"])
    assert torch.equal(*scores)


def test_scores_that_are_not_finite_are_no_accuracy(run: Path, photos: Path) -> None:
    """Guards against a top-1 of NaN scores, for which every image is of class 0."""
    trained = read_trained(run)
    images = ImageFolder(photos, "val", trained.classes)
    loader = evaluation_loader(images, trained.config, WORLD)
    right = int(images.samples[np.array([0])]["label"][0])

    def scores(batch: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(len(batch), 10)
        result[:, 2] = 1
        result[0, right] = torch.nan  # which topk takes for the largest
        return result

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        result = evaluate(scores, loader, WORLD)
    finally:
        dist.destroy_process_group()
        loader.close()
    assert result["nonfinite"] == 1 and result["count"] == 15 and result["correct1"] == 4


def test_an_evaluation_without_finite_scores_ends_with_a_sentence(exported: Path, photos: Path, tmp_path: Path) -> None:
    """Guards against a table, or a JSON file, with an accuracy of scores that are not finite."""
    weights, (_, its) = load_file(exported), read_tensors(exported)
    weights["head.weight"].fill_(3e38)  # finite, but not what it is multiplied with
    write_exported(tmp_path / "large.safetensors", weights, its)
    arguments = ("--checkpoint", tmp_path / "large.safetensors", "--data", photos, "--json", tmp_path / "result.json")
    for precision, remedy in (("fp32", ""), ("bf16", "try --precision fp32, or ")):
        done = run_forked("pipeline.evaluate", *arguments, "--precision", precision, check=False)
        assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "result.json").exists()
        what = f"large.safetensors gives scores that are not finite for 15 of 15 images in {precision}, so it has no accuracy"
        assert f"{what}: {remedy}take a checkpoint of an earlier --step.\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--switch", "widths=!!int x"], "is not of the form name=value"),
        (["--switch", "widths=2024-13-45"], "is not of the form name=value"),
        (["--switch", "widths=" + "[" * 3000], "is not of the form name=value"),
        (["--switch", "conv_stem=false"], "leave out each --switch that adds, removes or reshapes parameters"),
        (["--checkpoint", "{run}/checkpoints/step-00000001", "--step", "2"], "is of step 1, but --step is 2"),
        (["--checkpoint", "{run}/config.yaml"], "neither a run folder nor a .safetensors file"),
        (
            ["--data", "{other}"],
            "other classes (10 and 3, first different at index 0: '0' and '2'): use shards of the same data",
        ),
        (["--batch-size", "0"], "eval.batch_size must be at least 1, got 0"),
    ],
)
def test_an_evaluation_says_what_is_wrong(
    arguments: list[str], expected: str, run: Path, photos: Path, digits_shards: Path, other_shards: Path, monkeypatch
) -> None:
    """Guards against a traceback, and against advice to set a key that the command does not take."""
    places = [argument.format(run=run, other=other_shards) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["evaluate", "--checkpoint", str(run), "--data", str(digits_shards), *places])
    with pytest.raises(UserError) as error:
        evaluate_command.main()
    assert expected in str(error.value) and "\n" not in str(error.value) and "num_classes=" not in str(error.value)
