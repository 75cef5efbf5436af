"""Find config files by path or by the name of a shipped config."""

from __future__ import annotations

import difflib
from pathlib import Path

from pipeline.errors import UserError

_PACKAGE = Path(__file__).parent.parent


def shipped_recipes() -> Path:
    """The folder of the shipped configs: ``recipes/`` of the installed package, or ``configs/`` of a source checkout."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file of a config.

    Args:
        name: a path, or a config's name with or without ``.yaml``: ``pervit_t``, ``ablations/pervit_table5_lrn``. Searched in
            this order: the path itself, ``configs/`` in the current folder, the shipped configs.
        folder: the folder that a path is relative to.

    Raises:
        UserError: no such config.
    """
    path = folder / name
    if path.is_file():
        return path
    wanted = f"{name}".removesuffix(".yaml")
    places = [Path("configs"), shipped_recipes()]
    for place in places:
        candidate = place / f"{wanted}.yaml"
        if candidate.is_file() and not Path(name).is_absolute():
            return candidate
    shipped = sorted(file.relative_to(places[1]).with_suffix("").as_posix() for file in places[1].rglob("*.yaml"))
    stems = {recipe.rpartition("/")[2]: recipe for recipe in shipped}
    close = difflib.get_close_matches(Path(wanted).name, stems, n=1, cutoff=0.7)
    remedy = f"did you mean {stems[close[0]]}?" if close else "pass a file or the name of a shipped config."
    raise UserError(f"config {path} does not exist, and no config of that name is in {places[1]}: {remedy}")
