"""Measure images per second in inference: on one device, of images in its memory, as the papers do.

  pervit throughput pervit_t convit_s deit_s
  pervit throughput pervit_m --batch-size 256 --image-size 384 --json FILE

The median of batches for two seconds after a warm-up, with fresh weights, in fp32 and, where the device has it, in bf16 as evaluations do.
paper: ConViT's Table 1 is of a Quadro GP100 and batches of 128, LSAT's Tables 3 and 4 of a GPU that they do not name.
"""

from pathlib import Path
from typing import Any

from pipeline import models
from pipeline.command_line import begins_anew, command_parser, run_command
from pipeline.config import ModelConfig, load_config
from pipeline.config.tables import ABLATIONS
from pipeline.files import check_writable, write_json
from pipeline.models.registry import check_name
from pipeline.terminal import Stage

_BATCH, _CPU_BATCH = 128, 8  # ConViT's Table 1 has 128
_WARM_UP, _CPU_WARM_UP, _SECONDS = 10, 1, 2.0


@begins_anew
def main() -> None:
    parser = command_parser("pipeline.throughput", __doc__)
    add = parser.add_argument
    named = "as `pervit models` lists them, timm:NAME, or a row of a table, ablations/NAME"
    add("models", nargs="+", metavar="MODEL", help=named)
    add("--batch-size", type=int, help=f"images per forward pass (default: {_BATCH}; on a CPU {_CPU_BATCH})")
    add("--image-size", type=int, help="in pixels (default: that of the model's paper)")
    add("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    given = {name: load_config(name).model if name.startswith(ABLATIONS) else ModelConfig(name=name) for name in args.models}
    for model in given.values():
        check_name(model.name)
    from pipeline.cluster.rendezvous import disconnect, init_world  # imported late: PyTorch takes seconds

    device = init_world().device
    with Stage(f"measuring {', '.join(args.models)}"):
        rows = [measure(model, args.batch_size, args.image_size, device) for model in given.values()]
    disconnect()
    print(f"{'model':<14} {'size':>5} {'params M':>8} {'batch':>5} {'fp32':>9} {'bf16':>9} {'paper':>9}  images/s")
    for row in rows:
        rates = (f"{row[key]:>9,.1f}" if row[key] else f"{'':>9}" for key in ("fp32", "bf16", "paper"))
        print(f"{row['model']:<14} {row['image_size']:>5} {row['params'] / 1e6:>8.1f} {row['batch_size']:>5} {' '.join(rates)}")
    print(rows[0]["device"])
    write_json(args.json, rows)


def measure(config: ModelConfig, batch_size: int | None, image_size: int | None, device: Any) -> dict[str, Any]:
    """Images per second of a model by precision, None where it would be emulated, and the paper's at its image size."""
    import torch
    from torch.utils.benchmark import Timer

    from pipeline.hardware import native_bf16
    from pipeline.step.precision import autocast

    name, switches = config.name, config.switches
    entry, on_cpu, threads = models.model_entry(name), device.type == "cpu", torch.get_num_threads()
    size, batch = image_size or entry.image_size, batch_size or (_CPU_BATCH if on_cpu else _BATCH)
    given: dict[str, Any] = {"model": models.create_model(name, entry.num_classes, size, switches=switches).to(device).eval()}
    given["images"] = torch.randn(batch, 3, size, size, device=device)
    rates: dict[str, float | None] = {"fp32": None, "bf16": None}
    for precision in rates if native_bf16(device)[0] else ["fp32"]:
        with torch.inference_mode(), autocast(device, precision):
            timer = Timer("model(images)", globals=given, num_threads=threads)
            timer.timeit(_CPU_WARM_UP if on_cpu else _WARM_UP)
            rates[precision] = batch / timer.blocked_autorange(min_run_time=_SECONDS).median
    params = sum(parameter.numel() for parameter in given["model"].parameters())
    about = {"model": name, "switches": switches, "image_size": size, "params": params, "batch_size": batch, **rates}
    named = f"a CPU, {threads} threads" if on_cpu else torch.cuda.get_device_name(device)
    paper = entry.paper_speed if size == entry.image_size else None
    return {**about, "paper": paper, "device": named, "torch": torch.__version__}


if __name__ == "__main__":
    run_command(main)
