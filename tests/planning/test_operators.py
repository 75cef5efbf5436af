"""The operators that a plan counts are the model's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.config import Config, load_config
from pipeline.hardware import GPUS
from pipeline.models import flops
from pipeline.planning.memory import Subject, traced_evaluation, traced_step
from pipeline.planning.trace import ATTENTION, MAP, NARROW, PHI_MAPS, PRODUCT
from pipeline.planning.traced_step import TracedStep

BATCH = 4


def config(name: str, *overrides: str) -> Config:
    sizes = [f"train.micro_batch_size={BATCH}", f"train.global_batch_size={BATCH}", "augment.mixup=0", "augment.cutmix=0"]
    return load_config("configs/pervit_t.yaml", [f"model.name={name}", f"eval.batch_size={BATCH}", *sizes, *overrides])


def step_of(name: str, precision: str, *overrides: str, on_gpu: bool, gpu: str = "a100-80g") -> TracedStep:
    run = config(name, f"train.precision={precision}", *overrides)
    return traced_step(Subject(run, 1, 1, GPUS[gpu] if on_gpu else None))


@pytest.mark.parametrize("name", ["pervit_t", "deit_t"])
def test_a_forward_pass_has_the_operations_that_fvcore_counts(name: str) -> None:
    """Guards against a count by the wrong shapes, and against operators that are missed. fvcore counts biases and norms besides."""
    counted = flops.count(name)
    step = step_of(name, "fp32", on_gpu=False)
    forward = sum(o.flops for o in step.operators if not o.backward)
    assert forward == pytest.approx(2e9 * (BATCH * counted.gmacs + counted.gmacs_phi), rel=0.03)  # Φp once for the batch
    assert step.elements == counted.params
    backward = sum(o.flops for o in step.operators if o.backward)
    assert 1.9 < backward / forward < 2.1


def test_activation_checkpointing_repeats_the_blocks() -> None:
    """Guards against a plan to which activation checkpointing costs nothing, or to which the stem is computed twice."""
    plain, checkpointed = (
        step_of("deit_t", "bf16", f"train.activation_checkpointing={on}", on_gpu=True) for on in ("false", "true")
    )
    again = [o for o in checkpointed.operators if o.recomputed]
    assert not any(o.recomputed for o in plain.operators)
    assert sum(o.kind == ATTENTION for o in again) == 12
    blocks = sum(o.flops for o in plain.operators if not o.backward and o.kind in (ATTENTION, PRODUCT))
    assert 0.6 < sum(o.flops for o in again) / blocks <= 1, "each block, up to the last tensor that the backward pass needs"
    assert all(o.dtype is torch.bfloat16 for o in again if o.kind == PRODUCT), "autocast is on in a recomputation too"
    rest = [sum(o.flops for o in step.operators if not o.recomputed) for step in (plain, checkpointed)]
    assert rest[0] == rest[1]


def test_autocast_casts_what_cuda_casts() -> None:
    """Guards against a plan in another precision: products in bf16, norms in float32 on a GPU alone, Φp in float32."""
    for on_gpu, norms in ((True, torch.float32), (False, torch.bfloat16)):
        step = step_of("pervit_t", "bf16", on_gpu=on_gpu)
        kinds = {(o.name, o.dtype) for o in step.operators}
        assert ("addmm", torch.bfloat16) in kinds and ("addmm", torch.float32) not in kinds
        assert ("peripheral attention" if on_gpu else "attention", torch.bfloat16) in kinds
        assert ("maps of Φp" if on_gpu else "convolution", torch.float32) in kinds
        dtypes = {o.dtype for o in step.operators if o.name == "native_layer_norm"}
        assert norms in dtypes


def test_phi_is_one_network_on_a_gpu_with_kernels_of_its_own() -> None:
    """Guards against the operators of the other device's form, and against convolutions that the kernels leave out or do twice."""
    cpu, old, gpu = (
        step_of("pervit_t", "fp32", on_gpu=on, gpu=name).operators
        for on, name in ((False, ""), (True, "v100-32g"), (True, "a100-80g"))  # the kernels need Ampere
    )
    narrow = [sum(o.kind == NARROW for o in operators) for operators in (cpu, old, gpu)]
    assert narrow[0] > narrow[1] == narrow[2] + 4
    assert sum(o.kind == ATTENTION for o in gpu) == sum(o.kind == ATTENTION for o in cpu) == 24
    forward, backward = (o.flops for o in gpu if o.name == PHI_MAPS)
    count = Counter(o.flops for o in old if o.kind == NARROW)
    count.subtract(o.flops for o in gpu if o.kind == NARROW)
    first, first_again, second, both = sorted(count.elements())
    assert first == first_again and both == 2 * second
    assert (forward, backward) == (first + 4 * second, first + 4 * both), "4 heads, in tiles of 16"


def test_bytes_are_those_of_the_tensors() -> None:
    """Guards against views and expanded tensors that are counted as memory."""
    step = step_of("deit_t", "fp32", on_gpu=True)
    gelu = next(o for o in step.operators if o.name == "gelu")
    tokens, hidden = 197, 768
    assert gelu.kind == MAP and gelu.flops == 0
    assert gelu.bytes == 2 * 4 * BATCH * tokens * hidden
    assert not any(o.name in ("view", "transpose", "expand", "t") for o in step.operators)


def test_an_evaluation_has_no_backward_pass() -> None:
    """Guards against evaluations that are planned as training."""
    step = traced_evaluation(Subject(config("deit_t", "train.precision=bf16"), 1, 1, GPUS["a100-80g"]))
    assert not any(o.backward for o in step.operators)
