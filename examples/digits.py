"""Reads handwritten digits with a small network of gated depthwise convolutions."""

from mindspore import nn

import msops
from common import learn_digits, options


class Block(nn.Cell):
    """Adds to its input a depthwise convolution, gated value by value and followed by a pointwise convolution."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = msops.DepthwiseConv2d(channels, 3)
        self.norm = nn.GroupNorm(channels // 4, channels)
        self.gate = nn.Conv2d(channels, channels, 1, has_bias=True)
        self.sigmoid = msops.Sigmoid()
        self.pointwise = nn.Conv2d(channels, channels, 1)
        self.add = msops.Add()

    def construct(self, x):
        y = self.norm(self.depthwise(x))
        y = y * self.sigmoid(self.gate(y))
        return self.add(x, self.pointwise(y))


class DigitNet(nn.Cell):
    """Maps images (N, 1, 8, 8) to scores of the ten digits (N, 10)."""

    def __init__(self, channels):
        super().__init__()
        self.features = nn.SequentialCell(
            nn.Conv2d(1, channels, 3),
            Block(channels),
            Block(channels),
            msops.DepthwiseConv2d(channels, 3, stride=2, channel_multiplier=2),
            Block(2 * channels),
            Block(2 * channels),
        )
        self.classifier = nn.Dense(2 * channels, 10)

    def construct(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


if __name__ == "__main__":
    args = options(__doc__, "epochs", 20)
    learn_digits(DigitNet(channels=16), args, "digits", required=0.97)
