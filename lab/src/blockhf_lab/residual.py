"""The paper's convolutional network: a small residual network without batch normalization."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import blocks

PATTERNS = {"bottom": r"^(first|residual\.0)\.", "middle": r"^residual\.1\.", "top": r"^(residual\.2|head)\."}
"""Which parameters are in which of the paper's three blocks."""


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them (He et al., 2016).

    The shortcut is the identity, or a 1×1 convolution where the shape changes.

    Args:
        num_inputs: Channels of the input.
        num_outputs: Channels of the output.
        stride: Of the first convolution and of the shortcut.
    """

    def __init__(self, num_inputs: int, num_outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.enter = nn.Conv2d(num_inputs, num_outputs, 3, stride=stride, padding=1)
        self.leave = nn.Conv2d(num_outputs, num_outputs, 3, padding=1)
        # No bias: the one of ``leave`` is added at the same place.
        self.shortcut = (
            nn.Identity()
            if num_inputs == num_outputs and stride == 1
            else nn.Conv2d(num_inputs, num_outputs, 1, stride=stride, bias=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.leave(F.relu(self.enter(inputs))) + self.shortcut(inputs))


class ResidualNetwork(nn.Module):
    """A convolution, three residual blocks, the average over the picture, and a fully connected layer.

    The defaults are the paper's. Each residual block after the first halves the picture. Weights are drawn
    from Glorot's uniform distribution, biases are zero.

    Args:
        num_classes: Number of logits.
        channels: Channels of the residual blocks; the first convolution has as many as the first block.
        num_inputs: Channels of the picture.

    Example:
        >>> import torch
        >>> ResidualNetwork()(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, num_classes: int = 10, channels: tuple[int, int, int] = (16, 32, 64), num_inputs: int = 3
    ) -> None:
        super().__init__()
        bottom, middle, top = channels
        self.first = nn.Conv2d(num_inputs, bottom, 3, padding=1)
        self.residual = nn.Sequential(
            ResidualBlock(bottom, bottom),
            ResidualBlock(bottom, middle, stride=2),
            ResidualBlock(middle, top, stride=2),
        )
        self.head = nn.Linear(top, num_classes)
        for param in self.parameters():
            nn.init.zeros_(param) if param.dim() == 1 else nn.init.xavier_uniform_(param)

    def forward(self, pictures: Tensor) -> Tensor:
        """The logits ``(N, num_classes)`` for pictures ``(N, num_inputs, height, width)``."""
        logits: Tensor = self.head(self.residual(F.relu(self.first(pictures))).mean(dim=(2, 3)))
        return logits


def groups(model: ResidualNetwork) -> list[blocks.Group]:
    """The paper's three blocks: one per residual block.

    The bottom one also holds the first convolution, the top one the fully connected layer.

    >>> [(group["name"], len(group["params"])) for group in groups(ResidualNetwork())]
    [('bottom', 6), ('middle', 5), ('top', 7)]
    """
    return blocks.by_pattern(model, PATTERNS)
