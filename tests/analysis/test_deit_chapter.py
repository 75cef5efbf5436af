"""DeiT's measures against the definitions of PerViT's Appendix D, from queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pipeline.analysis.attention import DeiTChapter
from pipeline.analysis.chapter import Request
from pipeline.models import create_model
from pipeline.models.common.irpe import KeyPositions
from pipeline.models.common.probe import observed
from pipeline.models.common.vit import SelfAttention
from pipeline.models.deit import DeiT
from support.analysed import findings_of

SIDE, TOKENS = 3, 9


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "iRPE"])
def model(request: pytest.FixtureRequest) -> DeiT:
    """DeiT-T on 3 x 3 patches, whose heads and relative positions prefer some tokens."""
    torch.manual_seed(0)
    model = create_model("deit_t", 5, image_size=16 * SIDE, switches={"relative_position": request.param})
    assert isinstance(model, DeiT)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.qkv.weight.data *= 10
        elif isinstance(module, KeyPositions):
            module.weight.data.normal_()
    return model.double().eval()


def scores(model: DeiT, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, Q Kᵀ / sqrt(head_dim) and iRPE's part: (B, heads, N + 1, N + 1) each, recorded at the modules' borders."""
    found: list[tuple[Tensor, Tensor]] = []
    biases: list[Tensor] = []

    def keep(module: SelfAttention, _: object, qkv: Tensor) -> None:
        q, k, _v = qkv.unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4).double()  # (B, heads, N + 1, head_dim) each
        content = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        found.append((content, torch.zeros_like(content)))

    hooks = [block.attn.qkv.register_forward_hook(keep) for block in model.blocks]
    for block in model.blocks:
        if hasattr(block.attn, "relative_position"):
            hooks.append(block.attn.relative_position.register_forward_hook(lambda *a: biases.append(a[-1].double())))
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return [(content, bias) for (content, _), bias in zip(found, biases)] if biases else found


def test_measures_are_those_of_exponentiated_scores(model: DeiT) -> None:
    """Ω and Ψ by loops over queries and keys: guards against rows normalized over the patches alone, a class token that counts,
    measures of a mean map, and images that do not count."""
    torch.manual_seed(1)
    images = torch.randn(3, 3, 16 * SIDE, 16 * SIDE, dtype=torch.float64)
    valid = torch.tensor([True, True, False])
    average, measures, *of_irpe = DeiTChapter(Request(model, 16 * SIDE, query=(1, 2))).collectors
    assert len(of_irpe) == model.relative_position

    def observe(name: str, value: Tensor) -> None:
        for each in (measures, average, *of_irpe):
            if name in each.probes:
                each.see(name, value)
                each.layer += name == each.probes[-1]

    for each in (measures, average, *of_irpe):
        each.begin(valid)
        each.count = 2
    with observed(observe, "phi_p", "attention"), torch.no_grad():
        model(images)

    for layer in (0, 11):
        content, bias = scores(model, images)[layer]
        for head in range(3):
            omega, psi_p, psi_c, row = 0.0, 0.0, 0.0, torch.zeros(TOKENS, dtype=torch.float64)
            for image in range(2):
                s, r = content[image, head], bias[image, head]
                far = near_p = near_c = 0.0
                for q in range(TOKENS):
                    highest = (s[q + 1]).max()
                    for k in range(TOKENS):
                        phi_c = math.exp(s[q + 1, k + 1] - highest)
                        phi_p = math.exp(r[q + 1, k + 1])
                        far += phi_c * phi_p * math.hypot(q // SIDE - k // SIDE, q % SIDE - k % SIDE)
                        near_p += (phi_c * phi_p - phi_p) ** 2
                        near_c += (phi_c * phi_p - phi_c) ** 2
                omega += far / TOKENS**2 / 2
                row += (s + r)[5 + 1].softmax(-1)[1:] / 2
                psi_p += 1 / math.sqrt(near_p) / 2
                psi_c += 1 / math.sqrt(near_c) / 2 if near_c else math.inf
            assert measures.mean("omega_a")[layer, head] == pytest.approx(omega, rel=1e-6)
            torch.testing.assert_close(average.mean("maps")[layer, head].flatten(), row, rtol=1e-6, atol=1e-12)
            if model.relative_position:
                phi_p = bias[:2, head, 5 + 1, 1:].exp().mean(0)  # Fig. S5
                torch.testing.assert_close(of_irpe[0].mean("maps")[layer, head].flatten(), phi_p, rtol=1e-6, atol=1e-12)
                assert measures.mean("psi_p")[layer, head] == pytest.approx(psi_p, rel=1e-6)
                assert measures.mean("psi_c")[layer, head] == pytest.approx(psi_c, rel=1e-6)


def test_the_captions_name_what_was_measured(model: DeiT) -> None:
    """Guards against iRPE's Ω under the caption of exp(Q Kᵀ) alone, of which it is not."""
    findings = findings_of(DeiTChapter, model, 16 * SIDE, torch.randn(2, 3, 16 * SIDE, 16 * SIDE, dtype=torch.float64))
    captions = {plot.name: plot.caption for plot in findings.plots}
    assert ("times exp(R)" in captions["nonlocality"]) == model.relative_position == ("impact" in captions)
    assert ("phi_p" in captions) == model.relative_position != ("phi_p" in findings.omitted)
    assert set(findings.measures.get("impact", ())) == ({"phi_p", "phi_c"} if model.relative_position else set())


def test_cpvt_says_why_it_has_no_map() -> None:
    """Guards against a figure of PerViT's (Fig. S5) that is neither drawn nor explained."""
    model = create_model("deit_t", 5, image_size=48, switches={"conditional_position": 5}).eval()
    findings = findings_of(DeiTChapter, model, 48, torch.randn(1, 3, 48, 48))
    assert "convolutions of the tokens (CPVT)" in findings.omitted["phi_p"]
