"""The same graph, model and loop on a CUDA GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.saver import HostCopies
from pipeline.checkpoint.weights import read_weights
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import EvalBatches, TrainBatches
from pipeline.loader.loader import Loader
from pipeline.models import create_model
from pipeline.models.common.layers import drop_elements
from pipeline.shards.shard_set import ShardSet
from support import launching
from support.batches import form_of_gpu
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module
from support.runs import NO_GRADIENT, step_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("kind", ["train", "train, either filter", "eval"])
def test_gpu_decoding_agrees_with_cpu_decoding(kind: str, digits_shards: Path) -> None:
    """Guards against a GPU graph that crops, flips or resizes differently; the decoders differ by a few of 255 levels."""
    shards = ShardSet(digits_shards, "train")
    if kind != "eval":
        batches = TrainBatches(
            shards=shards,
            seed=1,
            image_size=64,
            global_batch_size=32,
            batch_size=32,
            data=DataConfig(train_interpolation="bicubic" if kind == "train" else "random"),
            augment=AugmentConfig(rand_augment_ops=2, mixup=0.8, cutmix=1.0),
        )
    else:
        batches = EvalBatches(shards=shards, image_size=64, batch_size=32, eval_crop=0.875)
    on_cpu = Loader(batches, DataConfig(), CPU)
    on_gpu = Loader(batches, DataConfig(), GPU, form=form_of_gpu(shards))
    kept = []
    for _ in range(6):  # batches must stay valid while later ones are made
        a, b = next(on_cpu), next(on_gpu)
        assert b.images.device == GPU and b.labels.device == GPU
        kept.append((a.images, b.images))
    for a, b in kept:
        assert (a - b.cpu()).abs().mean() * 255 * 0.225 < 2.0


def test_padded_heads_on_cuda_agree_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against wrong attention for head widths that CUDA's kernels do not take: PerViT-M's are 26, 39, 45 and 57."""
    torch.manual_seed(0)
    model = create_model("pervit_m", num_classes=10, image_size=96).eval()
    images = torch.randn(2, 3, 96, 96)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as init_world does
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(model.to(GPU)(images.to(GPU)).cpu(), expected, rtol=1e-3, atol=1e-4)


def test_a_backward_pass_without_a_compiler(tmp_path: Path) -> None:
    """Guards against a product, of Φp's or of attention with one query, that needs a C compiler although the log says that it goes on."""
    code = """if True:
        from pipeline.models import create_model
        import torch
        torch.backends.cudnn.enabled = False
        images = torch.randn(2, 3, 32, 32, device="cuda")
        create_model("pervit_t", num_classes=10, image_size=32).cuda()(images).sum().backward()
        query, keys = torch.zeros(2, 1, 8, device="cuda", requires_grad=True), torch.zeros(2, 8, 5, device="cuda", requires_grad=True)
        (query @ keys).sum().backward()
        print("done")"""
    environment = clean_environment(CUDA_VISIBLE_DEVICES="0", CC="", TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(REPOSITORY))
    environment["PATH"] = str(tmp_path)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert result.stdout == "done\n" and "attention runs without its Triton kernels" in result.stderr, result.stderr


def test_dropout_of_elements_is_the_same_on_cuda() -> None:
    """Guards against integers that overflow another way, and so against other decisions when a run moves to another machine."""
    torch.manual_seed(0)
    x, noise = torch.randn(8, 5000), torch.rand(8)
    assert torch.equal(drop_elements(x.to(GPU), 0.25, noise.to(GPU)).cpu() == 0, drop_elements(x, 0.25, noise) == 0)


def test_training_on_a_gpu_resumes(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against NCCL, fused AdamW or DLPack breaking what holds on the CPU. (Not bit for bit: the backward pass of
    CUDA's attention with a bias adds in no fixed order.)"""
    plain = launching.clean_environment
    monkeypatch.setattr(launching, "clean_environment", lambda: {**plain(), "CUDA_VISIBLE_DEVICES": "0"})
    options = ["train.precision=bf16", "data.num_threads=2", "train.micro_batch_size=8"]
    for run, steps in (("straight", [20]), ("resumed", [11, 20])):
        for last in steps:
            run_module(
                "pipeline.train", "--config", small_run, f"output_dir={tmp_path / run}", f"train.max_steps={last}", *options
            )
    straight, resumed = (step_rows(tmp_path / run) for run in ("straight", "resumed"))
    torch.testing.assert_close([r["loss"] for r in straight], [r["loss"] for r in resumed], rtol=1e-3, atol=0)
    first, second = (read_weights(tmp_path / run).model for run in ("straight", "resumed"))
    for name, value in first.items():
        if NO_GRADIENT.fullmatch(name):
            continue
        torch.testing.assert_close(second[name].float(), value.float(), rtol=1e-2, atol=1e-3)


def test_a_snapshot_waits_for_its_stream_and_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a copy that is read before it is complete, and against a save that waits for the loader's work ahead."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("waits for the device"))
    tensors = {str(i): torch.zeros(1 << 22, device=GPU) for i in range(8)}
    copies = HostCopies()
    for value in (1.0, 2.0):
        for tensor in tensors.values():
            for _ in range(50):  # enough work that the copies are behind it when take() is called
                tensor.add_(value / 50)
        taken = copies.take(tensors)
        for tensor in tensors.values():
            tensor.zero_()  # the training continues
        assert all(copy.is_pinned() and torch.allclose(copy, torch.tensor(value)) for copy in taken.values())
