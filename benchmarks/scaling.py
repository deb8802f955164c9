"""Measures how training scales: images per second of one process, and of several in data parallelism under msrun.

python benchmarks/scaling.py --device-target GPU        measures one GPU and two, and writes results/scaling.csv

Each process has a GPU, or a share of the CPU. In weak scaling each process has the batch of the single process; in
strong scaling they share it.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msops  # noqa: E402
from benchmarks.report import about, write  # noqa: E402

ROUNDS = 5
COLUMNS = ("scaling", "processes", "batch", "images_s", "lowest", "highest", "times_one")


class Block(nn.Cell):
    """Computes the block of examples/digits.py, except for its normalization."""

    def __init__(self, channels):
        super().__init__()
        self.depthwise = msops.DepthwiseConv2d(channels, 3)
        self.gate = nn.Conv2d(channels, channels, 1, has_bias=True)
        self.sigmoid = msops.Sigmoid()
        self.pointwise = nn.Conv2d(channels, channels, 1)
        self.add = msops.Add()

    def construct(self, x):
        y = self.depthwise(x)
        return self.add(x, self.pointwise(y * self.sigmoid(self.gate(y))))


class Classifier(nn.Cell):
    """Maps images (N, 1, S, S) to scores (N, 10)."""

    def __init__(self, channels, blocks):
        super().__init__()
        self.features = nn.SequentialCell(nn.Conv2d(1, channels, 3), *(Block(channels) for _ in range(blocks)))
        self.classifier = nn.Dense(channels, 10)

    def construct(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


def images_per_second(options, batch):
    """Returns the images per second of this process in each round."""
    mindspore.set_seed(0)
    net = nn.WithLossCell(Classifier(options.channels, options.blocks), nn.CrossEntropyLoss())
    step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 1e-3, 0.9))
    step.set_train()
    images = Tensor(np.random.default_rng(0).random((batch, 1, options.size, options.size), np.float32))
    labels = Tensor(np.arange(batch) % 10, mindspore.int32)
    for _ in range(3):
        step(images, labels).asnumpy()
    speeds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step(images, labels)
        loss.asnumpy()
        speeds.append(options.steps * batch / (time.perf_counter() - start))
    return speeds


def work(options):
    """Measures the speeds in each process. The first process writes its own."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(options.device_target)
    parallel = "MS_ROLE" in os.environ
    if parallel:
        init()
        mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    speeds = [images_per_second(options, batch) for batch in options.batches]
    if not parallel or get_rank() == 0:
        np.save(options.speeds, speeds)


def run_processes(count, device_target, *script, cwd, environment=os.environ):
    """Runs a Python script in `count` processes, by msrun if there are several, and returns the finished process with
    what it printed."""
    folder = Path(sys.executable).parent  # msrun starts the first python on the PATH
    variables = dict(environment, PATH=os.pathsep.join([str(folder), environment["PATH"]]))
    launch = [sys.executable]
    if count > 1:
        if device_target == "GPU":
            variables["CUDA_LAUNCH_BLOCKING"] = "1"  # without it MindSpore 2.10 sums gradients wrong: docs/versions.md
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = [folder / "msrun", f"--worker_num={count}", f"--local_worker_num={count}"]
        launch += [f"--master_port={port}", "--join=True"]
    command = [*map(str, (*launch, *script))]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=900)


def measure(options, processes, batches):
    """Returns the images per second of all processes, in each round, for each batch of a process."""
    with tempfile.TemporaryDirectory() as folder:  # msrun leaves logs here
        own = [f"--speeds={folder}/speeds.npy", "--batches", *batches]
        done = run_processes(processes, options.device_target, __file__, *sys.argv[1:], *own, cwd=folder)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return processes * np.load(f"{folder}/speeds.npy")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="GPU")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512, help="images in a step of one process")
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--size", type=int, default=32, help="of images")
    parser.add_argument("--steps", type=int, default=10, help=f"in each of {ROUNDS} rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results") / "scaling.csv")
    parser.add_argument("--speeds", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.speeds:
        work(options)
        return
    batch, count = options.batch, options.processes
    (one,) = measure(options, 1, [batch])
    weak, strong = measure(options, count, [batch, batch // count])
    net = f"{options.blocks} blocks of {options.channels} channels, float32, images of {options.size} x {options.size}"
    rows = []
    for scaling, processes, images, speeds in (
        ("", 1, batch, one),
        ("weak", count, count * batch, weak),
        ("strong", count, batch, strong),
    ):
        speed = statistics.median(speeds)
        figures = speed, min(speeds), max(speeds), speed / statistics.median(one)
        rows.append(dict(zip(COLUMNS, (scaling, processes, images, *figures))))
    write(options.output, rows, dict(about(options.device_target), net=net), COLUMNS)
    print(options.output.read_text(), end="")


if __name__ == "__main__":
    main()
