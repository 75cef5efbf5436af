"""Load the teacher of hard distillation: another run's model, or a network of torchvision or timm with a local weight file.

ConViT's teacher, a RegNetY-16GF (Table 4), is ``torchvision:regnet_y_16gf``, or ``timm:regnety_160.deit_in1k`` with the file that
DeiT's authors published (``train.teacher_weights``). Nothing is downloaded. The libraries are imported where they are used.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.checkpoint.weights import read_initial_weights
from pipeline.config import Config, TrainConfig
from pipeline.errors import UserError, did_you_mean, first_line
from pipeline.inference.trained import read_trained
from pipeline.lazy import import_library
from pipeline.models.timm.network import tagged_network
from pipeline.models.weights.reference_names import load_fitting
from pipeline.models.weights.transfer import check_finite, first_difference
from pipeline.step.precision import autocast

Channels = Sequence[float]  # a number for each of red, green and blue
# What all of torchvision's weights for ImageNet were trained with: the preset `ImageClassification` of torchvision.transforms.
TORCHVISION_MEAN, TORCHVISION_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_teacher(config: Config, device: torch.device, classes: list[str] | None = None) -> Callable[[Tensor], Tensor]:
    """Load ``train.teacher``: a library's network, or a model as :func:`~pipeline.inference.trained.read_trained` finds it,
    whose classes are compared with ``classes``, the student's in order, unless None. Returns images (B, 3, H, W) -> logits (B,
    classes), without gradients. Raises UserError: there is no such model, or it has other classes or another image size."""
    teacher = load_library_teacher(config) if config.train.teacher_weights else _model_of_run(config, classes)
    teacher.to(device).requires_grad_(False)

    return torch.no_grad()(autocast(device, config.train.precision)(teacher.__call__))


def _model_of_run(config: Config, classes: list[str] | None) -> nn.Module:
    assert config.train.teacher
    source = Path(config.train.teacher)
    trained = read_trained(source)
    for key in ("num_classes", "image_size"):
        found, needed = getattr(trained.config.model, key), getattr(config.model, key)
        if found != needed:
            raise UserError(f"train.teacher {source} must have model.{key} {needed}, got {found}", "choose another teacher")
    if classes and trained.named and (others := first_difference(trained.classes, classes)):
        problem = f"train.teacher {source} must have the data set's classes, got {others}"
        raise UserError(problem, "choose a teacher that was trained on the same classes")
    return trained.build_model()


def describe_teacher(train: TrainConfig) -> str:
    """The teacher in words, for the log."""
    if not train.teacher_weights:
        return f"the model of {train.teacher}"
    return f"{train.teacher} with {train.teacher_weights}, which does not name its classes: they must be the data set's, in the same order"


class LibraryTeacher(nn.Module):
    """A network, (B, 3, H, W) -> (B, classes), of images normalized by ``mean`` and ``std``, that takes those of a run with others."""

    scale: Tensor  # (3, 1, 1), a buffer
    offset: Tensor  # (3, 1, 1), a buffer

    def __init__(self, network: nn.Module, mean: Channels, std: Channels, run_mean: Channels, run_std: Channels) -> None:
        super().__init__()
        self.network = network
        self.converts = (tuple(mean), tuple(std)) != (tuple(run_mean), tuple(run_std))
        theirs, ours = (torch.tensor([m, s], dtype=torch.float64) for m, s in ((mean, std), (run_mean, run_std)))  # (2, 3)
        self.register_buffer("scale", (ours[1] / theirs[1]).float().view(3, 1, 1))
        self.register_buffer("offset", ((ours[0] - theirs[0]) / theirs[1]).float().view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images * self.scale + self.offset if self.converts else images)


def load_library_teacher(config: Config) -> LibraryTeacher:
    """The network that ``train.teacher`` names, with the weights of ``train.teacher_weights``, in eval mode on the CPU. Raises
    UserError: :func:`library_network` has none, the file cannot be read, its weights are not those of the network with this
    number of classes, or the network does not take images of this size."""
    train = config.train
    assert train.teacher and train.teacher_weights  # the config has both or none
    network, mean, std = library_network(config)
    file = Path(train.teacher_weights)
    if not file.is_file():
        problem = f"train.teacher_weights must be a file with the weights of {train.teacher}, got {file}, which is not a file"
        raise UserError(problem, "download them; the repository's docs/models.md says from where")
    weights = read_initial_weights(file, key="train.teacher_weights").weights
    check_finite(weights, f"train.teacher_weights {file}")
    must = f"train.teacher_weights {file} must fit {train.teacher} with {config.model.num_classes} classes"
    remedy = "pass the weights of that network, trained on the classes of this data set"
    load_fitting(network, weights, f"{must}, got tensors of which are ", remedy)
    teacher = LibraryTeacher(network, mean, std, config.data.mean, config.data.std).eval()
    _try_out(teacher, config)
    return teacher


def library_network(config: Config) -> tuple[nn.Module, Channels, Channels]:
    """The network that ``train.teacher`` names with random weights, and the mean and deviation that it expects. Raises
    UserError: the library is missing or does not load, or has no such network."""
    library, _, name = (config.train.teacher or "").partition(":")
    module, classes = import_library(library, f"train.teacher={library}:NAME"), config.model.num_classes
    if library == "timm":
        known = module.list_models()
        found = module.is_model(name)  # also with the tag of its weights: regnety_160.deit_in1k
    else:
        known = module.models.list_models(module=module.models)  # classification alone
        found = name in known
    if not found:
        hint = did_you_mean(name, known, f"{library}.list_models() has the names", f"{library}:{{}}")
        raise UserError(f"train.teacher must name a classifier of {library}, got {library}:{name}", hint)
    if library == "timm":
        return tagged_network(name, classes, "train.teacher")
    return module.models.get_model(name, weights=None, num_classes=classes), TORCHVISION_MEAN, TORCHVISION_STD


def _try_out(teacher: LibraryTeacher, config: Config) -> None:
    """One image through the network, so that a size that it does not take is found before the first step."""
    size, classes = config.model.image_size, config.model.num_classes
    try:
        with torch.no_grad():
            scores = teacher(torch.zeros(1, 3, size, size))
    except Exception as error:  # of the library's own code, or of PyTorch's operators
        got = f"got {config.train.teacher}, which does not ({first_line(error)})"
        problem = f"train.teacher must take images of {size} x {size} pixels, {got}"
        raise UserError(problem, "choose another teacher or another model.image_size") from None
    found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if found != (1, classes):
        problem = f"train.teacher must give (1, {classes}) scores for an image, got {found} of {config.train.teacher}"
        raise UserError(problem, "choose another teacher")
