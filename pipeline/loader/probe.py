"""Try whether this GPU decodes images as the CPU does, in a process of its own, before a run relies on it.

nvImageCodec 0.9.0, which DALI 2.4 requires, is reported to fail where it decodes regions of ordinary JPEGs: with SIGSEGV on H100 and
B200, with an error on A100, GB200 and GB300 (https://github.com/NVIDIA/nvImageCodec/issues/55). In a training the one would end it,
start after start, and the other would blame the images. So a child process takes images of the set through the graph for GPUs. If it
crashes, hangs, fails or gives other pixels, it is asked for whole images, of which the regions are cut afterwards; if that fails too,
the CPU decodes. The verdict is remembered in the user's cache folder for this kind of GPU, its driver and the versions of the decoder.
"""

import hashlib
import io
import json
import logging
import os
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pipeline.cluster.host import this_node
from pipeline.cluster.world import World
from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError, exit_reason, first_line
from pipeline.files import make_private, replace_text, user_cache
from pipeline.loader import dali_graph
from pipeline.loader.batches import TrainBatches
from pipeline.loader.cpu_transform import Finisher
from pipeline.loader.dali_graph import REGIONS, WHOLE
from pipeline.loader.decoder import CPU, Decoder
from pipeline.loader.device_stream import DeviceStream
from pipeline.loader.loader import GPU, decoding_device
from pipeline.loader.reader import BadSamples, Reader, cause, is_of_decoder
from pipeline.stream.samples import Samples
from pipeline.terminal import Stage

PROGRAM = (sys.executable, "-m", "pipeline.loader.probe")
FORMS = (REGIONS, WHOLE, CPU)  # the best first
_TIMEOUT = 120.0  # seconds for each form: imports from a slow file system, a CUDA context, three batches
_BATCHES, _BATCH, _SIZE = 3, 32, 224  # images in a batch; side of the output in pixels
# Mean difference in levels of 255: of all images, of each. On ImageNet, pixels of decoders that are right differ by 0.8 and 2.5 (one
# that does not interpolate colour), 1.2 and 2.1 (one with another inverse DCT); regions that are one pixel off by 11 and 45.
_ALL_DIFFER, _ONE_DIFFERS = 2.0, 5.0
_DECODER = re.compile(r"nvidia[-_](dali|nvimgcodec|nvjpeg\b)")  # packages
DRIVER = Path("/proc/driver/nvidia/version")
_FAILED = "failed with "
_given_up: "dict[torch.device, Verdict]" = {}  # what has failed in this process is not tried again by it
_warn_once = cache(logging.getLogger(__name__).warning)  # by its text


class Verdict(NamedTuple):
    form: str  # what a GPU can be asked to decode: "regions" or "whole" images; "cpu": it cannot decode
    reason: str = ""  # a sentence about what has failed; empty for regions


def usable_decoding(decode: str, shards: Samples, world: World) -> tuple[str, str]:
    """Settle how the images of a set are decoded, all ranks alike; the first rank of each node and kind of GPU tries it.
    Collective. Returns ``decode``, or "cpu" where a GPU cannot decode, of which rank 0 warns; and the form in which one can,
    REGIONS or WHOLE. Raises UserError: as :func:`~pipeline.loader.loader.decoding_device`. ``decode``: "gpu", "cpu" or "auto".
    """
    if decoding_device(decode, world.device) != GPU:
        return decode, REGIONS
    here = [this_node(), torch.cuda.get_device_name(world.device)]
    everywhere = world.gather(here)
    own = None
    with Stage("trying the GPU's image decoder", world.is_main):
        if everywhere.index(here) == world.rank:
            own = _given_up.get(world.device) or decoding_verdict(shards, world.device)
            if own.form == CPU:
                _given_up[world.device] = own
        verdict = agreed(own, world)
    if world.is_main and verdict.reason:
        _warn_once(verdict.reason)
    return (CPU, REGIONS) if verdict.form == CPU else (decode, verdict.form)


def agreed(own: Verdict | None, world: World) -> Verdict:
    """The worst verdict of all ranks, some of which have none. Collective."""
    return max((Verdict(*each) for each in world.gather(own) if each), key=lambda verdict: FORMS.index(verdict.form))


def decoding_verdict(
    shards: Samples, device: torch.device, program: Sequence[str] = PROGRAM, timeout: float = _TIMEOUT
) -> Verdict:
    """Find out, or remember, in which form a device decodes images of a set. Takes some 10 seconds; at most ``timeout`` for
    each form. ``device``: with an index; the CPU decodes in either form. ``program``: gets the form and the device as
    arguments, batches from stdin, and writes their pixels to stdout: :func:`answer`."""
    config, augment = DataConfig(), AugmentConfig()
    sizes = {"image_size": _SIZE, "global_batch_size": _BATCH, "batch_size": _BATCH}
    batches = TrainBatches(shards=shards, seed=0, data=config, augment=augment, **sizes)
    about = _about(batches, device)
    place = _place(about)
    with suppress(OSError, ValueError, TypeError):  # there is no verdict of an earlier start, or the file is damaged
        known, reason = json.loads(place.read_bytes()) if place else (None, None)
        if known in FORMS and isinstance(reason, str):
            return Verdict(known, reason)
    try:
        question, expected = _question(batches)
    except UserError as error:  # the loader will meet it too, and knows what to do
        return Verdict(CPU, f"the CPU decodes images: there are none to try the GPU with ({first_line(error)})")
    faults: dict[str, str] = {}
    for form in FORMS:
        fault = "" if form == CPU else _fault([*program, form, str(device)], question, expected, timeout)
        if not fault:
            break
        faults[form] = fault
    # A GPU that lacks memory now, or libraries that do not load, say nothing of the next start.
    lasting = all(is_of_decoder(fault) or not fault.startswith(_FAILED) for fault in faults.values())
    verdict = Verdict(form, _sentence(form, faults, about, lasting, place))
    if lasting and place:
        with suppress(OSError):  # then the next start tries again
            replace_text(place, json.dumps(verdict))
    return verdict


def answer(form: str, device: str) -> None:
    """The program: take the batches of stdin through the graph of a form, and write their pixels, (n, S, S, 3) uint8, to stdout."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is half expected
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print
    batches, asked = pickle.load(sys.stdin.buffer)  # of the parent alone
    feed = cycle([dali_graph.full_inputs(images, request) for images, request in asked])
    graph = dali_graph.full_graph(lambda: next(feed), batches, torch.device(device).index, num_threads=2, prefetch=2, form=form)
    pixels = io.BytesIO()
    np.save(pixels, np.concatenate([np.array(graph.run()[0].as_cpu().as_tensor()) for _ in asked]))
    with open(stdout, "wb") as file:
        file.write(pixels.getbuffer())


def _question(batches: TrainBatches) -> tuple[bytes, np.ndarray]:
    """Batches for the program, and the pixels that the CPU makes of them. Raises UserError: no image can be read."""
    threads = min(4, os.cpu_count() or 1)
    reader = Reader(batches, BadSamples(batches.shards, len(batches.shards)), 0, depth=0)
    decoder = Decoder(reader, CPU, DeviceStream(torch.device("cpu")), threads, prefetch=1)
    finisher = Finisher(_BATCH, _SIZE, batches.data.mean, batches.data.std, threads)
    try:
        decoded = [decoder.windows() for _ in range(_BATCHES)]
        pixels = [finisher.finish_pixels(windows, encoded.request).permute(0, 2, 3, 1).numpy() for encoded, windows in decoded]
    finally:
        for part in (reader, decoder, finisher):
            part.close()
    asked = [(encoded.images, encoded.request) for encoded, _ in decoded]
    return pickle.dumps((replace(batches, shards=None), asked)), np.concatenate(pixels)  # type: ignore[arg-type]  # needs no set


def _fault(command: Sequence[str], question: bytes, expected: np.ndarray, timeout: float) -> str:
    """What is wrong with a program's answer, empty where nothing is."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        given, errors = process.communicate(question, timeout)
    except subprocess.TimeoutExpired:
        return f"gave no answer within {timeout:g} s"
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that the driver does not let go cannot be killed, and is left behind
            process.wait(timeout=10)
    if process.returncode < 0:
        return exit_reason(128 - process.returncode).removeprefix("a process ")
    if process.returncode:
        return _FAILED + cause(errors.decode(errors="replace"))
    try:
        pixels = np.load(io.BytesIO(given))
        apart = np.abs(pixels.astype(np.int16) - expected).mean(axis=(1, 2, 3))  # (n,)
    except (ValueError, EOFError) as error:
        return f"gave no pixels: {first_line(error)}"
    if apart.mean() > _ALL_DIFFER or apart.max() > _ONE_DIFFERS:
        return f"gave pixels {apart.mean():.1f} of 255 levels from the CPU's, and {apart.max():.1f} in one image"
    return ""


def _sentence(form: str, faults: dict[str, str], about: dict, lasting: bool, place: Path | None) -> str:
    if not faults:
        return ""
    instead = "the CPU decodes images" if form == CPU else "the GPU decodes whole images and then cuts out regions"
    tried = "; ".join(f"decoding {form} {fault}" for form, fault in faults.items())
    decoder = ", ".join(f"{name} {version}" for name, version in about["decoder"].items())
    known = "; see NVIDIA/nvImageCodec#55" if lasting else ""
    again = f"remove {place} to try again" if lasting and place else "the next start tries again"
    return f"{instead} after a trial on {about['gpu']}: {tried} ({decoder}{known}); {again}."


def _about(batches: TrainBatches, device: torch.device) -> dict:
    """What a verdict holds for: GPU, driver, decoder, and about how large the images are, as small ones are decoded in other ways."""
    samples = batches.shards.samples[batches.request(0).index]
    pixels = int(np.median(samples["height"].astype(np.int64) * samples["width"]))
    packages = sorted((each.name, each.version) for each in distributions() if _DECODER.match(each.name or ""))
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        "driver": DRIVER.read_text() if DRIVER.exists() else "",
        "decoder": dict(packages),
        "pixels": 1 << pixels.bit_length(),
    }


def _place(about: dict) -> Path | None:
    """The file for a verdict, in a folder that only this user can change."""
    folder = user_cache()
    if folder is None or not make_private(folder / "decoding"):
        return None
    return folder / "decoding" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"


if __name__ == "__main__":
    answer(*sys.argv[1:])
