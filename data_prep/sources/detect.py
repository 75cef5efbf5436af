"""Detects the format of a source from the content of its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep import SPLITS
from data_prep.sources.base import Source
from data_prep.sources.cifar import Cifar
from data_prep.sources.devkit import DEVKIT, Devkit
from data_prep.sources.image_folder import ImageFolder, class_folders, split_folders
from data_prep.sources.imagenet_tars import TRAIN_TAR, VAL_TAR, tar_split, train_classes, train_source, val_source
from data_prep.sources.inaturalist import INaturalist, annotation_files
from data_prep.sources.zip_folder import ZipFolder, zip_splits
from pipeline.errors import UserError

ACCEPTED = (
    f"a folder of train/CLASS/*.JPEG and val/CLASS/*.JPEG or of CLASS/*.JPEG, a .zip of one, {TRAIN_TAR}, {VAL_TAR} or a folder "
    f"with both and {DEVKIT}, cifar-10-python.tar.gz, cifar-100-python.tar.gz, or an iNaturalist folder with trainYEAR.json"
)


@dataclass(frozen=True)
class _Found:
    """A detected source: a function that opens each split, and the splits to open by default."""

    openers: Mapping[str, Callable[[], Source]]
    default: tuple[str, ...]


def open_sources(location: str | Path, split: str | None = None, devkit: str | Path | None = None) -> dict[str, Source]:
    """Detect the format of a path and list its images.

    Args:
        location: in one of the formats of ``ACCEPTED``.
        split: ``train`` or ``val``; None: all splits that exist, where a tree without split folders is train.
        devkit: devkit archive for ImageNet's val tar, if it is not beside it.

    Returns:
        Split -> source.

    Raises:
        UserError: unknown format, ambiguous content, or a damaged source.
    """
    location = Path(location)
    imagenet = _imagenet_tars(location)
    if devkit is not None and "val" not in imagenet:
        raise UserError(f"--devkit is {devkit}, but {location} has 0 of the 1 {VAL_TAR} that it labels", "drop --devkit")
    found = _find_imagenet(imagenet, split, devkit) if imagenet else _find(location)
    wanted = (split,) if split else found.default
    if wanted[0] not in found.openers:
        raise UserError(
            f"{location} has the splits {list(found.openers)}, {split!r} needed",
            f"pass --split {next(iter(found.openers))} or add it",
        )
    return {name: found.openers[name]() for name in wanted}


def _find(location: Path) -> _Found:
    """Detect any format except ImageNet's tars."""
    if location.is_file():
        return _find_file(location)
    if not location.is_dir():
        raise UserError(f"source {location} does not exist", f"pass --source with {ACCEPTED}")
    annotations = annotation_files(location)
    if annotations:  # before class folders: some years of iNaturalist have a train/ too, but the labels are in the annotations
        return _all({split: partial(INaturalist, location, split) for split in annotations})
    if not class_folders(location):
        raise UserError(f"source folder {location} holds 0 folders and no known file", f"pass --source with {ACCEPTED}")
    return _tree(list(split_folders(location)), partial(ImageFolder, location))


def _find_file(location: Path) -> _Found:
    if location.name.endswith((".tar.gz", ".tgz")):
        return _all({split: partial(Cifar, location, split) for split in SPLITS})
    if location.suffix == ".zip":
        return _tree(zip_splits(location), partial(ZipFolder, location))
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
            f"source folder {location} holds both {names[0]} and a folder {others[0]}, 1 kind needed",
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
        openers["train"] = partial(train_source, tars["train"], kit.wnids if kit else ())
    if kit:
        openers["val"] = partial(val_source, tars["val"], kit, train_classes(tars["train"]) if "train" in tars else ())
    return _all(openers)
