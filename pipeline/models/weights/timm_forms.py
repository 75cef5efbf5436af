"""Map our models to architectures of timm (tested with 1.0.31), and back.

timm has ConViT, DeiT and gMLP, under the names and shapes of their authors' code, which its code comes from. Other widths go into
``model_args``, timm's keyword arguments. What timm has no argument for, and the other families, keep this project's name:
:mod:`pipeline.models.for_timm` registers it with timm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserError
from pipeline.models.common.vit import PATCH, ViTLayout
from pipeline.models.convit import ConViTSwitches
from pipeline.models.registry import check_name, list_models, model_entry
from pipeline.models.timm_names import PREFIX, is_timm

_HERE = {  # our name -> timm's architecture, and its arguments where the layout is another (ConViT: channels per head)
    "convit_ti": ("convit_tiny", {}),
    "convit_s": ("convit_small", {}),
    "convit_b": ("convit_base", {}),
    "convit_ti_plus": ("convit_tiny", {"embed_dim": 64}),
    "convit_s_plus": ("convit_small", {"embed_dim": 64}),
    "convit_b_plus": ("convit_base", {"embed_dim": 64}),
    "deit_t": ("deit_tiny_patch16_224", {}),
    "deit_s": ("deit_small_patch16_224", {}),
    "deit_b": ("deit_base_patch16_224", {}),
    "deit_ti_plus": ("deit_tiny_patch16_224", {"embed_dim": 256, "num_heads": 4}),
    "deit_s_plus": ("deit_small_patch16_224", {"embed_dim": 576, "num_heads": 9}),
    "deit_b_plus": ("deit_base_patch16_224", {"embed_dim": 1024, "num_heads": 16}),
    "gmlp_s": ("gmlp_s16_224", {}),
}
_ALSO = {  # the same networks under other names of timm's
    "deit_base_patch16_384": "deit_b",
    **{f"vit_{long}_patch16_{size}": ours for long, ours in (("tiny", "deit_t"), ("small", "deit_s"), ("base", "deit_b")) for size in (224, 384)},
}  # fmt: skip
_THERE = {architecture: ours for ours, (architecture, other) in _HERE.items() if not other} | _ALSO
_LAYOUTS = {  # timm's own arguments of these architectures
    "convit_ti": {"embed_dim": 48, "num_heads": 4},
    "convit_s": {"embed_dim": 48, "num_heads": 9},
    "convit_b": {"embed_dim": 48, "num_heads": 16},
    "deit_t": {"embed_dim": 192, "num_heads": 3},
    "deit_s": {"embed_dim": 384, "num_heads": 6},
    "deit_b": {"embed_dim": 768, "num_heads": 12},
    "gmlp_s": {},
}
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
    """A model as timm builds it.

    Attributes:
        architecture: a name of timm's registry.
        model_args: keyword arguments of ``timm.create_model``.
        registered: the name is this project's, known to timm after ``import pipeline.models.for_timm``; the weights then have
            our names. Else they have timm's, which are the authors'.
        first_conv, global_pool: of timm's config.
    """

    architecture: str
    model_args: dict[str, Any]
    registered: bool
    first_conv: str | None = None
    global_pool: str = "avg"


def timm_form(name: str, switches: Mapping[str, Any]) -> TimmForm:
    """The architecture of timm that a model of ours is.

    Args:
        name: of ``create_model``.
        switches: those of the model that are stated; the others have their defaults.
    """
    if is_timm(name):
        return TimmForm(name.removeprefix(PREFIX).partition(".")[0], dict(switches), False)
    fields = model_entry(name).switches.model_fields
    changed = {key: value for key, value in switches.items() if value != fields[key].default}
    family = name.partition("_")[0]
    carried = {"gpsa_layers", *_OF_TRAINING} if family == "convit" else set()
    if name not in _HERE or changed.keys() - carried:
        pool = _GLOBAL_POOL.get(family, "avg")
        return TimmForm(name, {"switches": dict(switches)} if changed else {}, True, None, pool)
    architecture, arguments = _HERE[name]
    if "gpsa_layers" in changed:
        arguments = arguments | {"local_up_to_layer": changed["gpsa_layers"]}
    first_conv = "stem.proj" if family == "gmlp" else "patch_embed.proj"
    return TimmForm(architecture, dict(arguments), False, first_conv, _GLOBAL_POOL[family])


def model_of_timm(architecture: str, arguments: Mapping[str, Any], source: str) -> tuple[str, dict[str, Any], bool] | None:
    """The model of ours that an architecture of timm is.

    Args:
        architecture: of a folder's config, without the tag of its weights.
        arguments: its ``model_args``.
        source: the file, for messages.

    Returns:
        Our name, ``timm:NAME`` where timm's own code is needed, its switches, and whether the weights have our names; None if it
        cannot be built.

    Raises:
        UserError: an argument makes another network of it than any of ours.
    """
    if architecture in list_models():
        unknown = arguments.keys() - {"switches", "global_pool", *_OF_CONFIG}
        _refuse(source, architecture, {key: arguments[key] for key in unknown})
        switches = arguments.get("switches", {})
        if not isinstance(switches, dict):
            _refuse(source, architecture, {"switches": switches})
        return architecture, switches, True
    if architecture not in _THERE:
        try:
            check_name(PREFIX + architecture)
        except UserError:
            return None
        return PREFIX + architecture, {key: value for key, value in arguments.items() if key not in _OF_CONFIG}, False
    ours = _THERE[architecture]
    family = ours.partition("_")[0]
    fixed = _FIXED | {"qkv_bias": family == "deit", "global_pool": _GLOBAL_POOL[family]}
    layout = dict(_LAYOUTS[ours])
    switches = {}
    refused = {}
    for key, value in arguments.items():
        if key in layout:
            layout[key] = value
        elif key == "local_up_to_layer" and family == "convit":
            switches = {} if value == ConViTSwitches().gpsa_layers else {"gpsa_layers": value}
        elif key not in _WITHOUT_EFFECT and not key.endswith("_drop_rate") and not (key in fixed and fixed[key] == value):
            refused[key] = value
    _refuse(source, architecture, refused)
    sizes = {name: _layout(name) for name in _HERE if name.partition("_")[0] == family}
    fitting = [name for name, its in sizes.items() if its == layout]
    if not fitting:
        _refuse(source, architecture, {key: value for key, value in layout.items() if _LAYOUTS[ours][key] != value})
    return fitting[0], switches, False


def _layout(name: str) -> dict[str, int]:
    architecture, other = _HERE[name]
    return _LAYOUTS[_THERE[architecture]] | other


def _refuse(source: str, architecture: str, arguments: Mapping[str, Any]) -> None:
    if arguments:
        named = ", ".join(f"{key}={value!r}" for key, value in sorted(arguments.items()))
        raise UserError(
            f"{source}: model_args of {architecture} must be those of a model of this project, got {named}",
            "remove them if the weights do not need them, or use the folder with timm",
        )
