"""Write and validate ``checkpoint.json``: the run's state and the checksums of the other files.

Its own checksum detects disk errors and accidental edits. It does not stop an edit that updates the checksum too, so every
value is also validated for type and range, and a file name must lie in the checkpoint's folder.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.errors import UserError
from pipeline.files import open_regular

MANIFEST = "checkpoint.json"
FORMAT = 1
_LARGEST = 2**53 - 1  # the largest integer that every JSON reader represents exactly
_SHOWN = 60  # characters of a wrong value in a message
_STRICT = ConfigDict(extra="forbid")
_Kind = TypeVar("_Kind")


def _check_shape(shape: list[int]) -> list[int]:
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"a shape should have at most {_LARGEST} numbers in all")
    return shape


# Strict: no conversions, neither of "1" to a number nor of 1 to a boolean.
_Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
_Positive = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
_Stage = Annotated[int, Field(strict=True, ge=0, le=3)]
_Flag = Annotated[bool, Field(strict=True)]
_Text = Annotated[str, Field(strict=True)]
_Percent = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
_PartName = Annotated[str, Field(strict=True, pattern=r"^part-[0-9]{5,10}\.safetensors$")]
_Hex128 = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{32}$")]
_Hex256 = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
_SampleNumber = Annotated[str, Field(strict=True, pattern=r"^[0-9]{1,16}$")]
_Shape = Annotated[list[_Count], Field(max_length=16), AfterValidator(_check_shape)]


_REMEDY = "take another checkpoint"


class OtherFormat(UserError):
    """A checkpoint of another version of the pipeline. It may be intact, so it is never skipped."""


@dataclass(frozen=True)
class RunState:
    """All state of a run except tensors. No random generators: every draw is a pure function of the seed and a position."""

    __pydantic_config__ = _STRICT

    step: _Count  # steps completed, skipped ones included
    samples: _Count  # images seen
    skipped_steps: _Count
    config: dict[str, Any]
    config_hash: _Hex256  # of the keys that decide the weights
    classes: list[_Text]
    data: dict[str, Any]  # identity of the training set
    world_size: _Positive
    zero_stage: _Stage
    last_step: _Count  # the end of the schedule
    bad_samples: dict[_SampleNumber, _Text] = field(default_factory=dict)  # index -> message
    best: dict[str, Any] | None = None  # {"top1": 71.2, "step": 40, "weights": "ema"}
    evaluation_due: _Flag = False  # the run stopped during this step's evaluation
    class_names: list[_Text] | None = None  # what to call the classes; not written where nobody named them


@dataclass(frozen=True)
class FileRecord:
    """Name, size and checksum of a checkpoint's file."""

    __pydantic_config__ = _STRICT

    name: _PartName  # a plain name, so that it cannot lead out of the folder
    bytes: _Count
    xxh3: _Hex128  # 128 bits, hexadecimal


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps for each of some parameters, which the files must hold."""

    __pydantic_config__ = _STRICT

    parameters: list[_Text]
    tensors: list[_Text]  # names of state of the parameter's shape
    scalars: list[_Text]  # names of numbers


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of ``checkpoint.json``."""

    __pydantic_config__ = _STRICT

    state: RunState
    shapes: dict[_Text, _Shape]  # of every parameter
    files: list[FileRecord]
    optimizer_state: list[OptimizerState]  # empty before the optimizer's first step

    def to_text(self) -> str:
        """JSON with its own checksum."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return (
            json.dumps({"xxh3": xxhash.xxh3_128_hexdigest(content.encode()), "content": json.loads(content)}, indent=1) + "\n"
        )

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Read the manifest of a checkpoint's folder, which has its original name.

        Raises:
            UserError: it is missing or damaged, or the folder's name is that of another step.
            OtherFormat: another version wrote it.
            OSError: it cannot be read now.
        """
        path = folder / MANIFEST
        try:
            with open_own(path) as file:
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} is missing", _REMEDY) from None
        manifest = cls.parse(text, str(path))
        if folder.name != folder_name(manifest.state.step):
            raise UserError(
                f"{path} is of step {manifest.state.step}, so that its folder's name was {folder_name(manifest.state.step)} when it was "
                f"written",
                f"give it that name again, or {_REMEDY}",
            )
        return manifest

    @classmethod
    def parse(cls, text: str | bytes, source: str) -> CheckpointManifest:
        """Parse the output of :meth:`to_text`.

        Raises:
            UserError: it is damaged; the message names ``source``.
            OtherFormat: another version wrote it.
        """
        try:
            saved = json.loads(text)
            content = json.dumps(saved["content"], sort_keys=True)
            whole = saved["xxh3"] == xxhash.xxh3_128_hexdigest(content.encode())
            values = dict(saved["content"])
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise UserError(f"{source} is damaged, its checksum does not match", _REMEDY)
        found = values.pop("format", None)
        if type(found) is not int:
            raise _damage(source, "format", found, f"be {FORMAT}")
        if found != FORMAT:
            raise OtherFormat(
                f"{source} must have format {FORMAT}, got {found}",
                "use the version of the pipeline that wrote it, or choose another output_dir",
            )
        return _validated(values, source)


def open_own(path: Path) -> BinaryIO:
    """Open a checkpoint's file for reading. Named pipes, which block, and symbolic links, which lead elsewhere, are refused.

    Raises:
        UserError: it is not a regular file.
        OSError: it does not exist or cannot be read.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link and must be a regular file", "restore the file")
    try:
        return open(open_regular(path), "rb")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise UserError(f"{path} is not a regular file and must be one", "restore the file") from None


def folder_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


class _Model(BaseModel):
    name: _Text
    num_classes: _Positive
    image_size: _Positive
    switches: dict[str, Any]


class _Train(BaseModel):
    micro_batch_size: _Positive


class _Retention(BaseModel):
    keep_last: _Positive
    keep_best: _Flag
    keep_every_steps: _Positive | None


class _Config(BaseModel):
    """The keys that commands read from a stored config; a resume validates all of it like any config."""

    model: _Model
    train: _Train
    checkpoint: _Retention


class _Data(BaseModel):
    samples: _Positive
    fingerprint: _Text


class _Best(BaseModel):
    top1: _Percent
    step: _Count
    weights: Literal["model", "ema"]


def _validated(values: dict[str, Any], source: str) -> CheckpointManifest:
    """The manifest from plain values, each of them validated."""
    manifest = _of_type(CheckpointManifest, values, source)
    state = manifest.state
    for name, kind, found in (("config", _Config, state.config), ("data", _Data, state.data), ("best", _Best, state.best)):
        if found is not None:
            _of_type(kind, found, source, ("state", name))
    if state.class_names is not None and len(state.class_names) != len(state.classes):
        raise _damage(source, "state.class_names", state.class_names, f"have {len(state.classes)} names, one for each class")
    names: set[str] = set()
    for number, record in enumerate(manifest.files):
        if record.name in names:
            raise _damage(source, f"files[{number}].name", record.name, "be there once")
        names.add(record.name)
    return manifest


def _of_type(kind: type[_Kind], values: Any, source: str, place: tuple[str, ...] = ()) -> _Kind:
    try:
        return _adapter(kind).validate_python(values)  # type: ignore[arg-type]  # a class is hashable, its objects need not be
    except ValidationError as error:
        problem = error.errors()[0]
        where = _dotted((*place, *problem["loc"]))
        if problem["type"] == "missing":
            raise UserError(f"{source} must have {where}, which is missing", _REMEDY) from None
        known = problem["type"] != "unexpected_keyword_argument"
        need = problem["msg"].partition(" should ")[2] or f"be valid ({problem['msg']})" if known else "not be there"
        raise _damage(source, where, problem["input"], need) from None


@functools.cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def _dotted(place: tuple[str | int, ...]) -> str:
    """A path such as ``files[0].name``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "[key]").lstrip(".")
    return re.sub(r"[^\x20-\x7e]", "?", text)[:_SHOWN]


def _damage(source: str, place: str, found: Any, need: str) -> UserError:
    shown = ascii(found)  # no control characters
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return UserError(f"{source}: {place} must {need}, got {shown}", _REMEDY)
