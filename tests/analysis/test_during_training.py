"""Measures that evaluations of a training write (``eval.analyses``): their numbers, and that the training does not notice."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from pipeline.analysis.during_training import FirstImages, layer_means, nothing_to_follow
from pipeline.checkpoint.folder import step_folder
from pipeline.cluster.world import World
from pipeline.config import config_from_dict, load_config
from pipeline.errors import UserError
from pipeline.inference.evaluation import evaluation_loader
from pipeline.inference.trained import read_trained
from pipeline.models import create_model
from pipeline.models.common.probe import recorded
from pipeline.shards.shard_set import ShardSet
from support.ranks import run_forked
from support.runs import evaluation_rows, step_rows
from support.small_run import SMALL_MODEL

ON = "eval.analyses=true"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1)
    dist.destroy_process_group()


def train(config: Path, run: Path, *options: str, processes: int = 1) -> str:
    short = ("eval.every_epochs=0.03", "checkpoint.keep_best=false", *options)
    return run_forked("pipeline.train", "--config", config, f"output_dir={run}", *short, processes=processes).stdout


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def analysis_rows(run: Path) -> list[dict]:
    return [row for row in rows(run) if "analysis" in row]


def without_clock(found: list[dict]) -> list[dict]:
    """Rows without what the machine's speed decides."""
    clock = ("time", "images_per_second", "mfu", "data_wait", "data_wait_rank", "memory_gib", "peak_memory_gib")
    return [{key: value for key, value in row.items() if key not in clock} for row in found]


def slow_distance(attention: Tensor, side: int) -> float:
    """Eq. 8 for one head: (1 / L) Σ_ij A_ij |δ_ij|."""
    places = [(number // side, number % side) for number in range(side * side)]
    pairs = ((i, j) for i in range(len(places)) for j in range(len(places)))
    return sum(attention[i, j].item() * math.dist(places[i], places[j]) for i, j in pairs) / len(places)


@pytest.mark.long
def test_convit_is_followed_and_does_not_notice(small_run: Path, tmp_path: Path, world: World) -> None:
    """Guards against rows that are of other weights or images than they say, and against a training that is not the same with and
    without: losses, evaluations and checkpoints are equal bit for bit, where a run that had it off switches it on as it resumes."""
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(small_run, plain, "model.name=convit_ti", "train.max_steps=5")
    train(small_run, run, "model.name=convit_ti", "train.max_steps=1")
    train(small_run, run, "model.name=convit_ti", "train.max_steps=5", ON)
    parts = [sorted(step_folder(each, 5).glob("part-*")) for each in (plain, run)]
    assert [part.read_bytes() for part in parts[0]] == [part.read_bytes() for part in parts[1]] and parts[0]
    assert without_clock(step_rows(run)) == without_clock(step_rows(plain))
    assert without_clock(evaluation_rows(run))[1:] == without_clock(evaluation_rows(plain))  # one more, at step 1
    assert [row["step"] for row in analysis_rows(run)] == [3, 5] and analysis_rows(plain) == []
    assert "top1" in rows(run)[-1], "the evaluation stays the last row"

    row = analysis_rows(run)[-1]
    assert row.keys() == {"step", "time", "epoch", "samples", "analysis"} and row["samples"] == 5 * 16
    measured = row["analysis"]
    assert measured.keys() == {"mean_attention_distance", "gate"}
    config = load_config(run / "config.yaml")
    loader = evaluation_loader(ShardSet(config.data.path, "val"), config, world)
    images = torch.cat([next(loader).images for _ in range(2)])  # 256 of 359
    loader.close()
    with torch.no_grad(), recorded("attention", "gate") as values:
        read_trained(run, None).build_model().eval()(images)
    np.testing.assert_allclose(np.array(measured["gate"][:10]), torch.stack(values["gate"]), rtol=1e-5)
    assert measured["gate"][10:] == [None, None]
    for layer in (0, 9, 11):
        patches = values["attention"][layer][..., -4:, -4:].double()  # without the class token
        mean = (patches / patches.sum(-1, keepdim=True)).mean(0)  # (heads, 4, 4)
        expected = [slow_distance(head, side=2) for head in mean]
        assert measured["mean_attention_distance"][layer] == pytest.approx(expected, rel=1e-5)

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = {tag for tag in events.Tags()["scalars"] if tag.startswith("weights/")}
    assert shown == {f"weights/{name}" for name in layer_means(measured)} and len(shown) == 22
    (point,) = [each for each in events.Scalars("weights/gate/layer_02") if each.step == 5]
    assert point.value == pytest.approx(np.mean(measured["gate"][1]))


@pytest.mark.multiprocess
def test_ranks_and_stages_find_the_same(small_run: Path, tmp_path: Path) -> None:
    """Guards against images that depend on the number of ranks or the batch size, and against parameters that ZeRO-3 holds back.
    After one step the weights differ by rounding only. The evaluation of the average adds no row."""
    options = (*SMALL_MODEL, "train.max_steps=1", ON)
    train(small_run, tmp_path / "one", *options)
    said = train(small_run, tmp_path / "two", *options, "train.zero_stage=3", "eval.batch_size=30", processes=2)
    assert "ZeRO stage 3" in said
    (one,), (two,) = analysis_rows(tmp_path / "one"), analysis_rows(tmp_path / "two")
    assert one["analysis"].keys() == two["analysis"].keys() == {"mean_attention_distance", "nonlocality"}
    pairs = [tuple(row["analysis"]["mean_attention_distance"] for row in (one, two))]
    pairs += [tuple(row["analysis"]["nonlocality"]["phi_p"] for row in (one, two))]
    for first, second in pairs:
        assert np.shape(first) == (4, 4)
        np.testing.assert_allclose(first, second, rtol=1e-3)


def test_other_models_have_one_sentence_and_no_row(small_run: Path, tmp_path: Path) -> None:
    """Guards against an evaluation that fails, or that says so each time, for a model without such values."""
    said = train(small_run, tmp_path / "run", "model.name=posmlp_t", "train.max_steps=1", ON)
    sentence = "note: eval.analyses writes nothing for posmlp_t: it follows the self-attention of DeiT, ConViT and PerViT"
    assert said.count(sentence) == 1
    assert analysis_rows(tmp_path / "run") == [] and len(evaluation_rows(tmp_path / "run")) == 1
    with torch.device("meta"):
        followed = [nothing_to_follow(create_model(name, 10, 64)) is None for name in ("deit_t", "pervit_t", "gmlp_s")]
    assert followed == [True, True, False]


@pytest.mark.parametrize(("asked", "seen"), [(True, 256), (1, 1), (300, 300), (10_000, 359)])
def test_a_number_of_images_is_taken(asked: int | bool, seen: int, small_run: Path, world: World) -> None:
    """Guards against 256 images where ConViT's Fig. 5 has 1,024, and against padding that counts."""
    config = load_config(small_run).with_values({"eval.analyses": asked})
    loader = evaluation_loader(ShardSet(config.data.path, "val"), config, world)
    first = FirstImages(lambda images: None, (2, 2), world, config.eval.analyses)
    for _ in range(len(loader.batches)):
        first(next(loader))
    loader.close()
    assert int(first._count) == seen
    with pytest.raises(UserError, match="eval.analyses must be true, false or a number of images, got 'many'"):
        config_from_dict({"eval": {"analyses": "many"}}, "a test")


def test_what_is_not_finite_is_null(small_run: Path, world: World) -> None:
    """Guards against NaN in metrics.jsonl, which JSON does not have, and against a curve of it."""
    model = create_model("convit_ti", 10, 32).eval()
    torch.nn.init.constant_(model.blocks[4].attn.gating, math.nan)
    config = load_config(small_run)
    loader = evaluation_loader(ShardSet(config.data.path, "val"), config, world)
    first = FirstImages(model, (2, 2), world)
    with torch.no_grad():
        first(next(loader))
    loader.close()
    measured = json.loads(json.dumps(first.measures(), allow_nan=False))
    assert measured["gate"][4] == [None] * 4 and measured["mean_attention_distance"][4] == [None] * 4
    assert "gate/layer_05" not in layer_means(measured) and "gate/layer_04" in layer_means(measured)


@pytest.mark.parametrize(("switch", "followed"), [("peripheral_position", True), ("relative_position", False)])
def test_deit_is_followed_with_each_position(switch: str, followed: bool, small_run: Path, world: World) -> None:
    """Guards against a position encoding that depends on the image, iRPE's, taken for Φp, and against Φp that is left out."""
    config = load_config(small_run)
    loader = evaluation_loader(ShardSet(config.data.path, "val"), config, world)
    first = FirstImages(create_model("deit_t", 10, 32, switches={switch: True}).eval(), (2, 2), world)
    with torch.no_grad():
        first(next(loader))
    loader.close()
    measured = first.measures()
    assert np.shape(measured["mean_attention_distance"]) == (12, 3)
    assert measured.keys() - {"mean_attention_distance"} == ({"nonlocality"} if followed else set())
    if followed:
        assert np.shape(measured["nonlocality"]["phi_p"]) == (12, 3)
