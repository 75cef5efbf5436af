"""ConViT-Ti/S/B and their "+" variants (d'Ascoli et al., "ConViT: Improving Vision Transformers with Soft Convolutional Inductive
Biases", ICML 2021; layouts: Table 1).

A DeiT whose first ten blocks use gated positional self-attention (GPSA, Sec. 2 and 3, Eq. 4 to 7); the class token is appended to the
patches after them.

A head's position scores are a linear function of (dx, dy, dx² + dy²), the offset from query to key in patches. With the weights
of Eq. 5 their softmax peaks at a fixed offset per head, so that a layer with h heads is initialized as a convolution with a
√h x √h kernel and can depart from it in training.
"""

from collections.abc import Iterator
from math import isqrt
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.config import Positive
from pipeline.kernels import peripheral_attention
from pipeline.models.common import vit
from pipeline.models.common.base import ModelOptions, Switches, linear_drop_path
from pipeline.models.common.layers import ModuleList, as_written, constant_table, key_offsets
from pipeline.models.common.probe import probe
from pipeline.models.registry import register


@constant_table
def relative_positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Offsets from every query to every key, in patches (r of Eq. 5): (N, N, 3), N = rows * columns in row-major order, with
    [q, k] = (dx, dy, dx² + dy²), dx = x_k - x_q, dy = y_k - y_q."""
    dy, dx = key_offsets(rows, columns, device)
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).to(dtype)


class PositionalSelfAttention(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim) + position scores) v: content and position summed before the softmax (Eq. 4).

    Follows the published code, which scales the content scores by 1 / sqrt(head_dim); Eq. 4 and 7 omit that factor.

    Probes: ``attention`` (B, heads, N, N); ``position`` (heads, N, N), the softmax of the position scores alone.

    ``forward``: x (B, N, width), offsets (N, N, 3) from :func:`relative_positions` -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)
        self.position_projection = nn.Linear(3, heads)  # the softmax cancels its bias, which the published weights have

    @torch.no_grad()
    def init_convolution(self, locality_strength: float) -> None:
        """Initialize as a convolution (Eq. 5): each head attends to one offset of a square kernel, values are the identity.

        Head ``row + column * side`` attends to offset Δ: its scores are -strength * (|δ - Δ|² - |Δ|²). As in the published
        code, Δ is relative to the kernel's centre: ±0.5 for the 2 x 2 kernel (Fig. 3 says ±1).
        """
        nn.init.eye_(self.v.weight)
        side = isqrt(self.heads)
        for head in range(side**2):
            dx, dy = head // side - (side - 1) / 2, head % side - (side - 1) / 2
            self.position_projection.weight[head] = locality_strength * torch.tensor([2 * dx, 2 * dy, -1.0])

    def position_scores(self, offsets: Tensor) -> Tensor:
        """(N, N, 3) -> (heads, N, N), the same for all images.

        In full precision even under autocast: scores of distant keys are in the hundreds, where bfloat16 resolves steps of 1.
        """
        with as_written(offsets):
            return self.position_projection(offsets).permute(2, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        """(B, heads, N, head_dim) each and (heads, N, N) -> (B, heads, N, head_dim)."""
        probe("position", lambda: position_scores.softmax(-1))
        probe("attention", lambda: vit.attention_weights(q, k, position_scores))
        return peripheral_attention(q, k, v, position_scores)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k = vit.split_heads(self.qk(x), 2, self.heads)  # (B, heads, N, head_dim) each
        (v,) = vit.split_heads(self.v(x), 1, self.heads)  # (B, heads, N, head_dim)
        return self.proj(vit.merge_heads(self.attend(q, k, v, self.position_scores(offsets))))


class GatedPositionalSelfAttention(PositionalSelfAttention):
    """GPSA: (1 - s) softmax(q kᵀ / sqrt(head_dim)) v + s softmax(position scores) v, with s = σ(λ) per head (Eq. 6 and 7).

    A sum of two softmaxes is not a softmax, so the terms are computed separately. The first is fused attention. The second has one
    (N, N) matrix per head for the whole batch, the only ones kept for the backward pass: a factor B fewer than the attention maps of
    B images. The cost is a second product with v: 2 % more multiply-accumulates for ConViT-B, 6 % for ConViT-Ti. The normalization
    of Eq. 6 is omitted because the rows of both terms, and so of their weighted sum, add up to 1.

    Probes: ``attention`` (B, heads, N, N); ``position`` (heads, N, N); ``gate`` (heads,), s as applied.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.gating = nn.Parameter(torch.ones(heads))  # λ
        self.test_gate: float | None = None  # instead of σ(λ) in eval mode: 1 masks content, 0 masks position (Table 6)

    def gate(self) -> Tensor:
        """The gate s: (heads,)."""
        if self.test_gate is not None and not self.training:
            return torch.full_like(self.gating, self.test_gate)
        return self.gating.sigmoid()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        gate, position = self.gate(), position_scores.softmax(-1)  # (heads,), (heads, N, N)
        probe("gate", lambda: gate)
        probe("position", lambda: position)
        probe("attention", lambda: torch.lerp(vit.attention_weights(q, k), position, gate[:, None, None]))
        by_content = peripheral_attention(q, k, v, None)  # (B, heads, N, head_dim)
        by_position = torch.einsum("hqk,bhkd->bhqd", position.to(v.dtype), v)  # (B, heads, N, head_dim)
        return torch.lerp(by_content, by_position, gate[:, None, None].to(v.dtype))


# The class token needs at least one self-attention block to attend to the patches.
LayerCount = Annotated[int, Field(ge=0, le=vit.ViTLayout.depth - 1)]


class ConViTSwitches(Switches):
    """Ablations of Table 3, Fig. 8, Fig. 9 and, in eval mode only, Tables 5 and 6."""

    gpsa_layers: LayerCount = 10
    """Number of leading blocks with GPSA (Fig. 8); 0: a plain ViT (Table 3, e)."""
    conv_init: bool = True
    """Convolutional initialization (Eq. 5); false: random values and positions (Table 3, c, d and g)."""
    locality_strength: Positive = 1.0
    """α of Eq. 5 (Fig. 8): how sharply a head attends to its offset in the convolutional initialization."""
    train_gating: bool = True
    """false: the gating parameters are frozen at λ = 0, equal weights for content and position (Table 3, b and d)."""
    train_gpsa: bool = True
    """false: all parameters of the GPSA layers are frozen at their initial values (Table 3, f and g)."""
    positional_gating: bool = True
    """false: content and position are summed before the softmax, without a gate (Eq. 4, Fig. 9)."""
    mask_content_layers: LayerCount = 0
    """In eval mode the first n GPSA layers attend by position only (Table 6: 3, 5 and 10). Training is not affected."""
    mask_position_layers: LayerCount = 0
    """In eval mode the first n GPSA layers attend by content only (Table 6: 3, 5 and 10). Training is not affected."""
    mask_position_embedding: bool = False
    """Omit the absolute position embedding in eval mode (Table 5). Training is not affected."""

    def misfits(self) -> Iterator[str]:
        masked = max(self.mask_content_layers, self.mask_position_layers)
        if self.mask_content_layers and self.mask_position_layers:
            yield "must not mask content and position at once: set one of the two to 0"
        if masked > self.gpsa_layers:
            yield f"must mask at most gpsa_layers = {self.gpsa_layers} layers, got {masked}"
        if not self.positional_gating and (masked or not self.train_gating):
            yield "has positional_gating false, which leaves no gate to mask or to freeze: set it to true"
        if not self.conv_init and self.locality_strength != 1:
            yield "has a locality_strength, which requires conv_init=true: set one of the two to its default"


class ConViT(vit.ClassTokenModel):
    """Vision transformer with soft convolutional inductive biases.

    Probes: ``attention`` of every layer; ``position`` and ``gate`` of GPSA layers, which have no class token. Shapes: see
    :class:`GatedPositionalSelfAttention`. Raises UserError: ``image_size`` is not a multiple of 16.

    Args:
        layout: heads and width. A square number of heads lets the convolutional initialization use all of them.
        options: ``image_size``: a multiple of 16; ``forward`` takes no other size, because of the position embedding, except in
            the feature form.
    """

    reference_names = (
        *vit.REFERENCE_NAMES,
        ("blocks.*.attn.gating_param", "blocks.*.attn.gating"),
        ("blocks.*.attn.pos_proj.", "blocks.*.attn.position_projection."),
    )
    switches: ConViTSwitches
    reference_switches = frozenset(ConViTSwitches.model_fields) - {"positional_gating"}
    position_embedding: vit.PositionEmbedding

    def __init__(self, layout: vit.ViTLayout, switches: ConViTSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or ConViTSwitches(), ModelOptions(**options)
        rates = linear_drop_path(settings.drop_path, layout.depth)
        position = vit.PositionEmbedding(settings.image_size, 0, layout.width, switches.mask_position_embedding)
        super().__init__(layout, switches, settings, rates, position)
        self.gpsa_layers = switches.gpsa_layers
        self.blocks = ModuleList(_block(layout, switches, layer) for layer in range(layout.depth))
        self.add_classifier(settings.num_classes)

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        grid = vit.patch_grid(*images.shape[-2:])
        x = self.position_embedding(self.patch_embedding(images), grid)  # (B, N, width)
        offsets = relative_positions(*grid, images.device, self.drop_path_rates.dtype)  # (N, N, 3)
        for i, (block, scales) in enumerate(zip(self.blocks, self.block_scales(x.shape[0], noise))):
            if i == self.gpsa_layers:
                x = self.with_class_token(x)  # (B, N + 1, width) from here on
            x = self.run_block(block, x, scales, offsets if i < self.gpsa_layers else None)
        return x


def _block(layout: vit.ViTLayout, switches: ConViTSwitches, layer: int) -> vit.Block:
    if layer >= switches.gpsa_layers:
        return vit.Block(vit.SelfAttention(layout.width, layout.heads, qkv_bias=False), layout)
    kind = GatedPositionalSelfAttention if switches.positional_gating else PositionalSelfAttention
    attention = kind(layout.width, layout.heads)
    block = vit.Block(attention, layout)
    if switches.conv_init:
        attention.init_convolution(switches.locality_strength)
    if isinstance(attention, GatedPositionalSelfAttention):
        if not switches.train_gating:
            nn.init.zeros_(attention.gating).requires_grad_(False)
        if layer < max(switches.mask_content_layers, switches.mask_position_layers):
            attention.test_gate = 1.0 if switches.mask_content_layers else 0.0
    if not switches.train_gpsa:
        attention.requires_grad_(False)
    return block


register(
    ConViT,
    ConViTSwitches,
    "ConViT (ICML 2021), Table 1",
    convit_ti=(vit.ViTLayout(4, 192), "ConViT Tiny, 4 heads", 6, 1, 73.1, 734),
    convit_ti_plus=(vit.ViTLayout(4, 256), "ConViT Tiny+, 4 heads", 10, 2, 76.7, 625),
    convit_s=(vit.ViTLayout(9, 432), "ConViT Small, 9 heads", 27, 5.4, 81.3, 305),
    convit_s_plus=(vit.ViTLayout(9, 576), "ConViT Small+, 9 heads", 48, 10, 82.2, 382),
    convit_b=(vit.ViTLayout(16, 768), "ConViT Base, 16 heads", 86, 17, 82.4, 141),
    convit_b_plus=(vit.ViTLayout(16, 1024), "ConViT Base+, 16 heads", 152, 30, 82.5, 96),
)
