"""Every family through every format: differences from the model, sizes, times to load, and speed on a CPU against ours.

    python benchmarks/export.py [MODEL ...] [--batch 8] [--rounds 5]

Models have fresh weights, moved away from their initial values, at their paper's size. Times are CPU seconds of this process with one
thread, the least of the rounds; rounds of the forms are interleaved, so that the ratios hold on a busy machine. Needs the extras onnx
and timm: timm's own ``create_model`` loads the folder of the form timm.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pipeline.exporting import FORMATS, Subject, Training, sample_images
from pipeline.inference.trained import OnnxModel
from pipeline.models import create_model, model_entry
from pipeline.models.weights.exported import Description, read_exported

MODELS = ("deit_t", "convit_ti", "pervit_t", "lsat_t_32", "lsat_t_224", "posmlp_t", "gmlp_s")
FORMS = (
    ("safetensors", "fp32"),
    ("timm", "fp32"),
    ("torch-export", "fp32"),
    ("onnx", "fp32"),
    ("onnx", "fp16"),
)


def fresh(name: str) -> Subject:
    """A model at its paper's size."""
    torch.manual_seed(0)
    its = model_entry(name)
    model = create_model(name, its.num_classes, its.image_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    classes = [str(number) for number in range(its.num_classes)]
    described = (name, its.num_classes, its.image_size, {}, classes, [0.5] * 3, [0.25] * 3, 0.9, "fp32", 0, "model", "ours")
    return Subject(model, Description(*described), Training())  # type: ignore[arg-type]


def load(form: str, file: Path) -> Callable[[Tensor], Tensor]:
    if form == "safetensors":
        return read_exported(file)[0]
    if form == "timm":
        import timm

        import pipeline.models.for_timm  # noqa: F401  # registers what timm lacks

        return timm.create_model(f"local-dir:{file}", pretrained=True).eval()
    return torch.export.load(file).module() if form == "torch-export" else OnnxModel(file, ("CPUExecutionProvider",))


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--batch", type=int, default=8, help="images per forward pass (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | format | largest difference | MB | load, s | forward pass, of ours |\n|---|---|---|---|---|---|", flush=True
    )
    for name in args.models:
        measure(fresh(name), args.batch, args.rounds)


def size_of(file: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(path.stat().st_size for path in file.rglob("*")) if file.is_dir() else file.stat().st_size


def measure(subject: Subject, batch: int, rounds: int) -> None:
    """Print the rows of a model."""
    images = sample_images(subject.description.image_size, batch)
    rows, runs = [], {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name, precision in FORMS:
            form = name if precision == "fp32" else f"{name} {precision}"
            file = Path(folder, form.replace(" ", "_") + (FORMATS[name].ending or ""))
            with torch.inference_mode(False):  # tensors made within it have no version, which PerViT asks for
                if form == "timm":
                    file.mkdir()
                FORMATS[name].function("export")(subject, file, precision)
                loading = min(seconds(lambda form=form, file=file: load(form, file)) for _ in range(2))  # type: ignore[misc]
                runs[form] = load(form, file)
            expected = subject.model(images)
            difference = ((runs[form](images) - expected).abs().max() / expected.abs().max()).item()
            rows.append((form, difference, size_of(file) / 1e6, loading))
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(rounds):
            for form, run in runs.items():
                best[form] = min(best[form], seconds(lambda run=run: run(images)))  # type: ignore[misc]
    for form, difference, size, loading in rows:
        ratio = best[form] / best["safetensors"]
        print(
            f"| {subject.description.model} | {form} | {difference:.1e} | {size:.1f} | {loading:.2f} | {ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
