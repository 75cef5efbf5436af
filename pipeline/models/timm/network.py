"""Build timm's networks; find out by a trial pass what a network does: its stochastic depth, what else it draws, its
features."""

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import UserError, did_you_mean, first_line
from pipeline.lazy import import_library
from pipeline.models.timm.names import TIMM_PREFIX

_RESERVED = {  # arguments of timm.create_model that a switch must not set -> what sets them
    "num_classes": "model.num_classes sets it",
    "img_size": "model.image_size sets it",
    "drop_path_rate": "model.drop_path sets it",
    "in_chans": "images have 3 channels",
    **dict.fromkeys(
        ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay"), "train.init_from=timm:NAME.TAG takes timm's weights"
    ),
    "checkpoint_path": "train.init_from takes a file",
    **dict.fromkeys(("features_only", "out_indices"), "a classifier is trained"),
    **dict.fromkeys(("cache_dir", "scriptable", "exportable", "no_jit"), "it does not describe the model"),
    "device": "the run chooses the device",
    "dtype": "train.precision sets it",
}
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
Maker = Callable[[str, int, int, float, Mapping[str, Any]], nn.Module]  # as :func:`build_network`
_TRIAL_BATCH = 2  # images: tells a batch's dimension from a window's
_DROPS = {"DropPath", "StochasticDepth"}  # classes of stochastic depth, of timm, of torchvision and of those who copied them
_ROWS = 4096  # that such a module is given, to see whether it drops samples


@dataclass(frozen=True)
class Trial:
    """What a network did with two blank images."""

    device: str  # on which it can be built and run: meta without memory, else cpu
    branches: Mapping[str, int]  # name of each DropPath module that drops samples -> its calls in a forward pass
    draws: tuple[str, ...]  # operators that draw from PyTorch's generator besides, in training mode
    changed: Sequence[str]  # buffers that a forward pass changes, beside those of BatchNorm
    feature_width: int | None  # D of what the classifier sees, (B, D); None: the network has no such form


def import_timm() -> ModuleType:
    return import_library("timm", "model.name timm:NAME")


def tagged_network(name: str, num_classes: int, key: str) -> tuple[nn.Module, Sequence[float], Sequence[float]]:
    """A network of timm, whose name may have the tag of its weights, with random weights; and the mean and deviation that it
    expects. Raises UserError: timm knows no such tag; ``key`` is that of the config which names the network."""
    try:
        network = import_timm().create_model(name, pretrained=False, num_classes=num_classes)
    except RuntimeError as error:
        problem = f"{key} must be a model that timm makes, got timm:{name} ({error})"
        raise UserError(problem, "leave out the tag, or correct it") from None
    return network, network.pretrained_cfg["mean"], network.pretrained_cfg["std"]


def build_network(name: str, num_classes: int, image_size: int, drop_path: float, switches: Mapping[str, Any]) -> nn.Module:
    """``timm.create_model`` of ``timm:NAME`` with random weights, on PyTorch's default device.

    ``img_size`` is an argument of architectures that timm calls of fixed size; the others take any. ``switches`` are further
    ones. Raises UserError: timm cannot build it with these arguments.
    """
    for key in switches:
        if key in _RESERVED:
            raise UserError(f"model.switches.{key} is set for {name}, but {_RESERVED[key]}", "remove the switch")
    timm = import_timm()
    architecture = name.removeprefix(TIMM_PREFIX)
    if not timm.is_model(architecture):
        raise UserError(f"model.name must be a model of timm {timm.__version__}, got {name}", "choose another one")
    settings = timm.get_pretrained_cfg(architecture)
    arguments = {"num_classes": num_classes, "drop_path_rate": drop_path, **switches}
    if settings is not None and settings.fixed_input_size:
        arguments["img_size"] = image_size
    while True:
        try:
            return timm.create_model(architecture, pretrained=False, **arguments)
        except TypeError as error:
            found = _UNEXPECTED.search(str(error))
            unexpected = found[1] if found else ""
            if unexpected == "drop_path_rate" and drop_path:
                problem = f"model.drop_path is above 0, but {name} takes no drop_path_rate"
                raise UserError(problem, "set model.drop_path=0") from None
            if unexpected in switches:
                known = sorted(arguments_of(name))
                remedy = did_you_mean(unexpected, known, f"its arguments are: {', '.join(known)}.", "{!r}")
                problem = f"model.switches: unknown switch {unexpected!r}, which {name} does not take"
                raise UserError(f"{problem}: {remedy}") from None
            if unexpected not in ("img_size", "drop_path_rate") or unexpected not in arguments:
                raise _refusal(name, "", switches, error) from None
            del arguments[unexpected]
        except Exception as error:  # of a constructor, about sizes or settings
            raise _refusal(name, f" for model.image_size {image_size}", switches, error) from None


def _refusal(name: str, size: str, switches: Mapping[str, Any], error: Exception) -> UserError:
    problem = f"{name} cannot be built{size}{_with(switches)} ({first_line(error)})"
    return UserError(problem, "change the switches or model.image_size")


def _with(switches: Mapping[str, Any]) -> str:
    return f" with the switches {dict(switches)}" if switches else ""


def arguments_of(name: str) -> dict[str, Any]:
    """Arguments of a network's class that can be switches -> their defaults (``inspect.Parameter.empty``: none)."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = import_timm().create_model(name.removeprefix(TIMM_PREFIX), pretrained=False)
    parameters = inspect.signature(type(network).__init__).parameters
    hidden = {"self", "args", "kwargs", "cfg", *_RESERVED}
    return {key: parameter.default for key, parameter in parameters.items() if key not in hidden}


def try_out(make: Maker, name: str, num_classes: int, image_size: int, drop_path: float, switches: Mapping[str, Any]) -> Trial:
    """Make the network once more and give it two blank images, in training and in evaluation mode.

    On the meta device, which computes nothing; on the CPU if the network does not work there. PyTorch's generator is left as it
    was. Raises UserError: it cannot be built, takes no such images, is not a classifier, or a switch is not the user's to set.
    """
    return _try_out(make, name, num_classes, image_size, drop_path, json.dumps(dict(switches), sort_keys=True))


@lru_cache(maxsize=32)  # a start builds a model several times
def _try_out(make: Maker, name: str, num_classes: int, image_size: int, drop_path: float, switches: str) -> Trial:
    asked = (make, name, num_classes, image_size, drop_path, json.loads(switches))
    try:
        return _observe("meta", *asked)
    except Exception:  # an operator without a form for meta, or a mistake of the user's, which the CPU explains
        return _observe("cpu", *asked)


def _observe(
    device: str, make: Maker, name: str, num_classes: int, image_size: int, drop_path: float, switches: Mapping[str, Any]
) -> Trial:
    with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
        network = make(name, num_classes, image_size, drop_path, switches)
        before = _versions(network)
        images = torch.zeros(_TRIAL_BATCH, 3, image_size, image_size)
        try:
            in_training, draws, calls = _watched(network, images)
            scores = {"training": in_training, "evaluation": network.eval()(images)}
        except Exception as error:  # of the network's code, or of PyTorch's operators
            problem = f"{name} takes no images of {image_size} x {image_size} pixels{_with(switches)} ({first_line(error)})"
            remedy = f"choose another model.image_size{', other switches' if switches else ''} or another model"
            raise UserError(problem, remedy) from None
        for mode, found in scores.items():
            shape = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            if shape != (_TRIAL_BATCH, num_classes):
                must = f"in {mode} it must give ({_TRIAL_BATCH}, {num_classes}) for {_TRIAL_BATCH} images, got {shape}"
                problem = f"{name} is not a plain classifier: {must}"
                raise UserError(problem, "choose another model, or switches with which it is one")
        changed = [key for key, version in _versions(network).items() if before.get(key) != version]
        return Trial(device, calls, tuple(sorted(draws)), changed, _feature_width(network, images))


def _versions(network: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells whether a buffer has changed, but of BatchNorm's: it is another tensor, or was written to."""
    norms = {id(buffer) for norm in network.modules() if isinstance(norm, _BatchNorm) for buffer in norm.buffers()}
    return {key: (id(buffer), buffer._version) for key, buffer in network.named_buffers() if id(buffer) not in norms}


def _watched(network: nn.Module, images: Tensor) -> tuple[Any, set[str], dict[str, int]]:
    """The scores of a forward pass in training mode, the operators that draw, and the calls of each DropPath module that drops samples.

    A DropPath whose input's first dimension is not the batch, as in TNT, counts among the operators: its draws are of parts.
    """
    calls: Counter[str] = Counter()
    others: set[str] = set()
    paths = {name: module for name, module in network.named_modules() if drops_samples(module)}
    with Draws() as draws:

        def before(name: str, x: Tensor) -> None:
            draws.ignored += 1
            calls[name] += 1
            if len(x) != len(images):
                others.add(name)

        def after(*_: Any) -> None:
            draws.ignored -= 1

        for name, module in paths.items():
            module.register_forward_pre_hook(lambda _, inputs, name=name: before(name, inputs[0]))
            module.register_forward_hook(after)
        scores = network.train()(images)
    names = draws.names | ({"drop_path of parts of an image"} if others else set())
    return scores, names, {name: calls[name] for name in paths if calls[name] and name not in others}


def drop_rate(module: Any) -> float:
    """The rate of a module of stochastic depth: what timm and torchvision call it."""
    return float(getattr(module, "drop_prob", getattr(module, "p", None)) or 0.0)


def scales_kept(module: Any) -> bool:
    """Whether it divides what it keeps by the share that it keeps."""
    return bool(getattr(module, "scale_by_keep", True))


def drops_samples(module: nn.Module) -> bool:
    """Whether a module is stochastic depth, whatever library it is of: it drops some samples of a batch and scales the others."""
    rate = drop_rate(module) if _DROPS & {kind.__name__ for kind in type(module).__mro__} else 0.0
    if not 0 < rate < 1:
        return False
    try:
        with torch.device("cpu"):
            given = module.train()(torch.ones(_ROWS, 2))
    except Exception:  # another module of that name
        return False
    kept = torch.tensor(1 / (1 - rate) if scales_kept(module) else 1.0)
    alone = bool((given[:, 0] == given[:, 1]).all() and ((given == 0) | torch.isclose(given, kept)).all())
    return alone and abs(float((given[:, 0] == 0).float().mean()) - rate) < 0.1  # else all samples together


def _feature_width(network: Any, images: Tensor) -> int | None:
    try:
        features = network.forward_head(network.forward_features(images), pre_logits=True)
    except Exception:  # a network without these methods, or with others' arguments
        return None
    return features.shape[1] if isinstance(features, Tensor) and features.dim() == 2 else None


class Draws(TorchDispatchMode):
    """Within the ``with`` block, notes the operators that draw from PyTorch's generator. Works on the meta device too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.ignored = 0  # above 0, nothing is noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.ignored and torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.names.add(func.overloadpacket.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Fused attention has the tag whatever its dropout."""
    names = [argument.name for argument in func._schema.arguments]
    return "dropout_p" not in names or bool({**dict(zip(names, args)), **kwargs}.get("dropout_p", 0.0))
