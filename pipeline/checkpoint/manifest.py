"""Write and validate ``checkpoint.json``, the run's state and the checksums of the other files, and compare those with the files.

Its own checksum detects disk errors and accidental edits. It does not stop an edit that updates the checksum too, so every
value is also validated for type and range, and a file name must lie in the checkpoint's folder.
"""

import errno
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import xxhash
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from pipeline.errors import UserError, first_invalid, printable, shown
from pipeline.files import open_regular

MANIFEST = "checkpoint.json"
FORMAT = 1
_LARGEST = 2**53 - 1  # the largest integer that every JSON reader represents exactly
_SHOWN = 60  # characters of a wrong value in a message
_CHUNK = 16 << 20  # bytes per read
_REMEDY = "take another checkpoint"
_STRICT = ConfigDict(extra="forbid")


def _check_shape(shape: list[int]) -> list[int]:
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"a shape should have at most {_LARGEST} numbers in all")
    return shape


def _check_names(files: "list[FileRecord]") -> "list[FileRecord]":
    if len({file.name for file in files}) < len(files):
        raise ValueError("the files should have each name once")
    return files


def _has(**kinds: Any) -> AfterValidator:
    """Check that an object has at least these keys, each of its kind."""
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
    keys = create_model("Keys", **fields)
    return AfterValidator(lambda found: keys.model_validate(found) and found)


# Strict: no conversions, neither of "1" to a number nor of 1 to a boolean.
_Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
_Positive = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
_Flag = Annotated[bool, Field(strict=True)]
_Text = Annotated[str, Field(strict=True)]
_Percent = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
_SampleNumber = Annotated[str, Field(strict=True, pattern=r"^[0-9]{1,16}$")]
_Shape = Annotated[list[_Count], Field(max_length=16), AfterValidator(_check_shape)]
_Object = dict[str, Any]
# Of objects the keys that commands read; a resume validates all of a stored config like any config.
_Model = Annotated[_Object, _has(name=_Text, num_classes=_Positive, image_size=_Positive, switches=_Object)]
_Train = Annotated[_Object, _has(micro_batch_size=_Positive)]
_Retention = Annotated[_Object, _has(keep_last=_Positive, keep_best=_Flag, keep_every_steps=_Positive | None)]
_Config = Annotated[_Object, _has(model=_Model, train=_Train, checkpoint=_Retention)]
_Data = Annotated[_Object, _has(samples=_Positive, fingerprint=_Text)]
_Best = Annotated[_Object, _has(top1=_Percent, step=_Count, weights=Literal["model", "ema"])]


class OtherFormat(UserError):
    """A checkpoint of another version of the pipeline. It may be intact, so it is never skipped."""


@dataclass(frozen=True)
class RunState:
    """All state of a run except tensors. No random generators: every draw is a pure function of the seed and a position."""

    __pydantic_config__ = _STRICT

    step: _Count  # steps completed, skipped ones included
    samples: _Count  # images seen
    skipped_steps: _Count
    config: _Config
    config_hash: Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]  # of the keys that decide the weights
    classes: list[_Text]
    data: _Data  # identity of the training set
    world_size: _Positive
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    last_step: _Count  # the end of the schedule
    bad_samples: dict[_SampleNumber, _Text] = field(default_factory=dict)  # index -> message
    best: _Best | None = None  # {"top1": 71.2, "step": 40, "weights": "ema"}
    evaluation_due: _Flag = False  # the run stopped during this step's evaluation
    class_names: list[_Text] | None = None  # what to call the classes; not written where nobody named them


@dataclass(frozen=True)
class FileRecord:
    """Name, size and checksum of a checkpoint's file."""

    __pydantic_config__ = _STRICT

    # A plain name, so that it cannot lead out of the folder.
    name: Annotated[str, Field(strict=True, pattern=r"^part-[0-9]{5,10}\.safetensors$")]
    bytes: _Count
    xxh3: Annotated[str, Field(strict=True, pattern="^[0-9a-f]{32}$")]


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
    files: Annotated[list[FileRecord], AfterValidator(_check_names)]
    optimizer_state: list[OptimizerState]  # empty before the optimizer's first step

    def to_text(self) -> str:
        """JSON with its own checksum."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        digest = xxhash.xxh3_128_hexdigest(content.encode())
        return json.dumps({"xxh3": digest, "content": json.loads(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "CheckpointManifest":
        """Read the manifest of a checkpoint's folder, which has its original name. Raises UserError: it is missing or
        damaged, or the folder's name is that of another step; OtherFormat: another version wrote it; OSError: it cannot be
        read now."""
        path = folder / MANIFEST
        try:
            with open_own(path) as file:
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} is missing", _REMEDY) from None
        manifest = cls.parse(text, str(path))
        step, former = manifest.state.step, folder_name(manifest.state.step)
        if folder.name != former:
            problem = f"{path} is of step {step}, so that its folder's name was {former} when it was written"
            raise UserError(problem, f"give it that name again, or {_REMEDY}")
        return manifest

    @classmethod
    def parse(cls, text: str | bytes, source: str) -> "CheckpointManifest":
        """Parse the output of :meth:`to_text`; ``source`` is for messages, of the errors of :meth:`read`."""
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
            remedy = "use the version of the pipeline that wrote it, or choose another output_dir"
            raise OtherFormat(f"{source} must have format {FORMAT}, got {found}", remedy)
        try:
            manifest: CheckpointManifest = _VALID.validate_python(values)
        except ValidationError as error:
            raise UserError(f"{source}: {first_invalid(error)}", _REMEDY) from None
        state = manifest.state
        if (names := state.class_names) is not None and len(names) != len(state.classes):
            raise _damage(source, "state.class_names", names, f"have {len(state.classes)} names, one for each class")
        for place, number in (("skipped_steps", state.skipped_steps), ("best.step", state.best["step"] if state.best else 0)):
            if number > state.step:
                raise _damage(source, f"state.{place}", number, f"be at most {state.step}, the step")
        return manifest


_VALID = TypeAdapter(CheckpointManifest)


def open_own(path: Path) -> BinaryIO:
    """Open a checkpoint's file for reading. Pipes, which block, and symbolic links, which lead elsewhere, raise a ``UserError``."""
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


def checksum(path: Path) -> FileRecord:
    """Name, size and XXH3-128 of a file as it is now."""
    digest, size = xxhash.xxh3_128(), 0
    with open_own(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(path.name, size, digest.hexdigest())


def find_damage(folder: Path, files: list[FileRecord], contents: bool = True) -> list[str]:
    """Compare files with their records in the manifest, without ``contents`` only their sizes; a sentence for each that differs or is
    missing. Raises OSError: a file cannot be read now, which says nothing about its contents."""
    sentences = []
    for written in files:
        path = folder / written.name
        try:
            with open_own(path) as file:
                size = file.seek(0, 2)
            if size != written.bytes:
                sentences.append(f"{path} has {size} bytes, {written.bytes} were written")
            elif contents and checksum(path) != written:
                sentences.append(f"{path} was changed after it was written: its checksum does not match")
        except FileNotFoundError:
            sentences.append(f"{path} is missing")
        except UserError as error:
            sentences.append(error.problem)  # the caller adds its own remedy
    return sentences


def _damage(source: str, place: str, found: Any, need: str) -> UserError:
    return UserError(f"{source}: {place} must {need}, got {printable(shown(found), _SHOWN)}", _REMEDY)
