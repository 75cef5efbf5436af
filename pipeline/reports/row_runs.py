"""Find which runs belong to a row of a paper's table, and which are comparable with each other.

A run belongs to a row if its recorded config is the row's in every key that decides the weights (:func:`~pipeline.reports.papers.decides`),
and its data has the paper's numbers of classes, training images (within 1 %) and validation images. The seed, the precision and the
order in which shards are read may differ. The name of the run's folder does not count.

A row with ``test`` has the figures of an evaluation of such a run (:class:`Measured`).

With ``any_data`` the model's name and switches decide, without the widths; what else differs from the row's recipe is the run's
:class:`Setting`, and only runs of one setting stand in one column.
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config import find_recipe, load_config
from pipeline.config.loading import shipped_recipe
from pipeline.config.tables import DATA_SETS, PaperRow, PaperTable
from pipeline.reports.papers import changes, decides
from pipeline.runs.folder import RunFolder, flat_config, switches_of

WIDTHS = "model.switches.widths"  # the one switch that is a size
_NAMED = 3  # keys that a reason names
_TOLERANCE = 0.01  # of the number of images: repeated augmentation rounds an epoch, a subset its classes


@dataclass(frozen=True)
class Setting:
    """What runs of one column have in common."""

    changes: dict[str, Any]  # config key -> value, where they differ from the rows' recipes; empty for the paper's recipe
    classes: int
    images: int  # of the training set, before a row takes a part of them
    val_images: int

    @property
    def key(self) -> str:
        """Equal for equal settings."""
        return str((sorted(self.changes.items()), self.classes, self.images, self.val_images))

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


@dataclass(frozen=True)
class Measured:
    """What ``pervit evaluate --json`` and ``pervit throughput --json`` have written: figures that no training gives."""

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, paths: list[Path]) -> "tuple[Measured, list[Path], list[str]]":
        """The contents of the ``.json`` files among paths, the other paths, and a sentence for each file that holds neither."""
        found, problems = cls(), []
        for file in (path for path in paths if path.suffix == ".json"):
            try:
                content = json.loads(file.read_bytes())
                for row in content if isinstance(content, list) else [content]:
                    if "fp32" not in row and not {"checkpoint", "top1"} <= row.keys():
                        raise ValueError(row)
                    (found.speeds if "fp32" in row else found.evaluations).append(row)
            except (OSError, ValueError, TypeError, AttributeError):
                problems.append(f"{file} holds no result of `pervit evaluate --json` or `pervit throughput --json`.")
        return found, [path for path in paths if path.suffix != ".json"], problems

    def evaluated(self, run: RunFolder, row: PaperRow) -> dict[str, Any] | None:
        """The last evaluation of a run with the row's switches of the test, on as many images as the run's own."""
        wanted, folder = ({**run.settings.model.switches, **row.test}, run.val_images), run.path.resolve()
        alike = (found for found in reversed(self.evaluations) if (found.get("switches"), found.get("count")) == wanted)
        return next((found for found in alike if Path(found["checkpoint"]).resolve().is_relative_to(folder)), None)

    def speed_of(self, keys: dict[str, Any]) -> dict[str, Any] | None:
        """The last measurement of the model of a flat config, with its switches and image size."""
        wanted = (keys["model.name"], keys["model.image_size"], switches_of(keys))
        last = reversed(self.speeds)
        return next((row for row in last if (row.get("model"), row.get("image_size"), row.get("switches", {})) == wanted), None)


@dataclass
class Filled:
    """A table with the runs of its rows."""

    table: PaperTable
    any_data: bool
    measured: Measured = field(default_factory=Measured)
    settings: list[Setting] = field(default_factory=list)  # the columns; one at most unless ``any_data``
    runs: dict[tuple[int, int], list[RunFolder]] = field(default_factory=dict)  # (row, setting) -> a run for each seed, by seed
    unused: dict[str, list[str]] = field(default_factory=dict)  # reason -> the runs that are in no row for it

    def missing(self) -> list[PaperRow]:
        """The rows of ours without a run in the first column, each config once."""
        rows: dict[str, PaperRow] = {}
        for number, row in sorted(enumerate(self.table.rows), key=lambda numbered: bool(numbered[1].test)):
            if row.config and not self.runs.get((number, 0)):
                rows.setdefault(row.config, row)
        return list(rows.values())

    def leave_out(self, run: RunFolder, reason: str) -> None:
        """Note why a run is in no row; once, though its config may have two rows."""
        paths = self.unused.setdefault(reason, [])
        if str(run.path) not in paths:
            paths.append(str(run.path))


def fill(table: PaperTable, runs: list[RunFolder], any_data: bool = False, measured: Measured | None = None) -> Filled:
    """Sort runs, of any table, into the rows of this one; with ``any_data`` also those of other data, size or recipe."""
    filled = Filled(table, any_data, measured or Measured())
    settings: dict[str, Setting] = {}
    placed: dict[str, dict[int, list[RunFolder]]] = defaultdict(lambda: defaultdict(list))  # key of a setting -> row -> runs
    for run in runs:
        found = [_setting(run, row, table, any_data) for row in table.rows]
        for number, setting in enumerate(found):
            if isinstance(setting, Setting):
                settings.setdefault(setting.key, setting)
                placed[setting.key][number].append(run)
        if not any(isinstance(setting, Setting) for setting in found):
            reasons = [reason for reason in found if isinstance(reason, str)]
            other = "its model or its switches are those of no row of this table"
            filled.leave_out(run, min(reasons, key=len, default=other))
    if any_data:
        _join_widened_rows(placed, settings, filled)
    for column, key in enumerate(sorted(placed, key=lambda key: -sum(map(len, placed[key].values())))):
        filled.settings.append(settings[key])
        for number, members in placed[key].items():
            filled.runs[number, column] = _one_per_seed(members, filled)
    return filled


@cache
def recipe_keys(config: str) -> dict[str, Any]:
    """Dotted key -> value of a row's config, as :attr:`RunFolder.flat`."""
    return flat_config(load_config(shipped_recipe(config) or find_recipe(config)))


def _setting(run: RunFolder, row: PaperRow, table: PaperTable, any_data: bool) -> Setting | str | None:
    """Of a run that belongs to the row; a reason why it nearly does; None if it is another model."""
    if row.config is None:
        return None
    recipe = recipe_keys(row.config)
    changed = {key: value for key, (_, value) in changes(recipe, run.flat).items() if decides(key)}
    for key in table.either:
        if key in changed and (changed[key] is None) == (recipe.get(key) is None):
            del changed[key]
    if any(key == "model.name" or key.startswith("model.switches.") and key != WIDTHS for key in changed):
        return None
    if not run.state.finished:
        return "it is not finished"
    if run.images is None or run.val_images is None:
        return "its log does not tell how many images it was trained and evaluated on"
    data = row.data
    if not any_data:
        if changed:
            return f"its data or recipe is not that of its row ({_named(changed)}); --any-data shows it"
        if not _close(run.images, data.images * row.subset) or run.val_images != data.val_images:
            part = "" if row.subset == 1 else f"{100 * row.subset:g} % of "
            found = f"{run.images:,} training and {run.val_images:,} validation images"
            return f"its data must be {part}{data.title}, got {found}; --any-data shows it"
        return Setting({}, data.classes, data.images, data.val_images)
    images = run.images
    if len({other.subset for other in table.rows if other.config}) > 1:
        if run.subset is None:
            return f"its shards {run.settings.data.path} are not there to tell which part of the images they are"
        if not math.isclose(run.subset, row.subset):
            return None
        images = round(run.images / row.subset)
    if row_has_own_widths(row):
        changed.pop(WIDTHS, None)
    return Setting(changed, run.settings.model.num_classes, images, run.val_images)


def row_has_own_widths(row: PaperRow) -> bool:
    """Whether a row's recipe widens the model to equal cost, so that at another size its widths are others."""
    return row.config is not None and WIDTHS in recipe_keys(row.config)


def _join_widened_rows(placed: dict[str, dict[int, list[RunFolder]]], settings: dict[str, Setting], filled: Filled) -> None:
    """Put the runs of rows with widths of their own beside the rows that are otherwise of the same setting."""
    for key in list(placed):
        if not all(row_has_own_widths(filled.table.rows[number]) for number in placed[key]):
            continue
        for members in placed[key].values():
            common = Counter(str(run.flat.get(WIDTHS)) for run in members).most_common(1)[0][0]
            for run in [run for run in members if str(run.flat.get(WIDTHS)) != common]:
                filled.leave_out(run, f"other runs of its row have the widths {common}")
                members.remove(run)
        beside = [other for other in placed if other != key and _without_widths(settings[other]).key == key]
        if not beside:
            continue
        for number, members in placed.pop(key).items():
            if len(beside) == 1:
                placed[beside[0]][number] += members
            for run in members if len(beside) > 1 else ():
                filled.leave_out(run, f"there are runs of {len(beside)} sizes, and to which one it belongs is not recorded")


def _without_widths(setting: Setting) -> Setting:
    return replace(setting, changes={key: value for key, value in setting.changes.items() if key != WIDTHS})


def _one_per_seed(runs: list[RunFolder], filled: Filled) -> list[RunFolder]:
    """The latest run of each seed, by seed."""
    kept: dict[int, RunFolder] = {}
    for run in sorted(runs, key=lambda run: run.result.get("time", 0) if run.result else 0):
        if (older := kept.get(run.settings.seed)) is not None:
            filled.leave_out(older, "a later run of its row has the same seed")
        kept[run.settings.seed] = run
    return [kept[seed] for seed in sorted(kept)]


def _named(changed: dict[str, Any]) -> str:
    named = ", ".join(f"{key}={value}" for key, value in list(changed.items())[:_NAMED])
    more = len(changed) - _NAMED
    return f"{named} and {more} more key{'s' * (more > 1)}" if more > 0 else named


def _close(images: float, wanted: float) -> bool:
    return abs(images - wanted) <= _TOLERANCE * wanted
