"""GPU memory of the data loader: finished batches, and DALI's buffers where it decodes on the GPU. An estimate, not a trace."""

from __future__ import annotations

from pipeline.config import Config

# Of ImageNet: images of 500 x 375 pixels on average, of which a random crop takes 54 % (crop_scale 0.08 to 1).
_WINDOW = 0.54 * 500 * 375
_STAGES = 4  # float32 images that the two resizes of dali_graph have at once: the result, its border corrections, the sum
_NVJPEG = 32 * 2**20  # bytes of a decoder thread's buffers on the device
_THREADS = 8  # where data.num_threads leaves it to the node


def loader_bytes(config: Config, on_gpu: bool = True) -> int:
    """Bytes on the training device of both loaders, which live as long as the run: training and evaluation.

    Args:
        config: batch sizes, image size, where images are decoded.
        on_gpu: the device is a GPU; on a CPU, PyTorch's allocator has the finished batches only.
    """
    side, batches = config.model.image_size, (config.train.micro_batch, config.eval.batch_size)
    decodes = on_gpu and config.data.decode != "cpu"
    return sum(_finished(config, size, side) + (_decoding(config, size, side) if decodes else 0) for size in batches)


def _finished(config: Config, size: int, side: int) -> int:
    """``data.prefetch`` normalized float32 batches, and one in the making with its uint8 pixels."""
    pixels = size * 3 * side * side
    return 4 * pixels * (config.data.prefetch + 1) + pixels


def _decoding(config: Config, size: int, side: int) -> int:
    rows = _WINDOW**0.5  # of a window that is a square
    resizes = _STAGES * 4 * 3 * (rows * side + side * side)
    outputs = config.data.prefetch * 3 * side * side
    return int(size * (3 * _WINDOW + resizes + outputs)) + (config.data.num_threads or _THREADS) * _NVJPEG
