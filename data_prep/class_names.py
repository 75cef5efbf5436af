"""Read names of classes for people: ``--class-names FILE``, and ImageNet's devkit.

A class is identified by its folder, wnid or label, which order the classes and never change. What tables, figures and predictions
call it is its name in ``manifest.json``, ``class_names``.

==================================  ==================================================================================
``names.txt``                       a name a line, in class order
``synset_words.txt``                ``n01440764 tench, Tinca tinca`` a line; also ``CLASS<tab>name`` with any class
``imagenet_class_index.json``       ``{"0": ["n01440764", "tench"], ...}``
any other ``.json``                 ``{"CLASS": "name"}``, ``{"0": "name"}`` by index, or a list in class order
``.csv``, ``.tsv``                  the columns ``class`` (or ``wnid``, ``index``) and ``name``
``ILSVRC2012_devkit_t12.tar.gz``    its ``meta.mat``
==================================  ==================================================================================
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from data_prep.output import FolderLock, Output
from data_prep.sources.devkit import Devkit
from pipeline.errors import UserError, counted, first_few
from pipeline.files import open_regular
from pipeline.shards.manifest import MANIFEST, ShardManifest

_WNID = re.compile(r"n\d{8}")
_INDEX = re.compile("[0-9]{1,9}")
_KEYS, _NAMES = ("class", "wnid", "synset", "label", "folder", "index", "id"), ("name", "class_name", "words", "description")
_LONGEST_FILE = 64 << 20  # bytes

Pairs = list[tuple[str, str]]  # (class or index, name) each


def read_class_names(path: Path, classes: Sequence[str]) -> list[str]:
    """Read the names of a data set's classes.

    Args:
        path: in one of the forms above.
        classes: in index order.

    Returns:
        A name for each class, no two equal: :func:`distinct`.

    Raises:
        UserError: the file cannot be read, or has no name, or two, for a class.
    """
    if path.name.endswith((".tar.gz", ".tgz")):
        return by_class(Devkit(path).words.items(), classes, str(path))
    text = _text(path)
    if path.suffix == ".json":
        found = _json(path, text, set(classes))
    elif path.suffix in (".csv", ".tsv"):
        found = _table(path, text)
    else:
        found = _lines(text)
    if found and isinstance(found[0], str):
        if len(found) != len(classes):
            raise UserError(
                f"{path} must have a name for each of {counted(len(classes), 'class')}, got {counted(len(found), 'name')}",
                "write a name on each line, in class order, or CLASS<tab>name",
            )
        return by_class(zip(classes, found), classes, str(path))
    return by_class(_by_name(found, classes), classes, str(path))


def by_class(pairs: Iterable[tuple[str, str]], classes: Sequence[str], where: str) -> list[str]:
    """The names in index order. Names of other classes are not used: a file may name more than a subset has.

    Args:
        pairs: (class, name) each.
        classes: in index order.
        where: they are from, for messages.

    Raises:
        UserError: a class has no name or two, or a name is empty or not printable.
    """
    names: dict[str, str] = {}
    for key, name in pairs:
        if names.get(key, name) != name:
            raise UserError(f"{where} names the class {key} twice, {names[key]!r:.60} and {name!r:.60}", "remove one of them")
        names[key] = name
    missing = [key for key in classes if key not in names]
    if missing:
        raise UserError(
            f"{where} has no name for {counted(len(missing), 'class')} of {len(classes)} ({first_few(missing)})",
            "add the names",
        )
    for key in classes:
        if not names[key].strip() or not names[key].isprintable():
            raise UserError(f"{where}: the name of {key} must be printable text, got {names[key]!r:.60}", "correct it")
    return distinct([names[key].strip() for key in classes], classes)


def distinct(names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Names of which no two are equal: ImageNet has two classes called crane, which become ``crane (n02012849)`` and so on."""
    count = Counter(names)
    return [f"{name} ({key})" if count[name] > 1 else name for name, key in zip(names, classes)]


def put_class_names(output: Output, names: Mapping[str, str]) -> None:
    """Write names into a shard set's manifest, unless they are there; tars, indexes and tables stay as they are.

    Args:
        output: the shard set.
        names: class -> name.
    """

    def write() -> None:
        manifest = ShardManifest.read(output.folder)
        shown = [names[key] for key in manifest.classes]
        if manifest.class_names != shown:
            replace(manifest, class_names=shown).write(output.folder)
            output.publish(MANIFEST)

    with FolderLock(output.folder) as lock:
        output.update(lock, write)


def _text(path: Path) -> str:
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"--class-names {path} cannot be read ({error.strerror})", "pass a file with names") from None
    if len(data) > _LONGEST_FILE:
        raise UserError(f"--class-names {path} has more than {_LONGEST_FILE >> 20} MB", "pass a file with names")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line} is not UTF-8", "save the file in this encoding") from None


def _lines(text: str) -> list[str] | Pairs:
    """Names in class order, or with their classes where every line begins with a wnid or has a tab."""
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    filled = [line for line in lines if line.strip()]
    if filled and all("\t" in line or _WNID.fullmatch(line.split(None, 1)[0]) for line in filled):
        parts = [line.split("\t" if "\t" in line else None, 1) for line in filled]
        return [(part[0].strip(), part[1].strip() if len(part) > 1 else "") for part in parts]
    return lines


def _json(path: Path, text: str, classes: set[str]) -> list[str] | Pairs:
    try:
        tree = json.loads(text, object_pairs_hook=lambda pairs: pairs)  # a dict would hide a key that is there twice
        if isinstance(tree, list) and all(isinstance(name, str) for name in tree):
            return tree
        pairs: Pairs = []
        for key, value in tree:
            if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
                key, value = value if value[0] in classes or _WNID.fullmatch(value[0]) else (key, value[1])
            if not isinstance(key, str) or not isinstance(value, str):
                raise ValueError(f"{key!r:.30} has no text")
            pairs.append((key, value))
        return pairs
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a JSON file of class names ({' '.join(str(error).split())[:80]})",
            'write {"CLASS": "name", ...}, {"0": "name", ...} or a list in class order',
        ) from None


def _table(path: Path, text: str) -> Pairs:
    try:
        rows = list(csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True))
    except csv.Error as error:
        raise UserError(f"{path} cannot be read ({error})", "correct the line") from None
    columns = list(rows[0]) if rows else []
    key, name = (next((column for column in wanted if column in columns), None) for wanted in (_KEYS, _NAMES))
    if key is None or name is None:
        raise UserError(
            f"{path} must have the columns {_KEYS[0]} and {_NAMES[0]}, got {', '.join(map(str, columns)) or 'no line'}",
            f"name them in its first line: {_KEYS[0]},{_NAMES[0]}",
        )
    return [(row[key] or "", row[name] or "") for row in rows]


def _by_name(found: Iterable, classes: Sequence[str]) -> Pairs:
    """Pairs with classes as keys: keys that are numbers and not all classes are indices."""
    pairs: Pairs = list(found)
    known = set(classes)
    if all(key in known or not _INDEX.fullmatch(key) for key, _ in pairs):
        return pairs
    return [(classes[int(key)], name) for key, name in pairs if _INDEX.fullmatch(key) and int(key) < len(classes)]
