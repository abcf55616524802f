"""Small transformers: every position sees every other one, or those before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Self-attention and a feed-forward part, each around a shortcut and behind a LayerNorm.

    Args:
        width: Features of a position.
        num_heads: Heads of the attention.
        is_causal: Whether a position sees only those before it.
    """

    def __init__(self, width: int, num_heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.attention_norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        projected = self.projection(self.attention_norm(inputs)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        inputs = inputs + self.merge(seen.transpose(1, 2).flatten(2))
        outputs: Tensor = inputs + self.feed(self.feed_norm(inputs))
        return outputs


class Transformer(nn.Module):
    """Logits for each position of a sequence of tokens.

    Args:
        vocabulary: Number of tokens, and of logits.
        length: Positions of the longest sequence.
        width: Features of a position.
        num_layers: Number of layers.
        num_heads: Heads of the attention.
        is_causal: Whether a position sees only those before it.
        bias: Whether the logits have one.

    Example:
        >>> Transformer(length=5)(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 100])
    """

    def __init__(
        self,
        vocabulary: int = 100,
        length: int = 128,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        *,
        is_causal: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(
            *(Layer(width, num_heads, is_causal=is_causal) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``(N, T, vocabulary)`` for tokens ``(N, T)``."""
        logits: Tensor = self.head(
            self.norm(self.layers(self.tokens(tokens) + self.positions[: tokens.shape[1]]))
        )
        return logits
