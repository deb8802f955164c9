"""Learns a picture as a function of the place: a hash encoding and a small network give the colour of each pixel."""

import sys

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Tensor, nn
from sklearn.datasets import load_sample_image
from tqdm import trange

import msops
from common import options, training_step

_PIXELS = 2**14  # of a step
_REQUIRED = 30


class Picture(nn.Cell):
    """Maps places (N, 2) in the unit square to colours (N, 3)."""

    def __init__(self):
        super().__init__()
        self.encoding = msops.HashEncoding(dim=2, levels=12, log2_size=17, base_resolution=8, growth=1.45)
        self.layers = nn.SequentialCell(nn.Dense(24, 64), nn.ReLU(), nn.Dense(64, 3), msops.Sigmoid())

    def construct(self, places):
        return self.layers(self.encoding(places))


def pixels_of(image):
    """Returns the places of the pixels' centers, and their colours."""
    height, width, _ = image.shape
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    return np.float32(np.stack(((x + 0.5) / width, (y + 0.5) / height), 1)), image.reshape(-1, 3)


def read(net, places):
    """Computes colours by parts of one size, so that MindSpore compiles one graph."""
    parts = -(-len(places) // _PIXELS)
    padded = np.resize(places, (parts, _PIXELS, 2))
    return np.concatenate([net(Tensor(part)).asnumpy() for part in padded])[: len(places)]


def psnr(image, target):
    """Returns the peak signal-to-noise ratio in decibels."""
    return -10 * np.log10(np.mean((image - target) ** 2))


def train(net, places, colours, steps, rng):
    """Returns the loss of each step."""
    step = training_step(net, nn.MSELoss(), 0.01, steps)
    losses = []
    for _ in trange(steps, unit="step"):
        chosen = rng.integers(0, len(places), _PIXELS)
        losses.append(float(step(Tensor(places[chosen]), Tensor(colours[chosen])).asnumpy()))
    return losses


def draw(images, losses):
    figure = plt.figure(figsize=(15, 3.5), dpi=120, layout="constrained")
    *axes, curve = figure.subplots(1, len(images) + 1)
    for picture, (title, image) in zip(axes, images.items()):
        picture.imshow(image)
        picture.set(title=title, xticks=(), yticks=())
    curve.plot(range(1, len(losses) + 1), -10 * np.log10(losses))
    curve.set(title="Training", xlabel="step", ylabel="PSNR (dB)")
    curve.grid(alpha=0.3)
    return figure


def main():
    args = options(__doc__, "steps", 1000)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    target = np.float32(load_sample_image("china.jpg") / 255)
    places, colours = pixels_of(target)

    net = Picture()
    losses = train(net, places, colours, args.steps, np.random.default_rng(args.seed))
    image = read(net, places).reshape(target.shape)
    quality = psnr(image, target)

    path = args.output / "picture.png"
    numbers = sum(parameter.size for parameter in net.trainable_params())
    titles = "Target", f"Learned, {quality:.1f} dB, of {numbers} numbers", "10 times the error"
    draw(dict(zip(titles, (target, image, np.clip(10 * np.abs(image - target), 0, 1)))), losses).savefig(path)
    print(f"PSNR: {quality:.2f} dB\npicture: {path}")
    if quality < _REQUIRED:
        sys.exit(f"The PSNR must be at least {_REQUIRED} dB.")


if __name__ == "__main__":
    main()
