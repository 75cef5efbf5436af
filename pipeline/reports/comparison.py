"""Compare several runs: which differ only in their seed, in what the others differ, and how they ended."""

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from pipeline.config import decides_weights
from pipeline.reports.curves import Points
from pipeline.runs.folder import RunFolder

_NOT_COMPARED = ("seed", "output_dir", "train.init_from")
IMAGES = "training images"  # beside the config keys: data.path does not tell
_NAMED = 3  # differences in the name of a group


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and in what does not decide the weights."""

    number: int  # from 1, in the order given
    name: str  # what distinguishes it from the others
    keys: dict[str, Any]  # dotted key -> value of its config, and the number of training images
    runs: list[RunFolder]


def group_runs(runs: list[RunFolder]) -> list[Group]:
    """Runs by what they train, in the order in which they were given; the runs of a group by seed."""
    members: dict[str, list[RunFolder]] = {}
    for run in runs:
        members.setdefault(str(sorted(_decisive(run).items())), []).append(run)
    keys = [_decisive(runs[0]) for runs in members.values()]
    names = _names(keys, list(members.values()))
    return [
        Group(number, name, of_group, sorted(same, key=lambda run: (run.settings.seed, str(run.path))))
        for number, (name, of_group, same) in enumerate(zip(names, keys, members.values()), 1)
    ]


def by_data(groups: list[Group]) -> dict[str, list[Group]]:
    """Groups by their data, so that their accuracies compare: the numbers of classes and of validation images. One that is not
    evaluated yet goes with its classes."""
    found: dict[tuple[int, int | None], list[Group]] = {}
    for group in sorted(groups, key=lambda group: _val_images(group) is None):  # a stable order: those evaluated first
        classes, images = group.runs[0].settings.model.num_classes, _val_images(group)
        same = [key for key in found if key[0] == classes and images in (None, key[1])]
        found.setdefault(same[0] if same else (classes, images), []).append(group)
    titles = [f"{classes:,} classes" + (f", {images:,} validation images" if images else "") for classes, images in found]
    ordered = (sorted(members, key=lambda group: group.number) for members in found.values())
    return dict(zip(titles, ordered))


def differing_keys(groups: list[Group]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each group, for the keys in which groups differ."""
    names = dict.fromkeys(key for group in groups for key in group.keys)
    columns = {key: [group.keys.get(key) for group in groups] for key in names}
    return {key: values for key, values in columns.items() if len({str(value) for value in values}) > 1}


def mean_curve(curves: list[Points]) -> Points | None:
    """The mean of several curves where all of them are, at the places of the first: x and y, (n,) each; None if they do not meet."""
    curves = [(x, y) for x, y in curves if len(x)]
    if len(curves) < 2:
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = curves[0][0][(curves[0][0] >= first) & (curves[0][0] <= last)]
    if not len(places):
        return None
    return places, np.mean([np.interp(places, x, y) for x, y in curves], axis=0)


def results(runs: list[RunFolder], figure: str) -> list[float]:
    """``top1``, ``top5`` or ``loss`` of the last evaluations, one per run that was evaluated."""
    return [run.result[figure] for run in runs if run.result and run.result.get(figure) is not None]


def mean_and_spread(values: list[float]) -> tuple[float, float | None] | None:
    """Mean, and the standard deviation over the seeds (n - 1), None with one value; None without any."""
    return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None) if values else None


def mean_text(values: list[float], digits: int = 2) -> str:
    """Mean ± spread of what several runs reached; empty without any."""
    return " ± ".join(f"{value:.{digits}f}" for value in mean_and_spread(values) or () if value is not None)


def value_text(value: Any) -> str:
    """A value of a config as it is written there; empty for a key that is not there."""
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else yaml_text(value)


def yaml_text(value: Any) -> str:
    """A value of a config as a command takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).split("\n")[0]


def _decisive(run: RunFolder) -> dict[str, Any]:
    keys = {key: value for key, value in run.flat.items() if decides_weights(key) and key not in _NOT_COMPARED}
    return {**keys, IMAGES: run.images}


def _val_images(group: Group) -> int | None:
    return next((run.val_images for run in group.runs if run.val_images), None)


def _names(keys: list[dict[str, Any]], members: list[list[RunFolder]]) -> list[str]:
    """For each group its values of the keys in which groups differ. Where these are many: what it has unlike most of the others,
    or its model. With the folder's name where that does not tell two apart."""
    every = sorted(
        dict.fromkeys(key for of_group in keys for key in of_group),
        key=lambda key: (key != "model.name", not key.startswith("model."), key != IMAGES, key == "model.num_classes"),
    )
    values = {key: Counter(str(of_group.get(key)) for of_group in keys) for key in every}
    # A run without a step does not know its images yet.
    differing = [key for key in every if len(values[key].keys() - ({"None"} if key == IMAGES else set())) > 1]
    names = []
    for of_group in keys:
        if len(differing) <= _NAMED:
            named = differing + [IMAGES] * (of_group[IMAGES] is None and IMAGES not in differing and len(values[IMAGES]) > 1)
        else:
            named = [key for key in every if str(of_group.get(key)) != values[key].most_common(1)[0][0]]
        if named[:1] == ["model.name"] and values["model.name"][str(of_group["model.name"])] == 1:
            named = named[:1]  # another model has another recipe: its name is enough
        parts = [_part(key, of_group.get(key)) for key in named[:_NAMED]]
        parts += [f"and {len(named) - _NAMED} more"] * (len(differing) > _NAMED and len(named) > _NAMED)
        names.append(", ".join(parts) or str(of_group["model.name"]))
    return [f"{name} ({runs[0].name})" if names.count(name) > 1 else name for name, runs in zip(names, members)]


def _part(key: str, value: Any) -> str:
    if key == "model.name":
        return str(value)
    if key == IMAGES:
        return "no step yet" if value is None else f"{value:,} training images"
    section, _, last = key.rpartition(".")
    return f"{key if last == 'name' else last}={value_text(value) or 'default'}"
