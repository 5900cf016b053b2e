"""Multi-head attention with fewer heads than its width has room for, which torch's own class refuses.

    head_h = softmax(q_h k_h' / sqrt(width of a head) + mask) v_h,   output = [head_1 ... head_n] W' + b

after Vaswani et al. (2017), eq. 1; the width of a head is that of the whole layer.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from anabranch.core.errors import AppError


class SmallAttention(nn.Module):
    """Takes over the tensors of a `MultiheadAttention` under the same names, and its `forward`.

    Their shapes tell how many heads there are.
    """

    _qkv_same_embed_dim = False  # keeps torch's encoder layers from a path of their own for whole heads

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.head_dim = whole.embed_dim, whole.head_dim
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        for name in ("in_proj_weight", *(f"{x}_proj_weight" for x in "qkv"), "in_proj_bias"):
            self.register_parameter(name, getattr(whole, name))
        self.out_proj: nn.Linear = whole.out_proj
        self.out_proj.in_features = self.out_proj.weight.shape[1]
        self.num_heads = self.out_proj.in_features // self.head_dim
        self.training = whole.training

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `MultiheadAttention.forward`; the weights' mean is over the heads that there are.

        Raises `AppError` for a mask with a part for each head of the whole layer.
        """
        alone, turned = query.dim() == 2, query.dim() == 3 and not self.batch_first
        q, k, v = (self._batched(x, alone, turned) for x in (query, key, value))
        q, k, v = (self._by_head(x) for x in self._projected(q, k, v))
        mask = self._mask(key_padding_mask, attn_mask, q.dtype, alone)
        weights = None
        if need_weights:
            heads, weights = self._weighed(q, k, v, mask)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if alone else weights
        else:
            dropout, causal = self.dropout if self.training else 0.0, is_causal and mask is None
            heads = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        output: torch.Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return (output[0] if alone else output.transpose(0, 1) if turned else output), weights

    @staticmethod
    def _batched(x: torch.Tensor, alone: bool, turned: bool) -> torch.Tensor:
        return x[None] if alone else x.transpose(0, 1) if turned else x

    def _projected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        parts: tuple[torch.Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            parts = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(x, w, b) for x, w, b in zip((q, k, v), parts, biases, strict=True)]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, heads, time, width of a head)."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(
        self, padding: torch.Tensor | None, mask: torch.Tensor | None, dtype: torch.dtype, alone: bool
    ) -> torch.Tensor | None:
        """Both masks as one that is added to the scores; of torch's, True hides."""
        if mask is not None and mask.dim() != 2:
            raise AppError(
                "attention of fewer heads takes masks of shape (time, time), the same for all heads"
            )
        found = None if mask is None else _added(mask, dtype)
        if padding is not None:
            hidden = _added(padding[None] if alone else padding, dtype)[:, None, None]
            found = hidden if found is None else found + hidden
        return found

    def _weighed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        weights = (scores if mask is None else scores + mask).softmax(3)
        weights = functional.dropout(weights, self.dropout, self.training)
        return weights @ v, weights


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
