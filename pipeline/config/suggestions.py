"""Which key was probably meant by one that does not exist."""

from __future__ import annotations

import difflib

from pipeline.config.bounds import Section
from pipeline.config.describe import flatten
from pipeline.config.sections import Config
from pipeline.config.values import shown

_LONG = 200  # characters of a key beyond which nobody meant another one
_CLOSE = 0.7
_MOST = 3  # keys that a sentence offers

_BATCH = ("train.global_batch_size", "train.micro_batch_size")
# What other projects call it, in whichever section; names that are close enough to ours to be found without it are left out.
ALIASES: dict[str, tuple[str, ...]] = {
    "architecture": ("model.name",),
    "arch": ("model.name",),
    "size": ("model.image_size",),
    "img_size": ("model.image_size",),
    "input_size": ("model.image_size",),
    "resolution": ("model.image_size",),
    "classes": ("model.num_classes",),
    "drop_path_rate": ("model.drop_path",),
    "data_dir": ("data.path",),
    "dataset": ("data.path",),
    "workers": ("data.num_threads",),
    "num_workers": ("data.num_threads",),
    "random_erasing": ("augment.erasing",),
    "reprob": ("augment.erasing",),
    "mixup_alpha": ("augment.mixup",),
    "cutmix_alpha": ("augment.cutmix",),
    "batch": _BATCH,
    "batch_size": _BATCH,
    "accumulation_steps": ("train.micro_batch_size",),
    "gradient_accumulation_steps": ("train.micro_batch_size",),
    "amp": ("train.precision",),
    "dtype": ("train.precision",),
    "ema": ("train.ema_decay",),
    "finetune": ("train.init_from",),
    "pretrained": ("train.init_from",),
    "smoothing": ("train.label_smoothing",),
    "bce_loss": ("train.loss",),
    "bce_target_thresh": ("train.bce_threshold",),
    "src": ("data.train_crop",),
    "learning_rate": ("optim.lr",),
    "wd": ("optim.weight_decay",),
    "warmup": ("optim.warmup_epochs",),
    "clip_grad": ("optim.clip_grad_norm",),
    "max_grad_norm": ("optim.clip_grad_norm",),
    "random_seed": ("seed",),
    "output": ("output_dir",),
    "save_dir": ("output_dir",),
}


def unknown_key(key: str, inside: object = None, root: type[Section] = Config) -> str:
    """That there is no such key, and which were probably meant.

    Args:
        key: with its section, as far as it is known.
        inside: its value. Where that is a mapping of one name, as that of a section which does not exist, the name counts too.
        root: the config that lacks it.
    """
    meant = f"{key}.{next(iter(inside))}" if isinstance(inside, dict) and len(inside) == 1 else key
    near = nearest_keys(meant, root) or nearest_keys(key, root)
    *others, last = [repr(each) for each in near] or [""]
    remedy = (
        f"did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"
        if near
        else "remove it; `python -m pipeline.config` lists the keys."
        if root is Config
        else f"remove it; the keys are: {', '.join(flatten(root()))}."
    )
    return f"unknown key {shown(key)}: {remedy}"


def nearest_keys(key: str, root: type[Section] = Config) -> list[str]:
    """Known keys and sections that a dotted name which is none may stand for, the likeliest first; at most three.

    A slip within its section goes before the same name in another section, and that before what merely looks alike.
    """
    if len(key) > _LONG:
        return []
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    keys = list(flatten(root()))
    aliases = [each for each in ALIASES.get(name, ()) if each in keys]
    if aliases:
        return aliases
    siblings = {each.rpartition(".")[2]: each for each in keys if each.rpartition(".")[0] == section}
    near = [siblings[each] for each in difflib.get_close_matches(name, siblings, n=1, cutoff=_CLOSE)]
    near += difflib.get_close_matches(key, [each for each in keys if each.rpartition(".")[2] == name], n=_MOST, cutoff=0)
    if not near and not section:  # a section, a key of the top level, or one such as train_epochs
        sections = dict.fromkeys(each.partition(".")[0] for each in keys)
        near = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=_CLOSE)
    if not near:
        leaves = {each.rpartition(".")[2]: each for each in keys}
        near = [leaves[each] for each in difflib.get_close_matches(name, leaves, n=1, cutoff=_CLOSE)]
    return list(dict.fromkeys(near))[:_MOST]
