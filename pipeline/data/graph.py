"""The DALI graph: encoded JPEGs and numbers in, normalized images out. One graph for training and evaluation,
for GPU and CPU."""

from __future__ import annotations

from collections.abc import Callable

import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import Pipeline, pipeline_def


def build_pipeline(
    source: Callable[[], tuple],
    batch_size: int,
    image_size: int,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    device_id: int | None,
    num_threads: int,
    prefetch: int,
) -> Pipeline:
    """Build the graph.

    Args:
        source: called once per batch, ahead of time; returns (jpegs, start, shape, resize, crop_y, crop_x, flip): B uint8
            arrays and the fields of :class:`~pipeline.data.augment.Geometry`.
        batch_size: B.
        image_size: side of the output.
        mean, std: per RGB channel, of pixels on [0, 1].
        device_id: CUDA device for decoding and everything after it; None: the same graph on the CPU.
        num_threads: CPU threads.
        prefetch: batches made ahead.

    Returns:
        A built pipeline with one output: float32 (B, 3, image_size, image_size) on the device.
    """

    @pipeline_def(batch_size=batch_size, num_threads=num_threads, device_id=device_id, prefetch_queue_depth=prefetch)
    def graph():
        jpegs, start, shape, resize, crop_y, crop_x, flip = fn.external_source(
            source=source,
            num_outputs=7,
            batch=True,
            dtype=[types.UINT8, types.INT32, types.INT32, types.FLOAT, types.FLOAT, types.FLOAT, types.INT32],
            ndim=[1, 1, 1, 1, 0, 0, 0],
        )
        # Decodes the window only. EXIF orientation is ignored, as Pillow and thus the papers' pipelines do.
        images = fn.decoders.image_slice(
            jpegs,
            device="cpu" if device_id is None else "mixed",
            output_type=types.RGB,
            start=start,
            shape=shape,
            axis_names="HW",
            adjust_orientation=False,
        )
        images = fn.resize(images, size=resize, interp_type=types.INTERP_CUBIC, antialias=True)
        # Colour and geometric augmentation (RandAugment) has its place here, on uint8 HWC images.
        return fn.crop_mirror_normalize(
            images,
            crop=(image_size, image_size),
            crop_pos_y=crop_y,
            crop_pos_x=crop_x,
            mirror=flip,
            mean=[255 * value for value in mean],
            std=[255 * value for value in std],
            dtype=types.FLOAT,
            output_layout="CHW",
        )

    pipeline = graph()
    pipeline.build()
    return pipeline
