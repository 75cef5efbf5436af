"""Find which runs belong to a row of a paper's table, and which are comparable with each other.

A run belongs to a row if its recorded config is the row's in every key that decides the weights (:func:`~pipeline.reports.papers.decides`),
and its data has the paper's numbers of classes, training images (within 1 %) and validation images. The seed, the precision and the
order in which shards are read may differ. The name of the run's folder does not count.

With ``any_data`` the model's name and switches decide, without the widths; what else differs from the row's recipe is the run's
:class:`Setting`, and only runs of one setting stand in one column.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pipeline.config import load_config
from pipeline.reports.papers import DATA_SETS, PaperRow, PaperTable, decides, recipe_file
from pipeline.runs.folder import RunFolder, flat_config

_WIDTHS = "model.switches.widths"  # the one switch that is a size
_TOLERANCE = 0.01  # of the number of images: repeated augmentation rounds an epoch, a subset its classes


@dataclass(frozen=True)
class Setting:
    """What runs of one column have in common."""

    changes: dict[str, Any]  # config key -> value, where they differ from the rows' recipes; empty for the paper's recipe
    classes: int
    images: int  # of the training set, before a row takes a part of them
    val_images: int

    @property
    def data(self) -> str:
        """The data set, by name where its numbers are known ones."""
        numbers = f"{self.classes:,} classes, {self.images:,} training and {self.val_images:,} validation images"
        for known in DATA_SETS.values():
            if (self.classes, self.val_images) != (known.classes, known.val_images):
                continue
            if _close(self.images, known.images):
                return f"{known.title} ({numbers})"
            if self.images < known.images:
                return f"{100 * self.images / known.images:.3g} % of {known.title} ({numbers})"
        return numbers


@dataclass
class Filled:
    """A table with the runs of its rows."""

    table: PaperTable
    any_data: bool
    settings: list[Setting] = field(default_factory=list)  # the columns; one at most unless ``any_data``
    runs: dict[tuple[int, int], list[RunFolder]] = field(default_factory=dict)  # (row, setting) -> a run for each seed, by seed
    unused: dict[str, list[str]] = field(default_factory=dict)  # reason -> the runs that are in no row for it

    def missing(self, setting: int) -> list[PaperRow]:
        """The rows of ours without a run, each config once."""
        rows: dict[str, PaperRow] = {}
        for number, row in enumerate(self.table.rows):
            if row.config and not self.runs.get((number, setting)):
                rows.setdefault(row.config, row)
        return list(rows.values())


def fill(table: PaperTable, runs: list[RunFolder], any_data: bool = False) -> Filled:
    """Sort runs into the rows of a table.

    Args:
        table: the table.
        runs: all runs that are there, also those of other tables.
        any_data: whether a run of a row's switches counts that differs in data, size or recipe.
    """
    filled = Filled(table, any_data)
    placed: dict[tuple[str, ...], dict[int, list[RunFolder]]] = defaultdict(lambda: defaultdict(list))
    settings: dict[tuple[str, ...], Setting] = {}
    for run in runs:
        reasons = []
        for number, row in enumerate(table.rows):
            found = _setting(run, row, table, any_data)
            if isinstance(found, Setting):
                place = (str(sorted(found.changes.items())), str(found.classes), str(found.images), str(found.val_images))
                settings.setdefault(place, found)
                placed[place][number].append(run)
            elif found:
                reasons.append(found)
        if not any(run in members for rows in placed.values() for members in rows.values()):
            reason = min(reasons, key=len, default="its model or its switches are those of no row of this table")
            filled.unused.setdefault(reason, []).append(str(run.path))
    if any_data:
        _join_widened_rows(placed, settings, table, filled.unused)
    order = sorted(placed, key=lambda key: -sum(map(len, placed[key].values())))
    for column, key in enumerate(order):
        filled.settings.append(settings[key])
        for number, members in placed[key].items():
            filled.runs[number, column] = _one_per_seed(members, filled.unused)
    return filled


def differences(run: RunFolder, row: PaperRow) -> dict[str, Any]:
    """Config key -> the run's value, for the keys that decide the weights and differ from the row's recipe."""
    ours, recipe = run.flat, recipe_keys(str(row.config))
    keys = [key for key in {**recipe, **ours} if decides(key)]
    return {key: ours.get(key) for key in keys if not _same(ours.get(key), recipe.get(key))}


@cache
def recipe_keys(config: str) -> dict[str, Any]:
    """Dotted key -> value of a row's config, as :attr:`RunFolder.flat`."""
    return flat_config(load_config(recipe_file(config)))


def _setting(run: RunFolder, row: PaperRow, table: PaperTable, any_data: bool) -> Setting | str | None:
    """Of a run that belongs to the row; a reason why it nearly does; None if it is another model."""
    if row.config is None:
        return None
    recipe = recipe_keys(row.config)
    changes = differences(run, row)
    for key in table.either:
        if key in changes and (changes[key] is None) == (recipe.get(key) is None):
            del changes[key]
    switches = [key for key in changes if key.startswith("model.switches.") and key != _WIDTHS]
    if switches or "model.name" in changes:
        return None
    if not run.state.finished:
        return "it is not finished"
    if run.images is None or run.val_images is None:
        return "its log does not tell how many images it was trained and evaluated on"
    if not any_data:
        if changes:
            return f"its data or recipe is not that of its row ({_named(changes)}); --any-data shows it"
        if not _close(run.images, table.data.images * row.subset) or run.val_images != table.data.val_images:
            part = "" if row.subset == 1 else f"{100 * row.subset:g} % of "
            return (
                f"its data must be {part}{table.data.title}, got {run.images:,} training and {run.val_images:,} validation images; "
                f"--any-data shows it"
            )
        return Setting({}, table.data.classes, table.data.images, table.data.val_images)
    images = run.images
    if len(table.subsets) > 1:
        if run.subset is None:
            return f"its shards {run.settings.data.path} are not there to tell which part of the images they are"
        if not math.isclose(run.subset, row.subset):
            return None
        images = round(run.images / row.subset)
    if row_has_own_widths(row):
        changes.pop(_WIDTHS, None)
    return Setting(changes, run.settings.model.num_classes, images, run.val_images)


def row_has_own_widths(row: PaperRow) -> bool:
    """Whether a row's recipe widens the model to equal cost, so that at another size its widths are others."""
    return row.config is not None and _WIDTHS in recipe_keys(row.config)


def _join_widened_rows(
    placed: dict[tuple[str, ...], dict[int, list[RunFolder]]],
    settings: dict[tuple[str, ...], Setting],
    table: PaperTable,
    unused: dict[str, list[str]],
) -> None:
    """Put the runs of rows with widths of their own beside the rows that are otherwise of the same setting."""
    for key in list(placed):
        if not all(row_has_own_widths(table.rows[number]) for number in placed[key]):
            continue
        alone = settings[key]
        beside = [other for other in placed if other != key and _without_widths(settings[other]) == alone]
        for members in placed[key].values():
            common = Counter(str(run.flat.get(_WIDTHS)) for run in members).most_common(1)[0][0]
            for run in [run for run in members if str(run.flat.get(_WIDTHS)) != common]:
                unused.setdefault(f"other runs of its row have the widths {common}", []).append(str(run.path))
                members.remove(run)
        if len(beside) == 1:
            for number, members in placed.pop(key).items():
                placed[beside[0]][number] += members
        elif beside:
            names = [str(run.path) for members in placed.pop(key).values() for run in members]
            unused.setdefault(f"there are runs of {len(beside)} sizes, and to which one it belongs is not recorded", []).extend(
                names
            )


def _without_widths(setting: Setting) -> Setting:
    changes = {key: value for key, value in setting.changes.items() if key != _WIDTHS}
    return Setting(changes, setting.classes, setting.images, setting.val_images)


def _one_per_seed(runs: list[RunFolder], unused: dict[str, list[str]]) -> list[RunFolder]:
    kept: dict[int, RunFolder] = {}
    for run in sorted(runs, key=lambda run: run.result.get("time", 0) if run.result else 0):
        if run.settings.seed in kept:
            older = unused.setdefault("a later run of its row has the same seed", [])
            if str(kept[run.settings.seed].path) not in older:  # a config may have two rows
                older.append(str(kept[run.settings.seed].path))
        kept[run.settings.seed] = run
    return [kept[seed] for seed in sorted(kept)]


def _named(changes: dict[str, Any], most: int = 3) -> str:
    named = ", ".join(f"{key}={value}" for key, value in list(changes.items())[:most])
    more = len(changes) - most
    return f"{named} and {more} more key{'s' * (more > 1)}" if more > 0 else named


def _same(ours: Any, theirs: Any) -> bool:
    """Equal values; a list and a tuple, an int and a float are."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)


def _close(images: float, wanted: float) -> bool:
    return abs(images - wanted) <= _TOLERANCE * wanted
