"""The DALI graphs: from encoded images and augmentation parameters to images.

``full_graph`` runs the whole transform and is used on GPUs. ``decoding_graph`` ends after the decoder; on a CPU the rest is
faster in :mod:`pipeline.data.cpu_transform`. Both take the same requests, and the test suite compares their pixels.

Inputs are not copied (``no_copy``): DALI reads the NumPy arrays themselves, and holds a reference to each until the batch that
they belong to is done. A source must never write into an array that it has returned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as math
import nvidia.dali.types as types
from nvidia.dali import Pipeline, pipeline_def
from nvidia.dali.data_node import DataNode

from pipeline.data.augment import randaugment_dali, three_augment
from pipeline.data.augment.gaussian_blur import blur_images, box_weights
from pipeline.data.augment.randaugment import fill_color
from pipeline.data.augment.resize_borders import resize_borders
from pipeline.data.batches import BatchRequest

Source = Callable[[], tuple]
_WINDOW_TYPES = [types.UINT8, types.INT32, types.INT32]  # jpegs, start, shape
_PIXEL_TYPES = [*[types.FLOAT] * 5, types.INT32]  # resize, borders of rows and columns, crop_y, crop_x, flip
_FILTER_TYPES = [types.INT32]  # of the resize
_OP_TYPES = [types.INT32, types.FLOAT, types.FLOAT, types.FLOAT]  # op, amount, matrix, bilinear
_OP_DIMS = [1, 1, 3, 1]
_THREE_TYPES, _THREE_DIMS = [types.FLOAT, types.FLOAT, types.INT32, types.FLOAT], [0, 2, 1, 1]  # blur, its weights, op, amount
_CUBIC, _LINEAR = (kind.value for kind in (types.INTERP_CUBIC, types.INTERP_LINEAR))


def window_inputs(images: list, request: BatchRequest) -> tuple:
    """The inputs of :func:`decoding_graph`: B encoded images, (bytes,) uint8 each, and start and shape of their windows."""
    return images, request.geometry.start, request.geometry.shape


def full_inputs(images: list, request: BatchRequest, image_size: int) -> tuple:
    """The inputs of :func:`full_graph`: those of :func:`decoding_graph`, resize, crop, flip, a chosen filter, RandAugment's or 3-Augment's if on."""
    geometry, interpolation = request.geometry, request.interpolation
    bilinear = None if interpolation is None else interpolation.crop
    pixels = geometry.resize, *resize_borders(geometry, bilinear), *geometry.crop.T.copy(), geometry.flip
    filters: tuple = ()
    if interpolation is not None:
        filters = (np.where(interpolation.crop, _LINEAR, _CUBIC).astype(np.int32),)
    ops: tuple = ()
    if request.blur is not None and request.ops is not None:
        ops = request.blur, box_weights(request.blur), request.ops.op, request.ops.amount
    elif request.ops is not None:
        fed = randaugment_dali.graph_inputs(request.ops, image_size)
        ops = fed.op, fed.amount, fed.matrix
        if interpolation is not None:
            ops += (interpolation.ops.astype(np.float32),)
    return *window_inputs(images, request), *pixels, *filters, *ops


def decoding_graph(source: Source, batch_size: int, num_threads: int, prefetch: int) -> Pipeline:
    """Decode windows on the CPU.

    Args:
        source: called once per batch, ahead of time; returns :func:`window_inputs`, which DALI does not copy: the arrays must
            live, unchanged, until the batch is returned.
        batch_size: B.
        num_threads: CPU threads.
        prefetch: depth of DALI's prefetch queue, in batches.

    Returns:
        A built pipeline with one output: B RGB images, (h, w, 3) uint8 each.
    """

    @pipeline_def(batch_size=batch_size, num_threads=num_threads, device_id=None, prefetch_queue_depth=prefetch)
    def graph() -> DataNode:
        jpegs, start, shape = fn.external_source(
            source=source, num_outputs=3, batch=True, dtype=_WINDOW_TYPES, ndim=[1, 1, 1], no_copy=True
        )
        return _decode_window(jpegs, start, shape, device="cpu")

    return _built(graph())


def full_graph(
    source: Source,
    batch_size: int,
    image_size: int,
    mean: tuple[float, float, float],
    device_id: int | None,
    num_threads: int,
    prefetch: int,
    rand_augment_ops: int = 0,
    chosen_filters: bool = False,
    three_augment_on: bool = False,
    crop_pad: int = 0,
) -> Pipeline:
    """Decode, resize, crop, flip, RandAugment or 3-Augment.

    Args:
        source: called once per batch, ahead of time; returns :func:`full_inputs`.
        batch_size: B.
        image_size: S, side of the output.
        mean: per RGB channel, of pixels in [0, 1]: RandAugment's colour outside the image.
        device_id: CUDA device that decodes and transforms; None: the CPU.
        num_threads: CPU threads.
        prefetch: depth of DALI's prefetch queue, in batches.
        rand_augment_ops: RandAugment operations per image.
        chosen_filters: the requests say which images are interpolated bilinearly; else all are bicubic.
        three_augment_on: the requests have 3-Augment's blur and operations.
        crop_pad: ``Geometry.pad`` of the requests, pixels.

    Returns:
        A built pipeline with one output: (B, S, S, 3) uint8 on the device.
    """
    op_inputs = 0 if not rand_augment_ops else 4 if chosen_filters else 3
    more_types = [
        *(_FILTER_TYPES if chosen_filters else []),
        *_OP_TYPES[:op_inputs],
        *(_THREE_TYPES if three_augment_on else []),
    ]
    more_dims = [*([0] if chosen_filters else []), *_OP_DIMS[:op_inputs], *(_THREE_DIMS if three_augment_on else [])]

    @pipeline_def(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
        enable_conditionals=True,
    )
    def graph() -> DataNode:
        jpegs, start, shape, resize, rows, columns, crop_y, crop_x, flip, *more = fn.external_source(
            source=source,
            num_outputs=9 + len(more_types),
            batch=True,
            no_copy=True,
            dtype=[*_WINDOW_TYPES, *_PIXEL_TYPES, *more_types],
            ndim=[1, 1, 1, 1, 2, 2, 0, 0, 0, *more_dims],
        )
        images = _decode_window(jpegs, start, shape, device="cpu" if device_id is None else "mixed")
        filter_ = fn.reinterpret(more.pop(0), dtype=types.INTERP_TYPE) if chosen_filters else types.INTERP_CUBIC
        # As in Pillow, columns first, rounded to 8 bits before the rows: in one step, DALI keeps floats beyond 0 and 255.
        images = _resize_axis(images, fn.stack(fn.cast(shape[0], dtype=types.FLOAT), resize[1]), columns, filter_, axis=1)
        images = _resize_axis(images, resize, rows, filter_, axis=0)
        if crop_pad:
            images = _mirror_borders(_mirror_borders(images, crop_pad, axis=0), crop_pad, axis=1)
        images = fn.crop(images, crop=(image_size, image_size), crop_pos_y=crop_y, crop_pos_x=crop_x)
        images = fn.flip(images, horizontal=flip)
        if rand_augment_ops:
            op, amount, matrix, *bilinear = more
            images = randaugment_dali.augment(
                images, op, amount, matrix, rand_augment_ops, image_size, fill_color(mean), *bilinear
            )
        if three_augment_on:
            images = three_augmented(images, *more)
        return images

    return _built(graph())


def three_augmented(images: DataNode, blur: DataNode, weights: DataNode, op: DataNode, amount: DataNode) -> DataNode:
    """3-Augment, within a ``pipeline_def`` with ``enable_conditionals=True``.

    Args:
        images: (S, S, 3) uint8 with layout HWC, on the CPU or the GPU.
        blur: () float32 on the CPU, standard deviation in pixels; 0: none.
        weights: (2, TAPS) float32 on the CPU, of :func:`~pipeline.data.augment.gaussian_blur.box_weights`.
        op, amount: (LAYERS,) on the CPU, of :class:`~pipeline.data.augment.three_augment.ThreeAugment`.
    """
    if blur > 0:
        images = blur_images(images, weights)
    return randaugment_dali.recolor(images, op, amount, three_augment.LAYERS)


def _mirror_borders(images: DataNode, pad: int, axis: int) -> DataNode:
    """Images (h, w, 3) with ``pad`` more pixels at both ends of an axis, mirrored at the border, whose own are not repeated."""
    if axis == 0:
        before, after = (
            fn.flip(images[1 : 1 + pad], horizontal=0, vertical=1),
            fn.flip(images[-1 - pad : -1], horizontal=0, vertical=1),
        )
    else:
        before, after = fn.flip(images[:, 1 : 1 + pad]), fn.flip(images[:, -1 - pad : -1])
    return fn.cat(before, images, after, axis=axis)


def _resize_axis(
    images: DataNode, size: DataNode, borders: DataNode, filter_: DataNode | types.DALIInterpType, axis: int
) -> DataNode:
    """Resize images (h, w, 3) uint8 along one axis by an antialiased filter, rounded to uint8.

    Args:
        images: on the CPU or the GPU.
        size: (2,) rows and columns of the result, as many as now along the other axis.
        borders: :func:`~pipeline.data.augment.resize_borders.border_weights` along the axis.
        filter_: cubic or linear, of all images or of each.
        axis: 0 rows, 1 columns.
    """
    resized = fn.resize(images, size=size, interp_type=filter_, antialias=True, dtype=types.FLOAT)
    first, last = (images[0:1], images[-1:]) if axis == 0 else (images[:, 0:1], images[:, -1:])
    if images.device == "gpu":
        borders = borders.gpu()
    at_start, at_end = (fn.reshape(borders[k], shape=[-1, 1, 1] if axis == 0 else [1, -1, 1]) for k in (0, 1))
    resized = resized + at_start * (resized - first) + at_end * (resized - last)
    levels = fn.cast(math.floor(math.clamp(resized + 0.5, 0.0, 255.0)), dtype=types.UINT8)
    return fn.reinterpret(levels, layout="HWC")  # arithmetic may drop the layout


def _decode_window(jpegs: DataNode, start: DataNode, shape: DataNode, device: str) -> DataNode:
    # EXIF orientation is ignored, as in Pillow and thus in the papers' pipelines.
    return fn.decoders.image_slice(
        jpegs,
        device=device,
        output_type=types.RGB,
        start=start,
        shape=shape,
        axis_names="HW",
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,  # on a GPU too, colour is interpolated: nearly all JPEGs store a quarter of its pixels
    )


def _built(pipeline: Pipeline) -> Pipeline:
    pipeline.build()
    return pipeline
