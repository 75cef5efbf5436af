"""Detect the format of a source from the content of its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep import SPLITS
from data_prep.sources.base import SPLIT_NAMES, Source
from data_prep.sources.cifar import Cifar
from data_prep.sources.devkit import DEVKIT, Devkit
from data_prep.sources.image_folder import ImageFolder, ZipFolder, class_folders, split_folders, zip_splits
from data_prep.sources.imagenet_tars import TRAIN_TAR, VAL_TAR, ImageNetTar, tar_split, train_classes, train_source, val_source
from data_prep.sources.inaturalist import INaturalist, annotation_files
from data_prep.sources.listing import LISTING_SUFFIXES, Listing, listing_splits
from data_prep.sources.parquet import parquet_files, parquet_parts
from data_prep.sources.staged import Part, Staged
from data_prep.sources.webdataset_tars import is_remote, tar_parts, tar_urls
from pipeline.errors import UserError
from pipeline.shards.image_checks import is_image
from pipeline.shards.manifest import MANIFEST

ACCEPTED = (
    f"a folder of train/CLASS/*.JPEG and val/CLASS/*.JPEG or of CLASS/*.JPEG, a .zip of one, {TRAIN_TAR}, {VAL_TAR} or a folder "
    f"with both and {DEVKIT}, cifar-10-python.tar.gz, cifar-100-python.tar.gz, an iNaturalist folder with trainYEAR.json, a .csv or "
    f".jsonl of paths and labels, a folder of parquet files, or WebDataset tars (a folder, or a path or URL with {{000..123}})"
)


@dataclass(frozen=True)
class _Found:
    """A detected source: a function that opens each split, and the splits to open by default."""

    openers: Mapping[str, Callable[[], Source]]
    default: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """How foreign data sets are read.

    Attributes:
        stage: folder for a copy of images that cannot be read in any order; None: such sources are refused.
        finished: splits whose shards are written.
        image_column, label_column: of parquet files; None: by type and name.
        skip_unlabelled: leave out images without a class, instead of refusing them.
        keep_empty: whether a class folder without images is a class.
    """

    stage: Path | None = None
    finished: frozenset[str] = frozenset()
    image_column: str | None = None
    label_column: str | None = None
    skip_unlabelled: bool = False
    keep_empty: bool = False


def open_sources(
    location: str | Path,
    split: str | None = None,
    devkit: str | Path | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> dict[str, Source]:
    """Detect the format of a path and list its images.

    Args:
        location: in one of the formats of ``ACCEPTED``.
        split: ``train`` or ``val``; None: all splits that exist, where a tree without split folders is train.
        devkit: devkit archive for ImageNet's val tar, if it is not beside it.
        reading: what to do with images without a class and classes without images; for parquet files and WebDataset tars.

    Returns:
        Split -> source.

    Raises:
        UserError: unknown format, ambiguous content, or a damaged source.
    """
    if is_remote(str(location)) or "{" in Path(location).name:
        return _opened(_webdataset(str(location), reading), location, split)
    location = Path(location)
    if location.is_dir() and (foreign := _foreign_folder(location, reading)):
        return _opened(foreign, location, split)
    imagenet = _imagenet_tars(location)
    if devkit is not None and "val" not in imagenet:
        raise UserError(f"--devkit {devkit} requires {VAL_TAR}, which {location} does not have", "drop --devkit")
    return _opened(_find_imagenet(imagenet, split, devkit) if imagenet else _find(location, reading), location, split)


def _opened(found: _Found, location: str | Path, split: str | None) -> dict[str, Source]:
    """Open the splits that are wanted."""
    wanted = (split,) if split else found.default
    if wanted[0] not in found.openers:
        raise UserError(
            f"the split must be one of {list(found.openers)} of {location}, got {split!r}",
            f"pass --split {next(iter(found.openers))} or add it",
        )
    return {name: found.openers[name]() for name in wanted}


def _find(location: Path, reading: Reading) -> _Found:
    """Detect any format except ImageNet's tars."""
    if location.is_file():
        return _find_file(location, reading)
    if not location.is_dir():
        raise UserError(f"source {location} does not exist", f"pass --source with {ACCEPTED}")
    annotations = annotation_files(location)
    if annotations:  # before class folders: some years of iNaturalist have a train/ too, but the labels are in the annotations
        return _all({split: partial(INaturalist, location, split) for split in annotations})
    if not class_folders(location) and not any(is_image(path.name) for path in location.iterdir()):
        raise UserError(f"source folder {location} holds 0 folders and no known file", f"pass --source with {ACCEPTED}")
    return _tree(list(split_folders(location)), partial(ImageFolder, location, keep_empty=reading.keep_empty))


def _find_file(location: Path, reading: Reading) -> _Found:
    if location.name.endswith((".tar.gz", ".tgz")):
        return _all({split: partial(Cifar, location, split) for split in SPLITS})
    if location.suffix in LISTING_SUFFIXES:
        return _tree(listing_splits(location), partial(Listing, location, skip=reading.skip_unlabelled))
    if location.suffix == ".zip":
        return _tree(zip_splits(location), partial(ZipFolder, location, keep_empty=reading.keep_empty))
    raise UserError(f"source {location} is a file of an unknown format", f"pass --source with {ACCEPTED}")


def _all(openers: Mapping[str, Callable[[], Source]]) -> _Found:
    return _Found(openers, tuple(openers))


def _tree(named: list[str], opener: Callable[[str], Source]) -> _Found:
    """A tree of class folders. Without split folders it can be opened as either split; the default is train."""
    openers = {split: partial(opener, split) for split in named or SPLITS}
    return _Found(openers, tuple(named) or ("train",))


def _imagenet_tars(location: Path) -> dict[str, Path]:
    """ImageNet's tars by split: the path itself, or those in the folder."""
    if location.is_file() and location.suffix == ".tar":
        return {tar_split(location): location}
    tars = {split: location / name for split, name in (("train", TRAIN_TAR), ("val", VAL_TAR)) if (location / name).is_file()}
    others = [path.name for path in split_folders(location).values()] if tars else []
    if others:
        names = [path.name for path in tars.values()]
        raise UserError(
            f"source folder {location} must hold one kind of source, got {names[0]} and a folder {others[0]}",
            f"pass the tar itself, or {location / others[0]} with --split",
        )
    return tars


def _find_imagenet(tars: dict[str, Path], split: str | None, devkit: str | Path | None) -> _Found:
    """ImageNet's tars. Both splits get the classes of both, so that indices agree even if they are sharded separately."""
    labels = Path(devkit) if devkit else next(iter(tars.values())).with_name(DEVKIT)
    # Required for val; for train it only completes the class list.
    kit = Devkit(labels) if "val" in tars and (split != "train" or labels.exists()) else None
    openers: dict[str, Callable[[], Source]] = {}
    if "train" in tars:
        openers["train"] = partial(_named, kit, partial(train_source, tars["train"], kit.wnids if kit else ()))
    if kit:
        more = train_classes(tars["train"]) if "train" in tars else ()
        openers["val"] = partial(_named, kit, partial(val_source, tars["val"], kit, more))
    return _all(openers)


def _named(kit: Devkit | None, opener: Callable[[], ImageNetTar]) -> Source:
    source = opener()
    source.class_words = kit.words if kit else {}
    return source


def _foreign_folder(location: Path, reading: Reading) -> _Found | None:
    """A folder of parquet files, or of tars that are not ImageNet's."""
    if files := parquet_files(location):
        parts, names = {}, None
        for split, its in files.items():
            parts[split], known = parquet_parts(its, reading.image_column, reading.label_column)
            names = known or names
        return _staged(location, "parquet", {split: partial(list, its) for split, its in parts.items()}, reading, names)
    if (location / MANIFEST).exists():  # shards of this package need no sharding
        return None
    folders = [location, *(location / name for name in SPLIT_NAMES)]
    if any(path.name not in (TRAIN_TAR, VAL_TAR) for folder in folders for path in folder.glob("*.tar")):
        return _webdataset(str(location), reading)
    return None


def _webdataset(location: str, reading: Reading) -> _Found:
    urls = tar_urls(location)
    return _staged(location, "webdataset", {split: partial(tar_parts, its) for split, its in urls.items()}, reading)


def _staged(
    location: str | Path,
    kind: str,
    parts: Mapping[str, Callable[[], list[Part]]],
    reading: Reading,
    class_names: list[str] | None = None,
) -> _Found:
    """Splits whose images are copied first.

    Raises:
        UserError: one of several tasks, which would each copy all of them.
    """
    if reading.stage is None:
        raise UserError(
            f"{location} can only be read from front to back, which --tasks cannot share",
            "shard it with one task, without --tasks",
        )

    def open_split(split: str) -> Source:
        assert reading.stage
        finished, skip = split in reading.finished, reading.skip_unlabelled
        return Staged(location, kind, parts[split](), reading.stage / split, class_names, finished, skip=skip)

    return _all({split: partial(open_split, split) for split in parts})
