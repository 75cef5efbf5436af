"""Build the DALI graphs that turn encoded images and augmentation parameters into images.

``full_graph`` runs the whole transform and is used on GPUs, in one of two forms: the decoder is given the regions, or decodes whole
images, of which the regions are then cut out. ``decoding_graph`` ends after the decoder; on a CPU the rest is faster in
:mod:`pipeline.loader.cpu_transform`. All take the same requests, and the test suite compares their pixels.

Inputs are not copied (``no_copy``): DALI reads the NumPy arrays themselves, and holds a reference to each until the batch that
they belong to is done. A source must never write into an array that it has returned.
"""

from collections.abc import Callable, Sequence

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as math
import nvidia.dali.types as types
from nvidia.dali import Pipeline, pipeline_def
from nvidia.dali.data_node import DataNode

from pipeline.augment import BatchRequest, PixelAugmentation
from pipeline.augment.crop import CROP_PAD, resize_borders
from pipeline.loader.batches import Batches

REGIONS, WHOLE = "regions", "whole"  # what the decoder of a full graph is asked for
Source = Callable[[], tuple]
_TYPES = {np.bool_: types.BOOL, np.uint8: types.UINT8, np.int32: types.INT32, np.float32: types.FLOAT}
_WINDOW = (np.uint8, 1), (np.int32, 1), (np.int32, 1)  # type and dimensions of jpegs, start, shape
# Of resize, borders of rows and columns, crop_y, crop_x, flip, and where filters are chosen, that of the resize.
_PIXELS = (np.float32, 1), (np.float32, 2), (np.float32, 2), (np.float32, 0), (np.float32, 0), (np.int32, 0)
_FILTER = ((np.int32, 0),)
_CUBIC, _LINEAR = (kind.value for kind in (types.INTERP_CUBIC, types.INTERP_LINEAR))


def window_inputs(images: list, request: BatchRequest) -> tuple:
    """The inputs of :func:`decoding_graph`: B encoded images, (bytes,) uint8 each, and start and shape of their windows."""
    return images, request.geometry.start, request.geometry.shape


def full_inputs(images: list, request: BatchRequest) -> tuple:
    """The inputs of :func:`full_graph`: those of :func:`decoding_graph`, resize, crop, flip, a chosen filter, the augmentations'."""
    geometry = request.geometry
    bilinear = None if request.bilinear is None else request.bilinear[:, 0]
    pixels = geometry.resize, *resize_borders(geometry, bilinear), *geometry.crop.T.copy(), geometry.flip
    filters = () if bilinear is None else (np.where(bilinear, _LINEAR, _CUBIC).astype(np.int32),)
    drawn = (values for augmentation in request.of_pixels for values in augmentation.graph_inputs(request))
    return *window_inputs(images, request), *pixels, *filters, *drawn


def decoding_graph(source: Source, batch_size: int, num_threads: int, prefetch: int) -> Pipeline:
    """Decode windows on the CPU: a built pipeline with one output, B RGB images, (h, w, 3) uint8 each.

    ``source`` is called once per batch, ahead of time, and returns :func:`window_inputs`.
    """

    def graph() -> DataNode:
        jpegs, start, shape = _inputs(source, _WINDOW)
        return _decode_window(jpegs, start, shape, "cpu", REGIONS)

    return _built(graph, batch_size, None, num_threads, prefetch, branches=False)


def full_graph(
    source: Source, batches: Batches, device_id: int | None, num_threads: int, prefetch: int, form: str = REGIONS
) -> Pipeline:
    """Decode, resize, crop, flip, augment: a built pipeline with one output, (B, S, S, 3) uint8 on a CUDA device, or the CPU.

    ``source`` is called once per batch, ahead of time, and returns :func:`full_inputs`. ``form`` is REGIONS or WHOLE.
    """
    size, pad = batches.image_size, CROP_PAD
    filters = _FILTER if batches.chosen_filters else ()
    augmentations = [augmentation for augmentation in batches.augmentations if isinstance(augmentation, PixelAugmentation)]
    drawn = [kind for augmentation in augmentations for kind in augmentation.graph_types]

    def graph() -> DataNode:
        inputs = _inputs(source, (*_WINDOW, *_PIXELS, *filters, *drawn))
        jpegs, start, shape, resize, rows, columns, crop_y, crop_x, flip, *more = inputs
        images = _decode_window(jpegs, start, shape, "cpu" if device_id is None else "mixed", form)
        filter_ = fn.reinterpret(more.pop(0), dtype=types.INTERP_TYPE) if filters else types.INTERP_CUBIC
        # As in Pillow, columns first, rounded to 8 bits before the rows: in one step, DALI keeps floats beyond 0 and 255.
        images = _resize_axis(images, fn.stack(fn.cast(shape[0], dtype=types.FLOAT), resize[1]), columns, filter_, axis=1)
        images = _resize_axis(images, resize, rows, filter_, axis=0)
        if batches.pad_mode == "constant":
            whole = {"start": [-pad, -pad], "end": fn.cast(resize, dtype=types.INT32) + pad}
            images = fn.slice(images, **whole, axis_names="HW", out_of_bounds_policy="pad", fill_values=0)
        elif batches.pad_mode:
            images = _mirror_borders(_mirror_borders(images, pad, axis=0), pad, axis=1)
        images = fn.crop(images, crop=(size, size), crop_pos_y=crop_y, crop_pos_x=crop_x)
        images = fn.flip(images, horizontal=flip)
        for augmentation in augmentations:
            own, more = more[: len(augmentation.graph_types)], more[len(augmentation.graph_types) :]
            images = augmentation.in_graph(images, *own)
        return images

    return _built(graph, batches.batch_size, device_id, num_threads, prefetch)


def _built(
    graph: Callable[[], DataNode], batch_size: int, device_id: int | None, threads: int, prefetch: int, branches: bool = True
) -> Pipeline:
    """``branches``: whether the graph has an ``if`` for each image, for which DALI translates its Python code, a fifth of a start."""
    settings = {"batch_size": batch_size, "device_id": device_id, "num_threads": threads, "prefetch_queue_depth": prefetch}
    pipeline: Pipeline = pipeline_def(graph, enable_conditionals=branches, **settings)()
    pipeline.build()
    return pipeline


def _inputs(source: Source, kinds: tuple[tuple[type, int], ...]) -> Sequence[DataNode]:
    dtypes, dims = zip(*kinds)
    types_ = [_TYPES[dtype] for dtype in dtypes]
    return fn.external_source(source=source, num_outputs=len(kinds), batch=True, no_copy=True, dtype=types_, ndim=list(dims))


def _mirror_borders(images: DataNode, pad: int, axis: int) -> DataNode:
    """Images (h, w, 3) with ``pad`` more pixels at both ends of an axis, mirrored at the border, whose own are not repeated."""
    if axis == 0:
        before, after = images[1 : 1 + pad], images[-1 - pad : -1]
    else:
        before, after = images[:, 1 : 1 + pad], images[:, -1 - pad : -1]
    before, after = (fn.flip(part, horizontal=axis, vertical=1 - axis) for part in (before, after))
    return fn.cat(before, images, after, axis=axis)


def _resize_axis(
    images: DataNode, size: DataNode, borders: DataNode, filter_: DataNode | types.DALIInterpType, axis: int
) -> DataNode:
    """Resize images (h, w, 3) uint8 to ``size`` (rows, columns) along one axis by an antialiased filter, rounded to uint8.

    ``borders`` are the :func:`~pipeline.augment.crop.border_weights` along the axis.
    """
    resized = fn.resize(images, size=size, interp_type=filter_, antialias=True, dtype=types.FLOAT)
    first, last = (images[0:1], images[-1:]) if axis == 0 else (images[:, 0:1], images[:, -1:])
    if images.device == "gpu":
        borders = borders.gpu()
    at_start, at_end = (fn.reshape(borders[k], shape=[-1, 1, 1] if axis == 0 else [1, -1, 1]) for k in (0, 1))
    resized = resized + at_start * (resized - first) + at_end * (resized - last)
    levels = fn.cast(math.floor(math.clamp(resized + 0.5, 0.0, 255.0)), dtype=types.UINT8)
    return fn.reinterpret(levels, layout="HWC")  # arithmetic may drop the layout


def _decode_window(jpegs: DataNode, start: DataNode, shape: DataNode, device: str, form: str) -> DataNode:
    settings = {
        "device": device,
        "output_type": types.RGB,
        "adjust_orientation": False,  # EXIF is ignored, as in Pillow and thus in the papers' pipelines
        "jpeg_fancy_upsampling": True,  # on a GPU too, colour is interpolated: nearly all JPEGs store a quarter of its pixels
    }
    window = {"start": start, "shape": shape, "axis_names": "HW"}
    if form == WHOLE:
        return fn.slice(fn.decoders.image(jpegs, **settings), **window)
    return fn.decoders.image_slice(jpegs, **settings, **window)
