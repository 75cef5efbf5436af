"""Export of a checkpoint's weights to a file that :func:`pipeline.models.load_exported` reads."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.weights import read_weights
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError
from pipeline.files import check_writable
from pipeline.models.weights.exported import SUFFIX, Description, Kind, Names, write_exported


def export(run_dir: Path, output: Path, step: int | str | None, kind: Kind | None, names: Names, force: bool) -> Description:
    """Export the weights of a checkpoint to one file.

    Args:
        run_dir: a run folder, or one of its checkpoints.
        output: the file, ``*.safetensors``.
        step: which checkpoint, a number or ``best``; None: the newest.
        kind: ``model`` or ``ema``; None: see :func:`pipeline.checkpoint.read_weights`.
        names: ``ours`` or ``authors``.
        force: replace an existing file.

    Returns:
        A description of what was written.

    Raises:
        UserError: there is no such checkpoint or average, it is damaged or has non-finite weights, or ``output`` exists or
            cannot be written.
    """
    if output.suffix != SUFFIX:
        raise UserError(f"--output {output} ends in {output.suffix!r}, {SUFFIX!r} needed", "add it")
    check_writable(output)
    if output.exists() and not force:
        raise UserError(f"{output} exists", "choose another --output, or add --force to replace it")
    saved = read_weights(run_dir, step)
    config = config_from_dict(saved.state.config, source="the checkpoint")
    state = saved.state
    description = describe(config, state.classes, state.step, kind or saved.default, names, state.class_names)
    write_exported(output, saved.choose(kind), description)
    return description


def describe(
    config: Config, classes: list[str], step: int, kind: Kind, names: Names, class_names: list[str] | None = None
) -> Description:
    """The metadata of an export of weights that were trained with this config."""
    return Description(
        model=config.model.name,
        num_classes=config.model.num_classes,
        image_size=config.model.image_size,
        switches=config.model.switches,
        classes=classes,
        class_names=class_names,
        mean=list(config.data.mean),
        std=list(config.data.std),
        eval_crop=config.data.eval_crop,
        precision=config.train.precision,  # type: ignore[arg-type]  # never auto: a run's start settles it
        step=step,
        weights=kind,
        names=names,
    )
