"""Holds what the examples share: the command line, the training step, and the handwritten digits."""

import argparse
import os
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import msops
import program

matplotlib.use("Agg")  # pictures go to files, not to windows


def options(description, unit, amount, **choices):
    """Reads the command line, where training takes `amount` epochs or steps by default, and sets MindSpore up.

    Each of `choices` becomes an option that takes one of these words, by default the first.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument(f"--{unit}", type=program.COUNT, default=amount, help=f"number of training {unit}")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("output"), help="folder of the picture")
    parser.add_argument(
        "--seed", type=program.SEED, default=0, help="seed of the initial parameters and the order of samples"
    )
    for name, words in choices.items():
        parser.add_argument(f"--{name}", choices=words, default=words[0], help=f"which {name} to use")
    args = parser.parse_args()
    program.make_folder(args.output)
    program.use(args.device_target)
    mindspore.set_seed(args.seed)
    return args


def training_step(net, loss, learning_rate, steps):
    """Returns a Cell that trains `net` on a batch and returns the loss. The learning rate falls to 0 along a cosine."""
    optimizer = nn.AdamWeightDecay(net.trainable_params(), nn.CosineDecayLR(0.0, learning_rate, steps))
    return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)


def can_record():
    """Tells whether `msops.cuda_graph` knows this MindSpore."""
    return tuple(map(int, mindspore.__version__.split(".")[:2])) >= (2, 10)


def recorded(step):
    """Returns the step as a CUDA graph, which takes its kernels' time alone, where that can be."""
    return msops.cuda_graph(step) if can_record() else step


def processes():
    """Returns the rank of this process and the number of processes of `msrun`; MindSpore averages their gradients."""
    if "MS_ROLE" not in os.environ:
        return 0, 1
    if mindspore.get_context("device_target") == "GPU" and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        sys.exit("Several GPUs need CUDA_LAUNCH_BLOCKING=1: without it MindSpore 2.10 sums gradients wrong.")
    init()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return get_rank(), get_group_size()


def learn_digits(net, args, name, required):
    """Trains `net`, which maps images (N, 1, 8, 8) to scores (N, 10), to read digits. Under `msrun` each process takes
    a part of each batch.

    Saves a table and a picture of the training, and exits with an error if the test accuracy is below `required`.
    """
    rank, size = processes()
    images, labels = load_digits(return_X_y=True)
    images, labels = np.float32(images / 16).reshape(-1, 1, 8, 8), np.int32(labels)
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split

    samples = NumpySlicesDataset((train_images, train_labels), shuffle=True, num_shards=size, shard_id=rank)
    batches = samples.batch(64 // size, drop_remainder=True)
    step = training_step(net, nn.CrossEntropyLoss(), 5e-3, args.epochs * batches.get_dataset_size())
    iterator = batches.create_tuple_iterator(num_epochs=args.epochs)
    losses, accuracies = [], []
    progress = tqdm(range(args.epochs), unit="epoch", disable=rank > 0)
    for _ in progress:
        step.set_train(True)
        losses.append(np.mean([step(*batch).asnumpy() for batch in iterator]))
        net.set_train(False)
        scores = net(Tensor(test_images)).asnumpy()
        accuracies.append(np.mean(scores.argmax(1) == test_labels))
        progress.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1]:.2%}")

    if size > 1:
        losses = ops.AllReduce()(Tensor(losses)).asnumpy() / size
    if rank > 0:
        return
    path = args.output / name
    np.savetxt(f"{path}.csv", np.transpose([losses, accuracies]), "%.7g", ",", header="loss,accuracy", comments="")
    _draw(losses, accuracies, test_images, test_labels, scores).savefig(f"{path}.png")
    print(f"test accuracy: {accuracies[-1]:.2%}\npicture: {path}.png")
    if accuracies[-1] < required:
        sys.exit(f"The test accuracy must be at least {required:.0%}.")


def _draw(losses, accuracies, images, labels, scores):
    figure = plt.figure(figsize=(12, 5), dpi=120, layout="constrained")
    curves, digits = figure.subfigures(1, 2)

    loss, accuracy = curves.subplots(2, 1, sharex=True)
    epochs = range(1, len(losses) + 1)
    loss.semilogy(epochs, losses)
    loss.set(title="Training loss", ylabel="cross-entropy")
    accuracy.plot(epochs, 100 * np.array(accuracies))
    accuracy.set(title=f"Test accuracy, {accuracies[-1]:.2%} at the end", xlabel="epoch", ylabel="read right (%)")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in loss, accuracy:
        axes.grid(alpha=0.3)

    is_label = np.eye(10, dtype=bool)[labels]
    margins = scores[is_label] - np.where(is_label, -np.inf, scores).max(1)  # negative if the answer is wrong
    digits.suptitle("The hardest test digits (red: read wrong)")
    for axes, i in zip(digits.subplots(4, 8).flat, margins.argsort()):
        answer, label = scores[i].argmax(), labels[i]
        axes.imshow(images[i, 0], cmap="gray_r")
        axes.set_title(label if answer == label else f"{label} as {answer}", color="k" if answer == label else "r")
        axes.axis("off")
    return figure
