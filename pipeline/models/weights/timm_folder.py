"""Map our models to architectures of timm (tested with 1.0.31) and back, and read folders in timm's layout: ``config.json`` and
``model.safetensors``, as ``timm.create_model("local-dir:PATH")`` loads them.

timm has ConViT, DeiT and gMLP, under the names and shapes of their authors' code, which its code comes from: reading a folder of
these needs no timm. Other widths go into ``model_args``, timm's keyword arguments. What timm has no argument for, and the other
families, keep this project's name: :mod:`pipeline.models.for_timm` registers it with timm.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from torch import Tensor

from pipeline.config.values import MAX_SHAPE, MAX_SIDE, Deviation, Mean
from pipeline.errors import UserError, first_invalid
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import PATCH, ViTLayout
from pipeline.models.convit import ConViTSwitches
from pipeline.models.registry import check_name, list_models, model_entry
from pipeline.models.timm.names import CONFIG, PICKLED, TIMM_PREFIX, WEIGHTS, is_timm
from pipeline.models.weights.exported import Description, build_described, read_pickled, read_tensors
from pipeline.models.weights.transfer import check_finite

_AGAIN = "export or download the folder again"

_FORMS: dict[str, tuple[str, dict[str, int]]] = {  # our name -> timm's architecture and its layout (ConViT: width per head)
    "convit_ti": ("convit_tiny", {"embed_dim": 48, "num_heads": 4}),
    "convit_s": ("convit_small", {"embed_dim": 48, "num_heads": 9}),
    "convit_b": ("convit_base", {"embed_dim": 48, "num_heads": 16}),
    "convit_ti_plus": ("convit_tiny", {"embed_dim": 64, "num_heads": 4}),
    "convit_s_plus": ("convit_small", {"embed_dim": 64, "num_heads": 9}),
    "convit_b_plus": ("convit_base", {"embed_dim": 64, "num_heads": 16}),
    "deit_t": ("deit_tiny_patch16_224", {"embed_dim": 192, "num_heads": 3}),
    "deit_s": ("deit_small_patch16_224", {"embed_dim": 384, "num_heads": 6}),
    "deit_b": ("deit_base_patch16_224", {"embed_dim": 768, "num_heads": 12}),
    "deit_ti_plus": ("deit_tiny_patch16_224", {"embed_dim": 256, "num_heads": 4}),
    "deit_s_plus": ("deit_small_patch16_224", {"embed_dim": 576, "num_heads": 9}),
    "deit_b_plus": ("deit_base_patch16_224", {"embed_dim": 1024, "num_heads": 16}),
    "gmlp_s": ("gmlp_s16_224", {}),
}
# timm's architecture -> our name for the layout that timm gives it by default: the first of the table.
_DEFAULTS = {architecture: ours for ours, (architecture, _) in reversed(_FORMS.items())}
_ALSO = {  # the same networks under other names of timm's
    "deit_base_patch16_384": "deit_b",
    **{f"vit_{long}_patch16_{size}": ours for long, ours in (("tiny", "deit_t"), ("small", "deit_s"), ("base", "deit_b")) for size in (224, 384)},
}  # fmt: skip
# Switches of ConViT that say how it was initialized or what was trained: the weights are the same kind of weights.
_OF_TRAINING = {"conv_init", "locality_strength", "train_gating", "train_gpsa"}
_FIXED = {  # arguments of timm's that must have the value that our network has, where a folder gives them
    "patch_size": PATCH,
    "in_chans": 3,
    "depth": ViTLayout.depth,
    "mlp_ratio": ViTLayout.mlp_ratio,
    "use_pos_embed": True,
    "class_token": True,
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "init_values": None,
    "qk_norm": False,
}
_GLOBAL_POOL = {"convit": "token", "deit": "token", "gmlp": "avg"}
_OF_CONFIG = {"num_classes", "img_size", "in_chans"}  # the config has them elsewhere
# Of training, or of what timm does with images of another size; not of the network at its own size.
_WITHOUT_EFFECT = {"num_classes", "img_size", "locality_strength", "dynamic_img_size", "drop_rate", "drop_path_rate"}


@dataclass(frozen=True)
class TimmForm:
    """A model as timm builds it."""

    architecture: str  # a name of timm's registry
    model_args: dict[str, Any]  # of timm.create_model
    # The name is this project's, known to timm after `import pipeline.models.for_timm`; the weights then have our names. Else
    # they have timm's, which are the authors'.
    registered: bool
    first_conv: str | None = None  # of timm's config, like the next
    global_pool: str = "avg"


def timm_form(name: str, switches: Mapping[str, Any]) -> TimmForm:
    """The architecture of timm that a model of ours is; ``switches`` that are not stated have their defaults."""
    if is_timm(name):
        return TimmForm(name.removeprefix(TIMM_PREFIX).partition(".")[0], dict(switches), False)
    if name not in list_models():
        raise UserError(f"--format timm is for models of this project and of timm, got {name}", "choose another format")
    fields = model_entry(name).switches.model_fields
    changed = {key: value for key, value in switches.items() if value != fields[key].default}
    family = name.partition("_")[0]
    carried = {"gpsa_layers", *_OF_TRAINING} if family == "convit" else set()
    if name not in _FORMS or changed.keys() - carried:
        return TimmForm(name, {"switches": dict(switches)} if changed else {}, True, None, _GLOBAL_POOL.get(family, "avg"))
    architecture, layout = _FORMS[name]
    default = _FORMS[_DEFAULTS[architecture]][1]
    arguments: dict[str, Any] = {key: value for key, value in layout.items() if value != default[key]}
    if "gpsa_layers" in changed:
        arguments["local_up_to_layer"] = changed["gpsa_layers"]
    first_conv = "stem.proj" if family == "gmlp" else "patch_embed.proj"
    return TimmForm(architecture, arguments, False, first_conv, _GLOBAL_POOL[family])


def _model_of_timm(architecture: str, arguments: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any], bool]:
    """Our model of an architecture and its ``model_args``: its name, ``timm:NAME`` where timm's own code is needed, its switches,
    and whether the weights have our names."""

    def refuse(refused: Mapping[str, Any]) -> None:
        if refused:
            named = ", ".join(f"{key}={value!r}" for key, value in sorted(refused.items()))
            problem = f"{path}: model_args of {architecture} must be those of a model of this project, got {named}"
            raise UserError(problem, "remove them if the weights do not need them, or use the folder with timm")

    if architecture in list_models():
        refuse({key: arguments[key] for key in arguments.keys() - {"switches", "global_pool", *_OF_CONFIG}})
        switches = arguments.get("switches", {})
        if not isinstance(switches, dict):
            refuse({"switches": switches})
        return architecture, switches, True
    ours = _DEFAULTS.get(architecture) or _ALSO.get(architecture)
    if not ours:
        try:
            check_name(TIMM_PREFIX + architecture)
        except UserError:
            remedy = f"pass a folder of ConViT, DeiT, ViT or gMLP, or of one of: {', '.join(list_models())}"
            raise UserError(f"{path} has the architecture {architecture!r}, which this project does not have", remedy) from None
        return TIMM_PREFIX + architecture, {key: value for key, value in arguments.items() if key not in _OF_CONFIG}, False
    family, default = ours.partition("_")[0], _FORMS[ours][1]
    fixed = _FIXED | {"qkv_bias": family == "deit", "global_pool": _GLOBAL_POOL[family]}
    layout, switches, refused = dict(default), {}, {}
    for key, value in arguments.items():
        if key in layout:
            layout[key] = value
        elif key == "local_up_to_layer" and family == "convit":
            switches = {} if value == ConViTSwitches().gpsa_layers else {"gpsa_layers": value}
        elif key not in _WITHOUT_EFFECT and not key.endswith("_drop_rate") and not (key in fixed and fixed[key] == value):
            refused[key] = value
    refuse(refused)
    fitting = [name for name, (_, known) in _FORMS.items() if name.partition("_")[0] == family and known == layout]
    if not fitting:
        refuse({key: value for key, value in layout.items() if default[key] != value})
    return fitting[0], switches, False


ClassCount = Annotated[int, Field(ge=0, le=MAX_SHAPE)]
Labels = list[str] | dict[int, str] | None  # in order, or by index, which may have gaps
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


class _Preprocessing(BaseModel):
    """timm's ``pretrained_cfg``, as far as it matters here, with timm's defaults."""

    input_size: tuple[int, Side, Side] = (3, 224, 224)
    interpolation: str = "bicubic"
    crop_pct: Annotated[float, Field(gt=0)] | None = 0.875
    crop_mode: str = "center"
    mean: Annotated[list[Mean], Field(min_length=3, max_length=3)] = [0.485, 0.456, 0.406]
    std: Annotated[list[Deviation], Field(min_length=3, max_length=3)] = [0.229, 0.224, 0.225]
    num_classes: ClassCount = 1000
    label_names: Labels = None


class FolderConfig(BaseModel):
    """timm's ``config.json``. What is stated beside ``pretrained_cfg`` wins over what is in it."""

    architecture: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    num_classes: ClassCount | None = None
    label_names: Labels = None
    model_args: dict[str, Any] = {}
    pretrained_cfg: _Preprocessing

    @property
    def count(self) -> int:
        """Outputs of the model."""
        return self.pretrained_cfg.num_classes if self.num_classes is None else self.num_classes

    @property
    def classes(self) -> list[str] | None:
        """Class names by output; None: not stated for all."""
        names = self.label_names or self.pretrained_cfg.label_names
        if isinstance(names, dict):
            return [names[index] for index in range(len(names))] if names.keys() == set(range(len(names))) else None
        return names


def read_folder_config(folder: Path) -> FolderConfig:
    """Read and check ``config.json``. Raises UserError: it is missing, damaged, or has other than a name for each class."""
    path = folder / CONFIG
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, which names the architecture of {WEIGHTS}", _AGAIN) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({str(error) or type(error).__name__})", _AGAIN) from None
    if isinstance(tree, dict) and "pretrained_cfg" not in tree:  # timm's first layout, still on the hub
        tree = {"architecture": tree.get("architecture"), "pretrained_cfg": tree}
    try:
        config = FolderConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {first_invalid(error, 'the file')}", _AGAIN) from None
    classes, count = config.classes, config.count
    if classes is not None and len(classes) != count:
        problem = f"{path} has {len(classes)} label_names for {count} classes"
        raise UserError(problem, f"write {count} names, in the order of the scores")
    return config


def read_folder_weights(folder: Path, what: str | None = None) -> tuple[dict[str, Tensor], Description | None]:
    """The tensors of a folder's ``model.safetensors``, else of its ``pytorch_model.bin``, timm's order, and this project's description
    of them if they have one; ``what`` names the folder in messages. Raises UserError: there are none, or they cannot be read.
    """
    if (folder / WEIGHTS).is_file():
        return read_tensors(folder / WEIGHTS)
    if (folder / PICKLED).is_file():
        return read_pickled(folder / PICKLED, f"{what or folder}/{PICKLED}"), None
    raise UserError(f"{folder} has no {WEIGHTS}, the weights that its {CONFIG} describes", _AGAIN)


def read_timm_folder(folder: Path) -> tuple[VisionModel, Description, bool]:
    """Build the model of a folder, in eval mode on the CPU. Returns the model; a description of it; whether the folder names
    its classes, else the description has their numbers. Raises UserError: the folder is damaged, its architecture or
    preprocessing is none of ours, or its weights do not fit."""
    config, path = read_folder_config(folder), folder / CONFIG
    name, switches, has_our_names = _model_of_timm(config.architecture.partition(".")[0], config.model_args, path)
    images = config.pretrained_cfg
    channels, height, width = images.input_size
    for key, value, wanted, fits in (
        ("input_size", list(images.input_size), "a square of 3 channels", channels == 3 and height == width),
        ("crop_mode", images.crop_mode, "center", images.crop_mode == "center"),
        ("interpolation", images.interpolation, "bicubic", images.interpolation == "bicubic"),
        ("crop_pct", images.crop_pct, "from 0.1 to 1", images.crop_pct is not None and 0.1 <= images.crop_pct <= 1),
        ("num_classes", config.count, "at least 1", config.count > 0),
    ):
        if not fits:
            remedy = "change it if the model may be used so, or take the folder as train.init_from, which needs weights alone"
            raise UserError(f"{path}: {key} must be {wanted} for an evaluation, got {value!r}", remedy)
    weights, training = read_folder_weights(folder)
    check_finite(weights, source=str(folder / WEIGHTS))
    description = Description(
        model=name,
        num_classes=config.count,
        image_size=height,
        switches=switches,
        classes=[str(i) for i in range(config.count)] if config.classes is None else config.classes,
        mean=images.mean,
        std=images.std,
        eval_crop=float(images.crop_pct or 0),
        precision=training.precision if training else "fp32",
        step=training.step if training else 0,
        weights=training.weights if training else "model",
        names="ours" if has_our_names else "authors",
    )
    return build_described(folder, weights, description), description, config.classes is not None
