"""Run an analysis from a model to the files: what the weights show, a pass over images, examples, writing."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.analysis.attention import AttentionChapter, DeiTChapter
from pipeline.analysis.chapter import Chapter, Example, Findings, Request
from pipeline.analysis.convit import ConViTChapter
from pipeline.analysis.gated_mlp import GatedMLPChapter
from pipeline.analysis.lsat import LSATChapter
from pipeline.analysis.measures import run_pass
from pipeline.analysis.pervit import PerViTChapter, RegionsChapter
from pipeline.analysis.pervit_extremes import ExtremesChapter
from pipeline.analysis.pervit_maps import ImagesChapter, MapsChapter
from pipeline.analysis.several import compared, model_names
from pipeline.analysis.writing import ANALYSIS, PAGE, prepare_output, write_analysis
from pipeline.checkpoint.folder import is_path
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError, counted
from pipeline.inference.evaluation import check_same_classes, evaluation_loader
from pipeline.inference.sets import ChosenImages
from pipeline.inference.trained import read_trained
from pipeline.logs import console
from pipeline.logs.reduction import report_bad_samples
from pipeline.models import create_model, list_models, model_entry
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.lsat.model import LSAT
from pipeline.models.timm.names import is_timm
from pipeline.shards.image_folder import ImageFolder, open_split
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place
from pipeline.stream.order import sample_at
from pipeline.stream.philox import Stream

_log = logging.getLogger(__name__)

CHAPTERS: tuple[type[Chapter], ...] = (  # in the page's order
    AttentionChapter, DeiTChapter, MapsChapter, RegionsChapter, ImagesChapter, PerViTChapter, ExtremesChapter, ConViTChapter, LSATChapter,
    GatedMLPChapter,
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, on the CPU, and where it is from."""

    model: VisionModel
    config: Config  # of its training; for fresh weights, the defaults with this model
    classes: list[str]  # names by output index; empty for fresh weights, which fit any
    origin: dict[str, object]  # JSON: checkpoint as given, step (None: fresh), weights (model, ema or fresh)


def read_subject(source: str, step: int | str | None = None, seed: int = 0) -> Subject:
    """Read a run folder, one of its checkpoints or an exported file, or build the model of that name with fresh weights.
    Raises UserError: neither a path nor a model's name; damaged; weights not finite; a step of fresh weights."""
    if is_path(source):
        trained = read_trained(Path(source), step)
        origin = {"checkpoint": source, "step": trained.step, "weights": trained.kind}
        return Subject(trained.build_model(), trained.config, trained.classes, origin)
    if not is_timm(source) and source not in list_models():
        remedy = f"pass a run folder, an exported file, or one of {', '.join(list_models())}"
        raise UserError(f"{source} is neither a file or folder nor a model", remedy)
    if step is not None:
        raise UserError(f"--step is {step}, but {source} is a model with fresh weights", "leave it out, or pass a run folder")
    entry = model_entry(source)
    tree = {"model": {"name": source, "image_size": entry.image_size, "num_classes": entry.num_classes}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(source, entry.num_classes, entry.image_size).eval()
    origin = {"checkpoint": source, "step": None, "weights": "fresh"}
    return Subject(model, config_from_dict(tree, source=source), [], origin)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command was asked for, see :mod:`pipeline.analyze`."""

    output: Path  # an existing folder
    data: Place | None = None  # None: what the weights alone show
    split: str = "val"
    images: int = 1024  # at most so many
    only: Sequence[str] = ()  # names of figures; empty: all
    query: tuple[int, int] | None = None  # (row, column) of a token; None: the centre
    example: Sequence[str] = ()  # keys of images that are shown; empty: ``examples`` at random
    examples: int = 4
    batch_size: int = 16  # images per process and forward pass
    seed: int = 0  # of the choice of images


def analyze(subjects: Sequence[Subject], options: Options) -> None:
    """Analyze models and write the result: of several, each in a folder of its own, and a page that compares them. Collective.
    Raises UserError: the images are not there or not a model's, or nothing that was asked for applies."""
    if len(subjects) == 1:
        _plan(subjects[0], options)(init_world())
        disconnect()
        return
    names = model_names([str(each.origin["checkpoint"]) for each in subjects], [each.config.model.name for each in subjects])
    folders = [options.output / name for name in names]
    for folder in folders:
        prepare_output(folder)
    passes = [_plan(each, replace(options, output=folder)) for each, folder in zip(subjects, folders)]
    world = init_world()
    results = [analyze_one(world) for analyze_one in passes]
    if world.is_main:
        found = compared(dict(zip(names, results)))
        sources = {name: str(each.origin["checkpoint"]) for name, each in zip(names, subjects)}
        about = {"model": ", ".join(names), "models": sources, "images": results[0]["images"]}
        write_analysis(options.output, about, found)
        console.say(f"{counted(len(found.plots), 'figure')} of {len(names)} models; {options.output / PAGE}")
    disconnect()


def _plan(subject: Subject, options: Options) -> Callable[[World], dict[str, Any]]:
    """Check what is asked of a model; returns what carries it out, and gives what is in ``analysis.json``, on rank 0."""
    its = subject.config.model
    request = Request(subject.model, its.image_size, options.query)
    with console.stage("looking at the weights"):
        chapters = chapters_of(request)
        findings = findings_of(chapters)
    if not chapters:
        raise UserError(f"pipeline.analyze requires a model of this project's families, got {its.name}", "analyze one of them")
    check_query(request)
    check_names(options.only, findings, its.name)
    split = numbers = None
    if options.data is None:
        restrict(findings, options.only)  # raises before the start of several processes
    else:
        split = open_split(options.data, options.split, subject.classes or None)
        if subject.classes:  # fresh weights have none, and take any
            check_same_classes(split, subject.classes, of=str(subject.origin["checkpoint"]))
        if len(split) == 0:
            problem = f"{split.folder} must have at least 1 image in {options.split}, got 0"
            raise UserError(problem, "pass another --data or --split")
        numbers = example_numbers(split, options.example, options.examples, options.seed)
    return partial(_carry_out, subject, options, request, findings, split, numbers)


def _carry_out(
    subject: Subject, options: Options, request: Request, findings: Findings, split: Any, numbers: Any, world: World
) -> dict[str, Any]:
    its, result = subject.config.model, {}
    images: dict[str, Any] | None = None
    if split is not None and needs_images(findings, options.only):
        subject.model.to(world.device)
        config = subject.config.with_values({"eval.batch_size": options.batch_size})
        with console.stage("reading the examples"):
            examples = load_examples(split, numbers, config, world) if world.is_main else []
        request = replace(request, examples=examples)
        chapters = chapters_of(request)
        # In the order of the split, in which reading is fastest.
        chosen = ChosenImages(split, np.sort(choose(len(split), options.images, options.seed)))
        loader = evaluation_loader(chosen, config, world)
        count = run_pass(subject.model, loader, world, [seen for chapter in chapters for seen in chapter.collectors])
        report_bad_samples(world, loader.bad.take_unreported(), {})
        loader.close()
        where = {"of": len(split), "data": str(options.data), "split": split.split, "seed": options.seed}
        images = {"count": count, "left_out": len(chosen) - count, **where}
        with console.stage("collecting what was found"):
            findings = findings_of(chapters) if world.is_main else findings
    if world.is_main:
        findings = restrict(findings, options.only)
        about = {
            "model": its.name,
            "switches": its.switches,
            "image_size": its.image_size,
            "origin": subject.origin,
            "images": images,
            "query": None if options.query is None else list(options.query),
            "examples": [{"key": example.key, "label": example.label} for example in request.examples],
        }
        with console.stage(f"drawing {counted(len(findings.plots), 'figure')}"):
            result = write_analysis(options.output, about, findings)
        made = counted(len(findings.plots), "figure") + (f", {len(findings.omitted)} omitted" if findings.omitted else "")
        console.say(f"{made}; {options.output / PAGE}, numbers in {options.output / ANALYSIS}")
    subject.model.to("cpu")  # the next model's turn
    return result


def choose(size: int, count: int, seed: int) -> np.ndarray:
    """Numbers of ``count`` samples out of ``size``, at random without replacement; all of them if there are fewer. The first of them are a
    random choice too, and the same for every count: (min(count, size),) int64, in random order."""
    return sample_at(np.arange(min(count, size)), 0, size, seed, Stream.SUBSET)


def example_numbers(split: ShardSet | ImageFolder, keys: Sequence[str], count: int, seed: int) -> np.ndarray:
    """Sample numbers of the examples: those with the given keys, or without keys the first ``count`` of :func:`choose`. Raises
    UserError: there is no sample of a key."""
    if not keys:
        return choose(len(split), count, seed)
    found = {key: index for index in range(len(split)) if (key := split.key(index)) in keys}
    for key in keys:
        if key not in found:
            problem = f"{split.folder} has no sample {key!r} in {split.split or 'the folder'}"
            raise UserError(problem, f"pass keys such as {split.key(0)} and {split.key(len(split) - 1)}")
    return np.array([found[key] for key in keys], dtype=np.int64)


def load_examples(split: ShardSet | ImageFolder, numbers: np.ndarray, config: Config, world: World) -> list[Example]:
    """Decode the examples, by their sample numbers (n,), as an evaluation does. Those that cannot be used are left out, with a warning.
    Not collective."""
    if len(numbers) == 0:
        return []
    images = ChosenImages(split, numbers)
    one_batch = {"eval.batch_size": len(numbers), "data.read_ahead": 1, "data.prefetch": 1}
    loader = evaluation_loader(images, config.with_values(one_batch), World(0, 1, world.device, world.cpu_threads))
    batch = next(loader)
    loader.close()
    for sentence in loader.bad.take_unreported().values():
        _log.warning(sentence)
    mean, std = torch.tensor([config.data.mean, config.data.std], device=world.device)[..., None, None]  # (3, 1, 1) each
    return [
        Example(
            key=images.key(place),
            label=images.class_names[int(batch.request.label[place])],
            pixels=(batch.images[place] * std + mean).clamp(0, 1).cpu(),
            image=batch.images[place].clone(),
        )
        for place in range(len(numbers))
        if batch.request.valid[place]
    ]


def chapters_of(request: Request) -> list[Chapter]:
    """The chapters that apply to the model, in the page's order."""
    return [chapter(request) for chapter in CHAPTERS if chapter.applies(request.model)]


@torch.no_grad()
def findings_of(chapters: Sequence[Chapter]) -> Findings:
    """What the chapters found. Before a pass over images: what the weights show, with figures that need images among the omitted."""
    findings = Findings()
    for chapter in chapters:
        chapter.add_findings(findings)
    return findings


def check_names(only: Sequence[str], findings: Findings, model: str) -> None:
    """Check the names given to ``--only`` by the findings of the weights. Raises UserError: the model has no figure of that
    name, whether the name is wrong or another family's."""
    known = [*(plot.name for plot in findings.plots), *findings.omitted]
    for name in only:
        if not any(_is_of(figure, name) or _is_of(name, figure) for figure in known):
            has = ", ".join(dict.fromkeys(known))
            raise UserError(f"{model} has no figure {name!r}, it has {has}", "pass some of these to --only")


def restrict(findings: Findings, only: Sequence[str]) -> Findings:
    """The findings with the named figures alone; the numbers stay. Empty ``only``: all. Raises UserError: none of them
    applies."""
    if not only:
        return findings
    plots = [plot for plot in findings.plots if any(_is_of(plot.name, name) for name in only)]
    omitted = {each: why for each, why in findings.omitted.items() if any(_is_of(each, name) for name in only)}
    if not plots:
        reasons = "; ".join(f"{name}: {why.rstrip('.')}" for name, why in omitted.items())
        raise UserError(f"none of the figures of --only can be made ({reasons})", "choose others, or see to the reasons")
    return replace(findings, plots=plots, omitted=omitted)


def needs_images(findings: Findings, only: Sequence[str]) -> bool:
    """Whether a pass over images can add anything to the figures asked for. Args: findings: of the weights."""
    complete = [plot.name for plot in findings.plots if not plot.more_with_images]
    return not only or not all(name in complete for name in only)


def check_query(request: Request) -> None:
    """Check that the query is inside the model's grid of patches. Raises UserError: it is not, or no figure has a query."""
    query, size = request.query, request.image_size
    if query is None:
        return
    asked = f"--query is {query[0]},{query[1]}, but"
    if isinstance(request.model, LSAT):
        raise UserError(f"{asked} LSAT's figures show all patches", "leave it out")
    side, _ = patch_grid(size, size, request.model.patch)
    if not all(0 <= place < side for place in query):
        problem = f"{asked} at {size} pixels there are {side} x {side} patches of {request.model.patch} pixels"
        raise UserError(problem, f"pass a row and a column from 0 to {side - 1}")


def _is_of(figure: str, name: str) -> bool:
    """Whether a figure has the name, or the name and a number, ``maps_2``."""
    return figure == name or (figure.startswith(f"{name}_") and figure[len(name) + 1 :].isdigit())
