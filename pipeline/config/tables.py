"""Read the papers' tables, ``configs/tables/*.yml``: the figures, and the configs of those rows that no file of ``configs/`` is.

Every value is text as the paper prints it. A row with a ``name`` is the config ``ablations/NAME``, a row with a ``config`` repeats
one, and a row with neither is another model's, with the paper's figures only. The names of a file's tables begin with the file's
name, and those of a table's configs with the table's, so that a config is found without reading the other papers.
"""

import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.values import parse_switches, parse_text
from pipeline.errors import UserError

_IMAGENET = "imagenet"  # a table's data without a word on it
ABLATIONS = "ablations/"  # the names of rows as configs begin with it
FIGURES = {"params_m": "Parameters (M)", "gmacs": "GMACs", "top1": "Top-1 (%)", "top5": "Top-5 (%)", "speed": "Images/s"}
_PACKAGE = Path(__file__).parent.parent
_UNITS = {"params_m": "M parameters", "gmacs": "GMACs", "top1": "% top-1", "top5": "% top-5", "speed": "images/s"}
_TABLE_KEYS = {*"paper tables title note remark columns figures data classes subset reference either rows".split()}
_ROW_KEYS = {*"labels config name base change about remark data classes subset test".split(), *FIGURES}


@dataclass(frozen=True)
class DataSet:
    """What tells a data set by a run's folder: numbers of classes, training and validation images."""

    title: str
    classes: int
    images: int
    val_images: int


DATA_SETS = {
    "imagenet": DataSet("ImageNet-1k", 1000, 1_281_167, 50_000),
    "cifar10": DataSet("CIFAR-10", 10, 50_000, 10_000),
    "cifar100": DataSet("CIFAR-100", 100, 50_000, 10_000),
    "inat19": DataSet("iNaturalist 2019", 1010, 265_213, 3_030),
    "imagenet_0-99": DataSet("the first 100 classes of ImageNet", 100, 129_500, 5_000),
}


@dataclass(frozen=True)
class PaperRow:
    """A row of a table."""

    labels: tuple[str, ...]  # its cells under the table's columns
    config: str | None  # as ``--config`` takes it, None for another model's row
    figures: dict[str, str]  # key of :data:`FIGURES` -> what the paper prints
    subset: float  # fraction of the training images
    data: DataSet
    file: Path  # that it stands in
    classes: str = ""  # of ImageNet, as ``pervit shard --classes`` takes them; empty: all
    test: dict[str, Any] = field(default_factory=dict)  # switches of its evaluation alone
    base: str | None = None  # the shipped config that it begins from; None unless the row itself is the config
    change: tuple[str, ...] = ()  # what it changes there: overrides, ``dotted.key=value``
    about: str = ""  # what it is, in words
    remark: str = ""  # what one has to know beside

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return _place(self.file, Path(self.config).name if self.base and self.config else list(self.labels))

    @property
    def part(self) -> str:
        """The folder of the shards of its part of the training images; empty where the row takes all of them."""
        if self.classes:
            return f"data/imagenet_{self.classes}"
        return f"data/imagenet_{round(100 * self.subset):02d}" if self.subset < 1 else ""

    @property
    def shards_command(self) -> str:
        """The command that makes :attr:`part`."""
        part = f"--classes {self.classes}" if self.classes else f"--subset {self.subset:g} --subset-rule first"
        made = f"--output {self.part} {part}"
        return f"pervit shard --source IMAGENET {made}" if self.part else ""

    @property
    def derived(self) -> dict[str, Any]:
        """The keys of its config that follow from the row."""
        keys: dict[str, Any] = {"output_dir": f"runs/{Path(self.config or '').name}"}
        classes = {"model": {"num_classes": self.data.classes}} if self.classes else {}
        return {**keys, "data": {"path": self.part}, **classes} if self.part else keys


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str  # as the configs of its rows begin
    paper: str
    title: str
    note: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]  # keys of :data:`FIGURES`, the columns of numbers
    data: DataSet  # of most rows
    reference: str | None  # config of the row from which differences are taken; None where rows differ in more than one thing
    either: tuple[str, ...]  # config keys of which a run has to have a value where the row's config has one, whatever it is
    rows: tuple[PaperRow, ...]

    @property
    def where(self) -> str:
        """Its place in the paper, such as ``Table 1``."""
        return self.title.partition(":")[0]

    def row_of(self, config: str | None) -> PaperRow | None:
        """The first row with a config."""
        return next((row for row in self.rows if config and row.config == config), None)


def shipped_recipes() -> Path:
    """The folder of the shipped configs: ``recipes/`` of the installed package, or ``configs/`` of a source checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def paper_tables() -> dict[str, PaperTable]:
    """All tables by name, in the order of the files."""
    files = sorted((shipped_recipes() / "tables").glob("*.yml"))
    return {name: table for file in files for name, table in read_tables(file).items()}


def row_names() -> list[str]:
    """The names of the rows that are configs, such as ``ablations/pervit_table5_lrn``."""
    return sorted(row.config for table in paper_tables().values() for row in table.rows if row.base and row.config)


def find_row(name: str) -> tuple[PaperTable, PaperRow] | None:
    """The row that is a config, by the config's name, with its table; None if there is none of that name."""
    file = shipped_recipes() / "tables" / f"{name.removeprefix(ABLATIONS).partition('_')[0]}.yml"
    if not name.startswith(ABLATIONS) or not file.is_file():
        return None
    rows = ((table, row) for table in read_tables(file).values() for row in table.rows if row.base)
    return next((found for found in rows if found[1].config == name), None)


def header(name: str) -> str:
    """What to know of a row that is a config, as comment lines: the command, the paper, the table, the figures, the shards."""
    found = find_row(name)
    if found is None:
        return ""
    table, row = found
    baseline = table.row_of(table.reference) or table.row_of(row.base) or row
    beside = f" ({baseline.config} {baseline.figures['top1']})" if baseline != row and "top1" in baseline.figures else ""
    figures = [f"{row.figures[key]} {unit}{beside * (key == 'top1')}" for key, unit in _UNITS.items() if key in row.figures]
    label = ", ".join(f"{column} {text}".strip() for column, text in zip(table.columns, row.labels))
    lines = [
        f"sbatch launch/train.slurm {name}     # in the repository; 1 node x 8 GPUs",
        f"  or: {train_command(name)}",
        *_lines(f"{heading(row)}."),
        *_lines(f"Row: {label}; on {row.data.title}."),
        *_lines(f"Paper: {', '.join(figures) or 'curves only'}. Not measured by us."),
        *_lines(row.remark),
        *([f"The shards: {row.shards_command}"] if row.part else []),
    ]
    return "".join(f"# {line}\n" for line in lines)


def heading(row: PaperRow) -> str:
    """What a row that is a config is: paper, table, and the other tables that repeat it."""
    tables = [table for table in read_tables(row.file).values() if table.row_of(row.config)]
    own = next(table for table in tables if row in table.rows)
    also = ", ".join(table.where for table in tables if table != own)
    return f"{own.paper}, {own.where}{also and f', also {also}'}: {row.about}"


def train_command(config: str, *overrides: str) -> str:
    """The command that trains a config of the tables on one machine."""
    return f"bash launch/local.sh 8 -- pipeline.train --config {' '.join([config, *overrides])}    # in the repository"


def _place(file: Path, row: object) -> str:
    return f"{file}, row {row}"


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, 126, break_long_words=False, break_on_hyphens=False)


@cache
def read_tables(file: Path) -> dict[str, PaperTable]:
    """The tables of a file by name. Raises UserError: a row that is a config has no base, a key is unknown, or a name is taken
    or not its table's."""
    try:
        page = parse_text(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid YAML ({error})", "fix that line") from None
    tables: dict[str, PaperTable] = {}
    taken: set[str] = set()
    for name, own in page["tables"].items():
        tree = {**page, **own}
        _refuse_unknown(f"{file}, table {name}", tree, _TABLE_KEYS)
        if not name.startswith(f"{file.stem}_"):
            raise UserError(f"{file}: the name of a table must begin with {file.stem}_, got {name}", "rename it")
        for cells in tree["rows"]:
            _check_row(file, name, cells, taken)
        tables[name] = PaperTable(
            name=name,
            paper=tree["paper"],
            title=tree["title"],
            note=tree.get("note", ""),
            columns=tuple(tree["columns"]),
            figures=tuple(tree["figures"]),
            data=DATA_SETS[tree.get("data", _IMAGENET)],
            reference=tree.get("reference"),
            either=tuple(tree.get("either", ())),
            rows=tuple(_row(file, tree, cells) for cells in tree["rows"]),
        )
    return tables


def _check_row(file: Path, table: str, cells: dict[str, Any], taken: set[str]) -> None:
    name = cells.get("name")
    place = _place(file, name or cells.get("labels"))
    _refuse_unknown(place, cells, _ROW_KEYS)
    if name is None:
        if given := [key for key in ("base", "change") if key in cells]:
            raise UserError(f"{place}: {given[0]} requires a name, got none", "name the row, or leave it out")
        return
    if "base" not in cells or "config" in cells:
        problem = f"{place} must have a base and no config, got {', '.join(cells)}"
        raise UserError(problem, "name the config that it begins from as base")
    if not name.startswith(f"{table}_"):
        raise UserError(f"{place}: the name must begin with {table}_, got {name}", "rename it")
    if name in taken:
        raise UserError(f"{place}: the name must be of one row, got two", "rename one, or repeat it with config")
    taken.add(name)


def _refuse_unknown(place: str, tree: dict[str, Any], known: set[str]) -> None:
    if unknown := [key for key in tree if key not in known]:
        raise UserError(f"{place}: unknown key {unknown[0]!r}", f"the keys are {', '.join(sorted(known))}")


def _row(file: Path, tree: dict[str, Any], cells: dict[str, Any]) -> PaperRow:
    name = cells.get("name")
    return PaperRow(
        labels=tuple(cells["labels"]),
        config=f"{ABLATIONS}{name}" if name else cells.get("config"),
        figures={key: cells[key] for key in FIGURES if key in cells},
        subset=float(cells.get("subset", tree.get("subset", 1))),
        data=DATA_SETS[cells.get("data", tree.get("data", _IMAGENET))],
        classes=cells.get("classes", tree.get("classes", "")),
        test=parse_switches(cells.get("test", "").split()),
        file=file,
        base=cells.get("base"),
        change=tuple(cells.get("change", "").split()),
        about=cells.get("about", ""),
        remark=" ".join(filter(None, [cells.get("remark"), tree.get("remark")])),
    )
