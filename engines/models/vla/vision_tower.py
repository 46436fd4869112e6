"""A vision transformer with the names and the arithmetic of timm's, as OpenVLA's checkpoints hold it.

Features are those after the block before the last, of the patches alone, without a final norm (as
LLaVA and Prismatic take them, arXiv:2402.07865). So the last block, the final norm and the pooling,
which the checkpoints have too, are not built.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from engines.models.vla.shapes import TowerShape

EPSILON = 1e-6  # of the norms


class VisionTower(nn.Module):
    """Images to the features of their patches."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.patches, shape.width))
        if shape.prefix:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.prefix - 1, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth - 1))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, image, image] normalised to [B, patches, D]."""
        x = self.patch_embed(images) + self.pos_embed
        if self.shape.prefix:
            first = torch.cat([self.cls_token, self.reg_token], dim=1)
            x = torch.cat([first.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.shape.prefix :]


def unused_names(shape: TowerShape) -> tuple[str, ...]:
    """Patterns of what a checkpoint's tensors of a tower begin with that have no part in features."""
    return (r"(norm|fc_norm|attn_pool|head)\.", rf"blocks\.{shape.depth - 1}\.")


class PatchEmbedding(nn.Module):
    """Patches as vectors."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, kernel_size=shape.patch, stride=shape.patch)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, image, image] to [B, patches, D]."""
        patches: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return patches


class Block(GradientCheckpointingLayer):
    """x + s1 attention(norm1(x)), then x + s2 mlp(norm2(x))."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.mlp = FeedForward(shape)
        self.ls1 = Scale(shape.width) if shape.scaled else nn.Identity()
        self.ls2 = Scale(shape.width) if shape.scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        output: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return output


class Attention(nn.Module):
    """Self-attention of all tokens to all."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return output


class FeedForward(nn.Module):
    """Two linear maps with GELU between them."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.hidden)
        self.fc2 = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        output: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return output


class Scale(nn.Module):
    """A factor for each number; OpenVLA's checkpoints call it scale_factor, timm's gamma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to the same."""
        return x * self.scale_factor
