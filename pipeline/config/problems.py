"""Translate pydantic's validation errors into one sentence that names the key and where its value was set."""

import datetime
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.sections import Config, flatten, section_fields
from pipeline.config.values import Section
from pipeline.errors import shown

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")
_LONG = 200  # characters after which pydantic's or the user's text is cut, and beyond which nobody meant another key
_CLOSE = 0.7
_MOST = 3  # keys that a sentence offers

# Key -> what other projects call it, in whichever section; names that are close enough to ours to be found without it are left out.
_NAMES_ELSEWHERE = {
    "model.name": "architecture arch",
    "model.image_size": "size img_size input_size resolution",
    "model.num_classes": "classes",
    "model.drop_path": "drop_path_rate",
    "data.path": "data_dir dataset",
    "data.num_threads": "workers num_workers",
    "augment.erasing": "random_erasing reprob",
    "augment.mixup": "mixup_alpha",
    "augment.cutmix": "cutmix_alpha",
    "train.global_batch_size": "batch batch_size",
    "train.micro_batch_size": "batch batch_size accumulation_steps gradient_accumulation_steps",
    "train.precision": "amp dtype",
    "train.ema_decay": "ema",
    "train.init_from": "finetune pretrained",
    "train.label_smoothing": "smoothing",
    "train.loss": "bce_loss",
    "train.bce_threshold": "bce_target_thresh",
    "data.train_crop": "src",
    "optim.lr": "learning_rate",
    "optim.weight_decay": "wd",
    "optim.warmup_epochs": "warmup",
    "optim.clip_grad_norm": "clip_grad max_grad_norm",
    "seed": "random_seed",
    "output_dir": "output save_dir",
}
ALIASES = {
    alias: [key for key, names in _NAMES_ELSEWHERE.items() if alias in names.split()]
    for alias in " ".join(_NAMES_ELSEWHERE.values()).split()
}


@dataclass(frozen=True)
class Layer:
    """The keys set by one file or override."""

    label: str  # for messages, such as "config configs/pervit_t.yaml"
    tree: dict
    file: Path | None = None  # that it was read from

    def sets(self, path: Iterable[object]) -> bool:
        """Whether this layer sets the value at ``path`` (section, key, index within the value), or part of it."""
        at: Any = self.tree
        for name in path:
            if not isinstance(at, dict):
                return True
            if name not in at:
                return False
            at = at[name]
        return True


def describe(error: ValidationError, layers: list[Layer], root: type[Section] = Config) -> str:
    """The first problem of a complete config as one sentence: ``SOURCE: KEY must ..., got ...``. Later layers override earlier ones."""
    problem = error.errors(include_url=False)[0]
    loc, found, kind = problem["loc"], problem["input"], problem["type"]
    key = ".".join(str(part) for part in loc[:2] if not isinstance(part, int))
    if loc[:2] == ("data", "mix") and len(loc) > 2:
        key += f"[{str(loc[2])!a:.80}]"
    if kind == "extra_forbidden":
        sentence = unknown_key(key, found, root)
    elif kind == "missing":
        missing = sum(other["type"] == "missing" and other["loc"][:-1] == loc[:-1] for other in error.errors())
        sentence = f"{key} must have {len(found) + missing} values, got {len(found)}."
    elif kind == "too_long" and isinstance(found, list | tuple):
        sentence = f"{key} must have {problem['ctx']['max_length']} values, got {len(found)}."
    elif kind in ("model_type", "dict_type"):
        sentence = f"{key or 'the config'} must be a section, got {shown(found)}: write {key}.NAME=VALUE."
    elif kind in ("tuple_type", "list_type"):
        sentence = f"{key} must be a list, got {shown(found)}: write {key}={_as_list(key, found, root)}."
    elif kind == "string_type" and isinstance(found, int | float | datetime.date) and not isinstance(found, bool):
        sort, value = ("a date", str(found)) if isinstance(found, datetime.date) else ("a number", shown(found))
        sentence = f"{key} must be text, got {value}, which YAML reads as {sort}: put it in quotes."
    else:
        sentence = complaint(problem, key)
    return f"{_source(loc, sentence, layers, root)}: {sentence}"


def complaint(problem: ErrorDetails, key: str) -> str:
    """A problem with the value of a key, ``KEY must ..., got ...``; what a validator of several keys says stands as it is."""
    message, kind, found = problem["msg"].removeprefix("Value error, "), problem["type"], problem["input"]
    message = message if len(message) <= _LONG else message[:_LONG] + "..."
    if kind == "value_error" and isinstance(found, dict | Section):
        return f"{key} {message}." if message.startswith("must ") else f"{message}."
    bounds = problem.get("ctx", {})
    requirement = {
        "greater_than": f"be greater than {shown(bounds.get('gt'))}" if bounds.get("gt") else "be positive",
        "greater_than_equal": f"be at least {shown(bounds.get('ge'))}",
        "less_than": f"be less than {shown(bounds.get('lt'))}",
        "less_than_equal": f"be at most {shown(bounds.get('le'))}",
        "finite_number": "be a finite number",
        "string_type": "be text",
        "string_too_short": "not be empty",
        "too_short": "not be empty" if bounds.get("min_length") == 1 else f"have at least {bounds.get('min_length')} values",
        "string_too_long": f"have at most {bounds.get('max_length')} characters",
        **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "be a whole number"),
        **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
        **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    }.get(kind, message.removeprefix("Input should ").removeprefix("must "))
    if ", got " in requirement:
        return f"{key} must {requirement}."
    number = isinstance(found, str) and kind.startswith(("greater", "less", "finite"))  # YAML 1.1 reads 1e9 as text
    return f"{key} must {requirement}, got {found if number else shown(found)}."


def _source(loc: tuple, sentence: str, layers: list[Layer], root: type[Section]) -> str:
    """The layer that set the value. For an error across several keys, which the sentence names: the last layer that set one."""
    paths = [loc]
    if len(loc) < 2:
        known = flatten(root())
        paths = [tuple(word.split(".")) for word in _KEY.findall(sentence) if word in known] or [loc]
    setting = (layer for layer in reversed(layers) if any(layer.sets(path) for path in paths))
    return next(setting, layers[-1] if loc else layers[0]).label


def _as_list(key: str, found: Any, root: type[Section]) -> str:
    """A suggestion: the given values in brackets if their number is right, else the default, or an example where that is none."""
    section, _, name = key.rpartition(".")
    field = section_fields(section, root)[name]
    default = field.examples[0] if field.examples else field.default
    parts = found.split(",") if isinstance(found, str) else [] if found is None else [shown(found)]
    needed = len(default) if isinstance(default, tuple) or found is None else len(parts)
    words = [part.strip() for part in parts] if len(parts) == needed else [str(part) for part in default]
    text = f"[{','.join(words)}]"
    return text if len(text) <= _LONG and text.isprintable() else str(list(default)).replace(" ", "")


def unknown_key(key: str, inside: object = None, root: type[Section] = Config) -> str:
    """The sentence for a key that does not exist, with those that were probably meant.

    Where its value ``inside`` is a mapping of one name, as that of a section which does not exist, the name counts too.
    """
    meant = f"{key}.{next(iter(inside))}" if isinstance(inside, dict) and len(inside) == 1 else key
    near = nearest_keys(meant, root) or nearest_keys(key, root)
    if near:
        *others, last = [repr(known) for known in near]
        remedy = f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"
    elif root is Config:
        remedy = "remove it; `pervit config` lists the keys."
    else:
        remedy = f"remove it; the keys are: {', '.join(flatten(root()))}."
    return f"unknown key {shown(key)}: {remedy}"


def nearest_keys(key: str, root: type[Section] = Config) -> list[str]:
    """Known keys and sections that a dotted name which is none may stand for, the likeliest first; at most three.

    A slip within its section goes before the same name in another section, and that before what merely looks alike.
    """
    if len(key) > _LONG:
        return []
    section, _, name = key.lower().replace("-", "_").rpartition(".")
    keys = {known: known.rpartition(".") for known in flatten(root())}
    if aliases := [known for known in ALIASES.get(name, ()) if known in keys]:
        return aliases
    siblings = {leaf: known for known, (inside, _, leaf) in keys.items() if inside == section}
    near = [siblings[close] for close in difflib.get_close_matches(name, siblings, n=1, cutoff=_CLOSE)]
    near += difflib.get_close_matches(key, [known for known in keys if keys[known][2] == name], n=_MOST, cutoff=0)
    if not near and not section:  # a section, a key of the top level, or one such as train_epochs
        sections = dict.fromkeys(known.partition(".")[0] for known in keys)
        near = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=_CLOSE)
    if not near:
        leaves = {leaf: known for known, (_, _, leaf) in keys.items()}
        near = [leaves[close] for close in difflib.get_close_matches(name, leaves, n=1, cutoff=_CLOSE)]
    return list(dict.fromkeys(near))[:_MOST]
