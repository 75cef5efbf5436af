"""RandAugment, operation by operation: difference from Pillow's result, and CPU time.

    python benchmarks/randaugment_parity.py --images FOLDER [--count 64] [--device gpu] [--rounds 7]

FOLDER holds <wnid>/*.JPEG. Differences are in levels of 255, over all amounts that the tests use. Times are for the amounts
that "rand-m9-mstd0.5-inc1" draws, in CPU ms per image on one thread, from array to array; Pillow is called as timm calls it.
Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from pipeline.augment.randaugment import UNIFORMS_PER_LAYER, Op, Ops, RandAugment, affine_matrices  # noqa: E402
from pipeline.augment.randaugment.dali import augment  # noqa: E402
from pipeline.stream.philox import Stream, uniforms  # noqa: E402
from support.randaugment_reference import AMOUNTS, FILL, SIZE, apply, photographs, reference  # noqa: E402


def graph_results(images: list[np.ndarray], op: Op, amount: float, device: str) -> list[np.ndarray]:
    """One operation in DALI."""
    batch = len(images)
    ops = Ops(np.full((batch, 1), op, np.int32), np.full((batch, 1), amount, np.float32))
    matrices = affine_matrices(ops, SIZE)

    @pipeline_def(
        batch_size=batch,
        num_threads=1,
        device_id=0 if device == "gpu" else None,
        enable_conditionals=True,
        prefetch_queue_depth=1,
    )
    def graph():
        pixels = fn.external_source(source=lambda: np.stack(images), batch=True, layout="HWC", device=device)
        numbers = fn.external_source(source=lambda: (ops.op, ops.amount, matrices), num_outputs=3, batch=True)
        return augment(pixels, *numbers, 1, SIZE, FILL)

    pipeline = graph()
    pipeline.build()
    (output,) = pipeline.run()
    return list(np.array(output.as_cpu().as_array()))


def differences(results: list[np.ndarray], expected: list[np.ndarray]) -> tuple[int, float]:
    """Largest and mean, in levels."""
    difference = np.abs(np.stack(results).astype(np.int16) - np.stack(expected))
    return int(difference.max()), float(difference.mean())


def milliseconds(work: Callable[[], object], images: int) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) / images * 1e3


def medians(works: dict[str, Callable[[], object]], images: int, rounds: int) -> dict[str, float]:
    """CPU ms per image of each, after a warm-up round."""
    times = [{name: milliseconds(work, images) for name, work in works.items()} for _ in range(rounds + 1)][1:]
    return {name: statistics.median(row[name] for row in times) for name in works}


def pillow_layers(image: np.ndarray, ops: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    picture = Image.fromarray(image)
    for op, amount in zip(ops, amounts):
        picture = picture if op == Op.NOTHING else reference(picture, Op(op), float(amount))
    return np.asarray(picture)


def times_of(images: list[np.ndarray], op: np.ndarray, amount: np.ndarray, rounds: int) -> dict[str, float]:
    """Pillow and ours on the same images and (B, layers) operations."""
    works = {
        "pillow": lambda: [pillow_layers(*row) for row in zip(images, op, amount)],
        "ours": lambda: [apply(*row, FILL) for row in zip(images, op, amount)],
    }
    return medians(works, len(images), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where DALI's graph runs")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    pictures = photographs(args.images, args.count)
    images = [np.asarray(picture) for picture in pictures]
    count = 20_000
    numbers = uniforms(Stream.RAND_AUGMENT, 0, np.zeros(count), np.arange(count), 2 * UNIFORMS_PER_LAYER)
    drawn = RandAugment(image_size=SIZE).sample(numbers)

    print("| operation | CPU: max | mean | DALI: max | mean | Pillow, ms | ours on the CPU, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for op, amounts in AMOUNTS.items():
        on_cpu, in_graph = [], []
        for amount in np.float32(amounts):
            expected = [np.asarray(reference(picture, op, float(amount))) for picture in pictures]
            ours = [apply(image, np.array([op]), np.array([amount]), FILL) for image in images]
            on_cpu.append(differences(ours, expected))
            in_graph.append(differences(graph_results(images, op, amount, args.device), expected))
        typical = drawn.amount[drawn.op == op][: len(images), None]
        ms = times_of(images, np.full_like(typical, op, dtype=np.int32), typical, args.rounds)
        cells = [f"{max(row[0] for row in rows)} | {np.mean([row[1] for row in rows]):.4f}" for rows in (on_cpu, in_graph)]
        name = op.name.lower().replace("_", " ")
        print(f"| {name} | {cells[0]} | {cells[1]} | {ms['pillow']:.2f} | {ms['ours']:.2f} | {ms['ours'] / ms['pillow']:.2f} |")
    many = (images * -(-512 // len(images)))[:512]
    ms = times_of(many, drawn.op[:512], drawn.amount[:512], args.rounds)
    whole = f"{ms['pillow']:.2f} | {ms['ours']:.2f} | {ms['ours'] / ms['pillow']:.2f} |"
    print(f"| rand-m9-mstd0.5-inc1 as drawn, per image | | | | | {whole}")


if __name__ == "__main__":
    main()
