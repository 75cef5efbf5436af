"""Load a trained model from a run folder, one of its checkpoints, an exported file, a timm folder or an authors' file: its weights and
config, or, with :func:`load`, the model with its input transform and class names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pipeline.augment.crop import eval_geometry
from pipeline.checkpoint.folder import check_source
from pipeline.checkpoint.weights import describe, read_weights
from pipeline.config import Config, config_from_dict, load_config, shipped_recipes
from pipeline.errors import UserError, first_line, missing_extra
from pipeline.loader.cpu_transform import Normalization, resize_and_crop
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.registry import check_trusted
from pipeline.models.timm.names import is_timm_folder
from pipeline.models.weights import exported
from pipeline.models.weights.exported import Description, Kind
from pipeline.models.weights.reference_names import recognise
from pipeline.models.weights.timm_folder import read_timm_folder
from pipeline.models.weights.transfer import check_finite

PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")  # endings of files of torch.save; .tar as in .pth.tar
INPUT, OUTPUT = "images", "scores"
DESCRIPTION = "description"  # in the file's metadata
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


class OnnxModel(nn.Module):
    """The graph of ``pervit export --format onnx``, on a GPU if ONNX Runtime is built for one: (B, 3, S, S) -> (B, classes)
    float32 on the images' device. Raises UserError: no ONNX Runtime, or the file is damaged or does not describe its model."""

    def __init__(self, path: Path, providers: tuple[str, ...] = _PROVIDERS) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise missing_extra(str(path), "ONNX Runtime", "onnx", error=error) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        usable = [each for each in providers if each in onnxruntime.get_available_providers()]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=usable)
        except Exception as error:  # its own types, without a common one
            raise UserError(f"{path} cannot be read as ONNX ({first_line(error)})", "export it again") from None
        metadata = self._session.get_modelmeta().custom_metadata_map
        if DESCRIPTION not in metadata:
            raise UserError(f"{path} does not describe its model and classes", "pass a file of `pervit export --format onnx`")
        self.description = exported.parse_description(path, metadata[DESCRIPTION])
        self.exported_precision: str = metadata["precision"]

    def forward(self, images: Tensor) -> Tensor:
        scores = self._session.run([OUTPUT], {INPUT: images.float().cpu().numpy()})[0]
        return torch.from_numpy(scores).to(images.device)

    @property
    def pooled(self) -> NoReturn:
        raise UserError("an ONNX file gives scores, not features", "pass the run, or its safetensors file")

    pooled_width = pooled


@dataclass(frozen=True)
class Trained:
    """Weights and the config they were trained with."""

    config: Config
    classes: list[str]  # by output index; they identify the classes: folder names, wnids
    step: int
    kind: Kind
    weights: dict[str, Tensor]
    named: bool = True  # False: nobody says what the classes are, and their names are their numbers
    assumed: str = ""  # a sentence for the log on what a file does not say
    class_names: list[str] | None = None  # what to call the classes; None: nobody named them
    graph: OnnxModel | None = None  # instead of weights

    @property
    def shown(self) -> list[str]:
        """What to call the classes, by output index."""
        return self.class_names or self.classes

    def build_model(self, switches: Mapping[str, Any] | None = None) -> VisionModel:
        """The model with these weights, in eval mode on the CPU; ``switches`` replace those of the training. Raises
        UserError: unknown switches; RuntimeError: these switches change the model's parameters."""
        asked = self.config.model
        given = asked.arguments if switches is None else switches
        if self.graph is not None:
            if given != asked.arguments:
                raise UserError("the switches of an ONNX file are fixed", "leave out --switch, or pass the run that it is of")
            return self.graph  # type: ignore[return-value]  # has what evaluations and predictions use
        model = create_model(asked.name, asked.num_classes, asked.image_size, switches=given)
        model.load_state_dict(self.weights)
        return model.eval()


def read_trained(source: Path, step: int | str | None = None, kind: Kind | None = None) -> Trained:
    """Read a trained model.

    Args:
        source: a run folder, one of its checkpoints, a file that ``pervit export`` wrote, a folder in timm's layout,
            or a file with a state dict, such as the authors of a model have published.
        step: which checkpoint of the run, a number or ``best``; None: the newest.
        kind: ``model`` or ``ema``; None: as in :func:`pipeline.checkpoint.weights.read_weights`, or those of the file.

    Raises:
        UserError: there is no such model, it is damaged, or its weights are not finite.
    """
    check_source(source, step)
    if is_timm_folder(source):
        model, found, named = read_timm_folder(source)
        return replace(_described(source, model, found, step, kind), named=named)
    if source.is_dir() or (source.suffix != exported.SUFFIX and not source.is_file()):
        saved = read_weights(source, step)
        config = config_from_dict(saved.state.config, source=str(source))
        check_trusted(config.model.name, source)
        state, chosen = saved.state, kind or saved.default
        return Trained(config, state.classes, state.step, chosen, saved.choose(kind), class_names=state.class_names)
    if source.suffix == ".onnx":
        graph = OnnxModel(source)
        return replace(_described(source, graph, graph.description, step, kind), graph=graph)
    if source.suffix in PICKLED:
        return _undescribed(source, exported.read_pickled(source, str(source)), step, kind)
    if source.suffix != exported.SUFFIX:
        problem = f"{source} is neither a run folder nor a {exported.SUFFIX} file nor one of torch.save ({', '.join(PICKLED)})"
        raise UserError(problem, "pass a run's output_dir, what export wrote, a folder in timm's layout, or the authors' file")
    weights, description = exported.read_tensors(source)
    if description is None:
        return _undescribed(source, weights, step, kind)
    return _described(source, exported.build_described(source, weights, description), description, step, kind)


def _described(source: Path, model: nn.Module, found: Description, step: int | str | None, kind: Kind | None) -> Trained:
    for option, asked, has in (("--step", step, found.step), ("--weights", kind, found.weights)):
        if asked not in (None, has):
            raise UserError(f"{source} has {option} {has}, not {asked}", "leave the option out, or pass a run folder")
    tree = {
        "model": {key: getattr(found, key) for key in ("num_classes", "image_size", "switches")} | {"name": found.model},
        "data": {key: getattr(found, key) for key in ("mean", "std", "eval_crop")},
        "train": {"precision": found.precision},
    }
    config = config_from_dict(tree, source=str(source))
    return Trained(config, found.classes, found.step, found.weights, model.state_dict(), class_names=found.class_names)


def _undescribed(source: Path, weights: dict[str, Tensor], step: int | str | None, kind: Kind | None) -> Trained:
    """A bare state dict, by the names and shapes of its tensors; images are prepared as in the model's recipe."""
    if step is not None or kind is not None:
        raise UserError(f"{source} is a state dict alone, without steps or averages", "leave out --step and --weights")
    name, num_classes, image_size, names = recognise(weights, str(source))
    check_finite(weights, str(source))
    recipes = [shipped_recipes() / f"{name}{ending}.yaml" for ending in ("", "_cifar10")]
    recipe = next(load_config(path) for path in recipes if path.exists())
    shape = {"name": name, "num_classes": num_classes, "image_size": image_size, "switches": {}}
    config = recipe.with_values({"train.precision": "fp32"} | {f"model.{key}": value for key, value in shape.items()})
    description = describe(config, [str(number) for number in range(num_classes)], 0, "model", names)
    model = exported.build_described(source, weights, description)
    recipe_is = f"mean {description.mean}, std {description.std}, eval_crop {description.eval_crop:g}"
    prepared = f"images are prepared as in that model's recipe ({recipe_is}), and its {num_classes} classes have no names"
    assumed = f"{source} does not say what it is: by its tensors, {name} for {image_size} pixels; {prepared}"
    return replace(_described(source, model, description, None, None), named=False, assumed=assumed)


class EvalTransform:
    """The evaluation transform: resize the short side to image_size / eval_crop, rounded down, crop the centre, normalize by the mean and
    deviation of each RGB channel, of pixels in [0, 1]."""

    def __init__(self, image_size: int, eval_crop: float, mean: Sequence[float], std: Sequence[float]) -> None:
        self.image_size, self.eval_crop = image_size, eval_crop
        self._normalization = Normalization(mean, std)

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform a PIL image to (3, S, S) float32. EXIF orientation is ignored, as in training."""
        if not isinstance(image, Image.Image):
            raise TypeError(f"the transform takes a PIL image, not {type(image).__name__}: open a file with PIL.Image.open.")
        pixels = np.array(image.convert("RGB"))  # (h, w, 3)
        geometry = eval_geometry(np.array(pixels.shape[:1]), np.array(pixels.shape[1:2]), self.image_size, self.eval_crop)
        (top, left), (height, width) = geometry.start[0], geometry.shape[0]
        window = torch.from_numpy(pixels[top : top + height, left : left + width])
        output = np.empty((3, self.image_size, self.image_size), dtype=np.float32)
        self._normalization.write(resize_and_crop(window, geometry, 0, self.image_size), output)
        return torch.from_numpy(output)


def load(
    source: Path | str, step: int | str | None = None, weights: Kind | None = None
) -> tuple[VisionModel, EvalTransform, list[str]]:
    """Load a trained model for inference::

        model, transform, classes = load("pervit_t.safetensors")
        with torch.inference_mode():
            scores = model(transform(Image.open("cat.jpg"))[None])[0]  # (classes,)

    The arguments are those of :func:`read_trained`.

    Returns:
        model: (B, 3, S, S) -> (B, classes), in eval mode on the CPU.
        transform: PIL image -> (3, S, S).
        classes: class names in the order of the scores.

    Raises:
        UserError: ``source`` does not exist or is damaged, or its weights are not finite.
    """
    trained = read_trained(Path(source), step, weights)
    data = trained.config.data
    transform = EvalTransform(trained.config.model.image_size, data.eval_crop, data.mean, data.std)
    return trained.build_model(), transform, trained.shown
