"""Write the model card beside an export: what the model is, how good it is, how it was trained, how to load it."""

import re
import sys
from pathlib import PurePath
from typing import Any

from pipeline.errors import UserError, first_few, size_text
from pipeline.exporting import Facts, Subject, Training

_SHOWN = 10  # class names
_PATHS = (("data", "path"), ("train", "init_from"), ("train", "teacher"), ("train", "teacher_weights"))
_RECIPE = ("seed", "model", "data", "augment", "train", "optim")  # sections that decide the weights
_MACHINE = {"data": "num_threads decode prefetch read_ahead max_bad_samples path".split(), "train": ["compile"]}
_FRONT = """---
library_name: {library}
pipeline_tag: image-classification
tags: [image-classification, {model}]
# license: yours to choose, before you publish this
---

"""


def write_card(subject: Subject, facts: Facts, snippet: str, size: int, library: str | None) -> str:
    """A model card in Markdown, with what the format says of the export (``facts``), Python that loads it, and the bytes of all files.
    ``library`` is of the front matter that model hubs read; None: no front matter."""
    its, known = subject.description, subject.training
    front = _FRONT.format(library=library, model=its.model.replace(":", "-")) if library else ""
    parts = [
        _plain(f"# {its.model}" + (f" ({known.run})" if known.run and known.run != its.model else "")),
        _table(_model_lines(subject)),
        "## Results",
        _results(subject),
        "## Training",
        _table(_training_lines(subject)),
        _recipe(known),
        "## Loading",
        f"```python\n{snippet}\n```",
        "`scores` are logits, in the order of the classes.",
        "## This export",
        _table({**facts, "Size": size_text(size), "Made with": _versions(_here())}),
        "## Licence",
        "Not stated. Whoever publishes the model chooses one and names it here; the data set's terms may restrict the choice.",
    ]
    return front + "\n\n".join(part for part in parts if part) + "\n"


def _model_lines(subject: Subject) -> Facts:
    from pipeline.models import model_entry

    its, size = subject.description, subject.description.image_size
    try:
        entry = model_entry(its.model)
        what, paper = entry.description, entry.paper
    except UserError:  # the registry does not describe it
        what, paper = "", ""
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    switches = ", ".join(f"{name}={value}" for name, value in its.switches.items())
    return {
        "Model": f"`{its.model}`" + (f": {what}" if what else ""),
        "Switches": f"`{switches}`" if switches else "",
        "Paper": paper,
        "Parameters": f"{parameters:,}",
        "Classes": f"{its.num_classes:,}: {first_few(its.shown, _SHOWN)}",
        "Weights": f"{'moving average (EMA)' if its.weights == 'ema' else 'as trained'}, step {its.step:,}",
        "Input": f"(B, 3, {size}, {size}), RGB; short side resized to {int(size / its.eval_crop)} (bicubic), centre cropped to {size}; pixels in "
        f"[0, 1], less the mean {its.mean}, divided by {its.std}",
    }


def _results(subject: Subject) -> str:
    rows = subject.training.results
    if not rows:
        return "Not recorded for these weights. `pervit evaluate` gives them with their counts."
    lines = ["| images | top-1 | right | top-5 | right | loss |", "|---|---|---|---|---|---|"]
    for row in rows:
        right = [f"{row[name]:,}" if isinstance(row.get(name), int) else "" for name in ("correct1", "correct5", "count")]
        lines.append(
            f"| {right[2]} of the val split | {row['top1']:.2f} % | {right[0]} | {row['top5']:.2f} % | {right[1]} | {row['loss']:.4f} |"
        )
    return "\n".join(lines)


def _training_lines(subject: Subject) -> Facts:
    known = subject.training
    train: dict[str, Any] = known.config.get("train", {})
    name, count, mark = (known.data.get(key) for key in ("name", "samples", "fingerprint"))
    epochs = f", {known.samples / count:.1f} epochs" if known.samples and count else ""
    return {
        "Steps": f"{subject.description.step:,}",
        "Images seen": f"{known.samples:,}{epochs}" if known.samples else "",
        "Data set": f"{name or 'unnamed'}: {count:,} images, fingerprint {str(mark)[:12]}" if known.data else "",
        "Processes": f"{known.world_size}, ZeRO {known.zero_stage}" if known.world_size else "",
        "Batch size": f"{train['global_batch_size']:,}" if train else "",
        "Precision": subject.description.precision,
        "Started from": str(train.get("init_from") or ""),
        "Teacher": str(train.get("teacher") or ""),
        "Versions": _versions(known.versions),
    }


def _recipe(known: Training) -> str:
    """The config, folded away, without paths and what only concerns the machine."""
    if not known.config:
        return ""
    import yaml

    kept = {section: known.config[section] for section in _RECIPE if section in known.config}
    for section, left_out in _MACHINE.items():
        if isinstance(kept.get(section), dict):
            kept[section] = {key: value for key, value in kept[section].items() if key not in left_out}
    text = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=110).rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # no value ends it
    return f"<details><summary>Recipe</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"


def without_folders(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it may be published: of paths the last name alone."""
    tree = {section: dict(value) if isinstance(value, dict) else value for section, value in config.items()}
    tree.pop("output_dir", None)
    for section, key in _PATHS:
        value = tree.get(section, {}).get(key)
        if isinstance(value, str) and ":" not in value:  # torchvision:NAME is not a path
            tree[section][key] = PurePath(value).name
    return tree


def _here() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"torch": torch.__version__, "Python": ".".join(map(str, sys.version_info[:3]))}
    try:
        return {"pervit-pipeline": version("pervit-pipeline"), **found}
    except PackageNotFoundError:  # run from the repository's folder
        return found


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _table(lines: Facts) -> str:
    """A row for each that is known."""
    rows = (f"| {name} | {_plain(text)} |" for name, text in lines.items() if text)
    return "\n".join(["| | |", "|---|---|", *rows])


def _plain(text: str) -> str:
    """Names come from files: nothing in them may end a cell or the line, or become a link, a picture or HTML."""
    return " ".join(re.sub(r"\||\](?=[(\[])", r"\\\g<0>", text).replace("<", "&lt;").split())
