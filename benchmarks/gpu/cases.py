"""What is measured, in the order of its worth: the check may be stopped at any moment, and what was measured by then should be what matters.

After five minutes on an H200 most of the first part was there; after 25 all but some of the last steps should be. Tests are last: time is
kept for them. Each case is a process, or one for each GPU, so that a crash, a hang or a lack of memory costs the rows of one case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.gpu.common import REPOSITORY, Values

MINUTES = 25.0
AUTO = "graphs"  # of train.compile, on one GPU
TITLES = {
    "machine": "Machine",
    "data": "Data",
    "decode": "Decoding on the GPU, tried out",
    "step": "Training steps",
    "kernel": f"The largest kernels of a step, batch 128, train.compile={AUTO}, ms per step",
    "variant": "Training steps, one setting changed",
    "authors": "The authors' form of a step",
    "attention": "Peripheral attention of one layer, batch 128",
    "convolution": "Convolutions alone, batch 128",
    "exchange": "Exchange between the GPUs",
    "loader": "The loader alone",
    "pixels": "Pixels: GPU against CPU, in levels of 255",
    "test": "Tests marked gpu",
    "compile_test": "Tests of compiled code",
}
_COMPILE_TESTS = "tests/test_gpu_compile.py"
_SECONDS = {"off": 120, "blocks": 180, "model": 300, "graphs": 300}  # limits of a step's case: compiling takes most of it
_WIDTHS = 4  # of heads in each PerViT: one for each of its parts
T, S, M = "pervit_t", "pervit_s", "pervit_m"


@dataclass(frozen=True)
class Case:
    """A part of the check, run as processes of its own.

    Attributes:
        stage: one of :data:`TITLES`.
        name: unique within the stage.
        module: in this package; its ``measure`` gives the rows.
        seconds: after which it is cut.
        options: what distinguishes it from the other cases of its module; in each of its rows too.
        all_gpus: a process on each GPU, which must be two or more.
        needs_data: it reads what the stage ``data`` makes.
        variables: of its environment.
        on_cpu: likewise, in miniature on a CPU.
    """

    stage: str
    name: str
    module: str
    seconds: float
    options: Values = field(default_factory=dict)
    all_gpus: bool = False
    needs_data: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    on_cpu: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_test(self) -> bool:
        return self.module == "suite"


def cases(miniature: bool) -> Iterator[Case]:
    """All cases, or in miniature one of each kind."""
    yield Case("machine", "machine", "machine", 120)
    yield Case("data", "shards", "data", 180)
    yield Case("decode", "regions of JPEGs", "loading", 150, needs_data=True)
    if miniature:
        yield from _miniature()
        return
    # 1. How fast the models train, without the loader
    yield from (step(*each) for each in ((M, 128, AUTO), (T, 128, AUTO), (S, 128, AUTO), (M, 128, "off"), (T, 128, "off")))
    # 2. Why, and what the rest of a node does
    yield from (attention(M, width) for width in range(_WIDTHS))
    yield convolutions(M)
    yield from (loader("full recipe", place) for place in ("cpu", "gpu"))
    yield from (step(model, 128, "blocks", zero_stage, all_gpus=True) for model in (M, T) for zero_stage in (0, 1))
    yield Case("exchange", "all GPUs", "machine", 60, all_gpus=True)
    # 3. What other settings give
    yield from (step(model, 128, "blocks") for model in (M, T, S))
    yield step(S, 128, "off")
    yield from (authors(model) for model in (T, M, S))
    yield from (attention(model, width) for model in (T, S) for width in range(_WIDTHS))
    yield from (convolutions(model) for model in (T, S))
    yield from (step(model, 256, AUTO) for model in (M, T, S))
    yield from (step(model, 128, AUTO, source="loader") for model in (T, M))
    yield from (loader("crop and flip", place) for place in ("cpu", "gpu"))
    yield Case("pixels", "three recipes", "loading", 90, needs_data=True)
    yield from (step(model, 128, "model") for model in (M, T, S))
    yield from (step(model, 256, compile_) for compile_ in ("off", "blocks") for model in (M, T, S))
    yield from variants()
    yield from (step(model, 256, "model") for model in (M, T, S))
    # 4. Tests
    yield from (test(file) for file in test_files())


def _miniature() -> Iterator[Case]:
    yield step(T, 8, "off", 1, all_gpus=True)
    yield step(T, 8, "off", source="loader")
    yield authors(T, 8)
    yield attention(T, 0)
    yield convolutions(T, 2)
    yield Case("exchange", "all GPUs", "machine", 60, all_gpus=True)
    yield from (loader("full recipe", place) for place in ("cpu", "gpu"))
    yield Case("pixels", "three recipes", "loading", 90, needs_data=True)
    yield from list(variants(8))[-1:]
    yield test("tests/test_gpu.py")


def step(model: str, batch: int, compile_: str, zero_stage: int = 0, source: str = "memory", all_gpus: bool = False) -> Case:
    where = f" ZeRO {zero_stage}, all GPUs" if all_gpus else " from the loader" if source == "loader" else ""
    name = f"{model} {batch} {compile_}{where}"
    options = {"model": model, "micro_batch": batch, "compile": compile_, "zero_stage": zero_stage, "source": source}
    return Case("step", name, "steps", _SECONDS[compile_], options, all_gpus, needs_data=True)


def variants(batch: int = 128) -> Iterator[Case]:
    """Steps with one key changed, or one variable."""
    for name, model, changed, variables in (
        ("activation checkpointing", M, "train.activation_checkpointing=true", {}),
        ("attention without its kernels", M, "", {"PERVIT_ATTENTION": "plain"}),
        ("deterministic algorithms", T, "train.deterministic=true", {}),
    ):
        plain = step(model, batch, "off" if batch < 128 else "blocks")  # which recompute and repeat bit for bit, too
        told = {"name": f"{plain.name} {name}", "options": {**plain.options, "changed": changed}}
        yield replace(plain, stage="variant", variables=variables, **told)


def authors(model: str, batch: int = 128) -> Case:
    return replace(step(model, batch, "off"), stage="authors", name=f"{model} {batch}")


def attention(model: str, width: int) -> Case:
    # An error where the kernels cannot run, instead of the plain form under their name; on a CPU they are interpreted.
    kernels = {"variables": {"PERVIT_ATTENTION": "triton"}, "on_cpu": {"TRITON_INTERPRET": "1"}}
    return Case("attention", f"{model} width {width + 1}", "attention", 90, {"model": model, "width": width}, **kernels)


def convolutions(model: str, batch: int = 128) -> Case:
    return Case("convolution", f"{model} {batch}", "convolutions", 90, {"model": model, "micro_batch": batch})


def loader(recipe: str, decode: str) -> Case:
    return Case("loader", f"{recipe}, {decode}", "loading", 120, {"recipe": recipe, "decode": decode}, needs_data=True)


def test(file: str) -> Case:
    compiles = file == _COMPILE_TESTS
    return Case("compile_test" if compiles else "test", file, "suite", 600 if compiles else 240, {"file": file})


def test_files() -> list[str]:
    """The files that have tests marked gpu, that of compiled code last."""
    found = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    names = sorted(path.relative_to(REPOSITORY).as_posix() for path in found)
    return sorted((name for name in names if not name.startswith("tests/benchmarks/")), key=lambda name: name == _COMPILE_TESTS)
