"""Run an analysis from a model to the files: figures of the weights, a pass over images, examples, writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from pipeline.analysis import images as choosing
from pipeline.analysis import survey
from pipeline.analysis.chapter import Chapter, Example, Findings, Request
from pipeline.analysis.chapters import chapters_of
from pipeline.analysis.measures import run_pass
from pipeline.analysis.survey import Subject
from pipeline.analysis.writing import ANALYSIS, PAGE, write_analysis
from pipeline.cluster.world import World, disconnect, init_world
from pipeline.config import Config
from pipeline.inference.evaluation import evaluation_loader
from pipeline.logs import console
from pipeline.logs.data_trouble import BadSampleReport
from pipeline.shards.image_folder import ImageFolder
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command was asked for, see :mod:`pipeline.analyze`.

    Attributes:
        data: None: what the weights alone show.
        images: at most so many, of ``split``.
        only: names of figures; empty: all.
        query: (row, column) of a token; None: the centre.
        example: keys of images that are shown; empty: ``examples`` at random.
        batch_size: images per process and forward pass.
        seed: of the choice of images.
        output: an existing folder.
    """

    output: Path
    data: Place | None = None
    split: str = "val"
    images: int = 1024
    only: Sequence[str] = ()
    query: tuple[int, int] | None = None
    example: Sequence[str] = ()
    examples: int = 4
    batch_size: int = 16
    seed: int = 0


def analyze(subject: Subject, options: Options) -> None:
    """Analyze a model and write the result. Collective.

    Raises:
        UserError: the images are not there or not the model's, or nothing that was asked for applies.
    """
    its = subject.config.model
    survey.check_has_chapter(subject.model, its.name)
    survey.check_query(subject.model, its.image_size, options.query)
    findings = survey.weights_findings(Request(subject.model, its.image_size, options.query))
    survey.check_names(options.only, findings, its.name)
    split = numbers = None
    if options.data is None:
        survey.restrict(findings, options.only)  # raises before the start of several processes
    else:
        split = choosing.open_images(options.data, options.split, subject)
        numbers = choosing.example_numbers(split, options.example, options.examples, options.seed)
    world = init_world()
    images, examples = None, []
    if split is not None and numbers is not None and survey.needs_images(findings, options.only):
        subject.model.to(world.device)
        config = _with_batch_size(subject.config, options.batch_size)
        examples = choosing.load_examples(split, numbers, config, world) if world.is_main else []
        chapters = chapters_of(Request(subject.model, its.image_size, options.query, examples))
        images = _pass(subject, chapters, split, options, config, world)
        findings = Findings()
        if world.is_main:
            with torch.no_grad():
                for chapter in chapters:
                    chapter.add_findings(findings)
    if world.is_main:
        findings = survey.restrict(findings, options.only)
        write_analysis(options.output, _about(subject, options, images, examples), findings)
        made = f"figures: {len(findings.plots)}" + (f", omitted: {len(findings.omitted)}" if findings.omitted else "")
        console.say(f"{made}; {options.output / PAGE}, numbers in {options.output / ANALYSIS}")
    disconnect()


def _pass(
    subject: Subject, chapters: list[Chapter], split: ShardSet | ImageFolder, options: Options, config: Config, world: World
) -> dict[str, object]:
    """Show the chosen images to the chapters' collectors, in fp32. Collective; returns ``images`` of ``analysis.json``."""
    chosen = choosing.chosen_images(split, options.images, options.seed)
    collectors = [collector for chapter in chapters for collector in chapter.collectors()]

    def progress(batches: range) -> Iterable[int]:
        return tqdm(batches, desc="analyzing", unit="batch", leave=False, disable=None if world.is_main else True)

    loader = evaluation_loader(chosen, config, world)
    count = run_pass(subject.model, loader, world, collectors, progress)
    BadSampleReport(world).update(loader.bad.take_unreported())
    loader.close()
    return {
        "count": count,
        "left_out": len(chosen) - count,
        "of": len(split),
        "data": str(options.data),
        "split": split.split,
        "seed": options.seed,
    }


def _with_batch_size(config: Config, batch_size: int) -> Config:
    return config.with_values({"eval.batch_size": batch_size})


def _about(
    subject: Subject, options: Options, images: dict[str, object] | None, examples: Sequence[Example]
) -> dict[str, object]:
    its = subject.config.model
    return {
        "model": its.name,
        "switches": its.switches,
        "image_size": its.image_size,
        "origin": subject.origin,
        "images": images,
        "query": None if options.query is None else list(options.query),
        "examples": [{"key": each.key, "label": each.label} for each in examples],
    }
