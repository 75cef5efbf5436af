"""Wrap any image classifier of timm as a model of ours (``timm:NAME``; Wightman, github.com/huggingface/pytorch-image-models), and what
:mod:`pipeline.models.imported` wraps others with.

Its module is the submodule ``net``, so that parameter names are ``net.`` and timm's. ``model.switches`` are further arguments of
``timm.create_model``.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import UserError, first_line
from pipeline.models.common.base import ModelOptions, Switches, VisionModel, scale_branch
from pipeline.models.timm.names import TIMM_PREFIX
from pipeline.models.timm.network import Maker, Trial, build_network, drop_rate, import_timm, scales_kept, try_out

NET = "net."  # before the network's own names of parameters
_FILTERS = ("checkpoint_filter_fn", "checkpoint_filter_fn_classifier", "_filter_fn")  # what timm's modules call them


class TimmSwitches(Switches):
    """Arguments of ``timm.create_model``, or of another function; which there are, the architecture decides."""

    model_config = ConfigDict(extra="allow")


class StreamDropPath(nn.Module):
    """Stochastic depth as ``timm.layers.DropPath`` applies it, with factors that are given instead of drawn.

    A module may be called several times in a forward pass (ConViT's blocks use one for both branches), and again in the backward
    pass where activations are recomputed: call i takes column i modulo ``calls``. ``forward``: (B, ...) -> (B, ...).
    """

    def __init__(self, drop_prob: float, scale_by_keep: bool, calls: int) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep, self.calls = drop_prob, scale_by_keep, calls
        self.scales: Tensor | None = None
        self._call = 0

    def take(self, scales: Tensor | None) -> None:
        """The factors of the next forward pass: (B, calls), 0 or ``1 / (1 - drop_prob)``; None: nothing is dropped."""
        self.scales, self._call = scales, 0

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales
        if scales is None or not self.training:
            return x
        if not self.scale_by_keep:
            scales = scales * (1 - self.drop_prob)
        column = 0
        if self.calls > 1:
            column = self._call % self.calls
            self._call += 1
        return scale_branch(x, scales, column)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}, calls={self.calls}"


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """PyTorch's generators of the CPU and of ``device`` start from ``seed`` in the block, and are as before after it; None: left alone."""
    gpus = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus, enabled=seed is not None):
        if seed is not None:
            for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)):
                generator.manual_seed(seed)
        yield


class WrappedClassifier(VisionModel):
    """The classifier ``net``, whose modules of stochastic depth are exchanged for :class:`~StreamDropPath`. ``heads``: names of
    its classifiers' modules. Raises UserError: the network has no activation checkpointing."""

    library = "its code"

    def __init__(
        self, name: str, net: Any, trial: Trial, activation_checkpointing: bool, switches: Switches, heads: Sequence[str]
    ) -> None:
        paths = [(net.get_submodule(path), calls) for path, calls in trial.branches.items()]
        super().__init__([drop_rate(path) for path, calls in paths for _ in range(calls)], activation_checkpointing, switches)
        if activation_checkpointing:
            try:
                net.set_grad_checkpointing(True)
            except (AssertionError, AttributeError) as error:
                problem = f"train.activation_checkpointing is true, but {name} has none in {self.library} ({first_line(error)})"
                raise UserError(problem, "set train.activation_checkpointing=false") from None
        self.name, self.net, self.trial = name, net, trial
        self.draws_from_generator = bool(trial.draws)
        streamed = {path: StreamDropPath(drop_rate(path), scales_kept(path), calls) for path, calls in paths}
        for module in list(net.modules()):
            for child_name, child in list(module.named_children()):
                if child in streamed:
                    setattr(module, child_name, streamed[child])
        self._streamed = list(streamed.values())  # a plain list: they are registered below net
        self.head_names = tuple(f"{NET}{head}." for head in heads)
        # (its name, ours): of each child with all that is in it, and of the weights that belong to none.
        direct = [*net.named_parameters(recurse=False), *net.named_buffers(recurse=False)]
        names = [*(f"{child}." for child, _ in net.named_children()), *(name for name, _ in direct)]
        self.reference_names = tuple((name, NET + name) for name in names)
        self._norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
        self._momenta: list[float | None] = []

    @staticmethod
    def heads(net: Any, num_classes: int) -> Sequence[str]:
        """Names of the classifiers: what ``get_classifier`` gives, as in timm's models, else the last linear layer of so many outputs."""
        try:
            found = net.get_classifier()
        except Exception:  # it has no such method, or another one
            found = None
        names = [key for key, module in net.named_modules() if module is found]
        linear = [key for key, each in net.named_modules() if isinstance(each, nn.Linear) and each.out_features == num_classes]
        return (names or linear)[-1:]

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        scales = self.branch_scales(images.shape[0], noise)  # (B, branches); len() would fix B in an exported graph
        column = 0
        for path in self._streamed:
            path.take(None if scales is None else scales[:, column : column + path.calls])
            column += path.calls
        for norm, momentum in zip(self._norms, self._momenta):  # as before, where nobody has set one since
            norm.momentum = momentum if norm.momentum == 0.0 else norm.momentum
        self._momenta = []
        with seeded(self.generator_seed if self.training and self.draws_from_generator else None, images.device):
            scores = self.net(images)
        if self.training and self.activation_checkpointing:
            # The recomputation in the backward pass must not update BatchNorm's statistics once more.
            self._momenta = [norm.momentum for norm in self._norms]
            for norm in self._norms:
                norm.momentum = 0.0
        return scores

    def whole(self) -> tuple[nn.Module, str]:
        return self.net, "forward"

    @property
    def pooled_width(self) -> int:
        if self.trial.feature_width is None:
            problem = f"{self.name} has no pooled features in {self.library} (forward_head with pre_logits)"
            raise UserError(problem, "predict classes")
        return self.trial.feature_width

    def pooled(self, images: Tensor) -> Tensor:
        return self.net.forward_head(self.net.forward_features(images), pre_logits=True)

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise UserError(f"{self.name} has no feature form here", "take that of its own library, as timm's features_only=True")

    def no_weight_decay(self) -> set[str]:
        exempt = set(self.net.no_weight_decay()) if hasattr(self.net, "no_weight_decay") else set()
        return {NET + name for name, _ in self.net.named_parameters() if name in exempt or name.endswith(".bias")}

    @property
    def num_layers(self) -> int:
        """As timm's ``param_groups_layer_decay`` counts them."""
        return max(self._layers().values()) + 1

    def layer_of(self, name: str) -> int:
        """By timm's ``group_matcher``. Raises a ``UserError`` if the architecture has none."""
        return self._layers()[name.removeprefix(NET)]

    def _layers(self) -> dict[str, int]:
        if not hasattr(self.net, "group_matcher"):
            problem = f"optim.layer_decay is set, but {self.library} names no layers of {self.name} (group_matcher)"
            raise UserError(problem, "remove optim.layer_decay")
        return import_timm().models.group_parameters(self.net, self.net.group_matcher(coarse=False), reverse=True)

    def remarks(self, mean: Sequence[float], std: Sequence[float]) -> list[str]:
        sentences = [f"{self.name}: {len(self.drop_path_rates)} branches of stochastic depth from the stream"]
        if self.draws_from_generator:
            draws = f"note: {self.name} also draws otherwise ({', '.join(self.trial.draws)})"
            again = "the same again after a restart on the same number of processes, not on another"
            sentences.append(f"{draws}, from a generator that is seeded for each micro-batch: {again}")
        return sentences


class TimmClassifier(WrappedClassifier):
    library = "timm"

    @staticmethod
    def heads(net: Any, num_classes: int) -> Sequence[str]:
        names = net.pretrained_cfg.get("classifier") or ()
        return [names] if isinstance(names, str) else names

    def prepared_weights(self, weights: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
        """Weights under timm's names, the authors' or ours (``net.`` before timm's) through timm's own filter, which renames and resamples
        what this model needs. Raises UserError: the filter fails on them."""
        plain = {name.removeprefix(NET): value for name, value in weights.items()}
        if convert := self._checkpoint_filter():
            try:
                plain = convert(dict(plain), self.net)
            except Exception as error:  # of timm's code, on names or shapes that it does not expect
                why = f"timm's filter of its checkpoints: {type(error).__name__} {first_line(error)}"
                remedy = "set model.name to the architecture of these weights"
                raise UserError(f"{source} does not fit {self.name} ({why})", remedy) from None
        return {NET + name: value for name, value in plain.items()}

    def _checkpoint_filter(self) -> Callable[..., Any] | None:
        """timm's function (state dict, network) -> state dict, from the module of the architecture or else of its class."""
        entry = import_timm().models.model_entrypoint(self.name.removeprefix(TIMM_PREFIX))
        for module in (sys.modules[entry.__module__], sys.modules[type(self.net).__module__]):
            for name in _FILTERS:
                if convert := getattr(module, name, None):
                    # LayerScale under the names of DeiT-III's authors: timm's own names are left alone.
                    adapts = "adapt_layer_scale" in inspect.signature(convert).parameters
                    return partial(convert, adapt_layer_scale=True) if adapts else convert
        return None

    def remarks(self, mean: Sequence[float], std: Sequence[float]) -> list[str]:
        first, *others = super().remarks(mean, std)
        sentences = [first.replace(self.name, f"timm {import_timm().__version__}", 1), *others]
        cfg = self.net.pretrained_cfg
        if (tuple(cfg["mean"]), tuple(cfg["std"])) != (tuple(mean), tuple(std)):
            theirs = f"those of timm's weights for {self.name}, {list(cfg['mean'])} and {list(cfg['std'])}"
            sentences.append(f"note: data.mean {list(mean)} and data.std {list(std)} differ from {theirs}")
        return sentences


def build_wrapped(
    kind: type[WrappedClassifier], make: Maker, checked: Maker, name: str, switches: TimmSwitches, **options: Any
) -> WrappedClassifier:
    """The builder of a registry entry, of a ``kind`` with the networks that ``make`` makes, and ``checked`` for a trial. ``options``: of
    :class:`~pipeline.models.common.base.ModelOptions`."""
    settings, given = ModelOptions(**options), dict(switches.model_extra or {})
    asked = (name, settings.num_classes, settings.image_size, settings.drop_path, given)
    trial = try_out(checked, *asked)
    if settings.drop_path and not trial.branches:
        problem = f"model.drop_path is {settings.drop_path}, but {name} has no stochastic depth"
        raise UserError(problem, "set model.drop_path=0")
    default = torch.get_default_device()
    with torch.device(trial.device if default.type == "meta" else default):  # some networks cannot be built on meta
        net = make(*asked)
    return kind(name, net, trial, settings.activation_checkpointing, switches, kind.heads(net, settings.num_classes))


def build_timm(name: str, **options: Any) -> WrappedClassifier:
    """The builder of the registry entry of ``timm:NAME``."""
    return build_wrapped(TimmClassifier, build_network, build_network, name, **options)
