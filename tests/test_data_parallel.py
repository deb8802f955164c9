"""MindSpore's data parallelism: two processes train as one does. On GPUs, NCCL adds their gradients."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from child import ROOT, environment, run_python
from data_parallel import losses
from msops.library import _output


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def two_processes(device_target, tmp_path):
    """Runs a script in two processes; what they printed."""
    if device_target == "GPU" and len(_output("nvidia-smi", "-L").splitlines()) < 2:
        pytest.skip("there is one GPU")
    folder = Path(sys.executable).parent  # msrun starts the first python of the PATH
    msrun = shutil.which("msrun", path=folder)
    assert msrun, f"there is no msrun in {folder}"

    def run(*script):
        workers = ["--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
        variables = environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        command = [msrun, *workers, *map(str, script)]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900)
        return done.returncode, done.stdout + done.stderr

    return run


def test_all_cells(two_processes, mode, device_target, tmp_path):
    status, printed = two_processes(ROOT / "tests" / "data_parallel.py", device_target, mode, tmp_path)
    assert status == 0, printed
    parts = [np.load(tmp_path / f"{rank}.npy") for rank in range(2)]
    assert (parts[0] != parts[1]).all()
    np.testing.assert_allclose(np.mean(parts, 0), losses(0, 1), rtol=1e-4)


def test_example(two_processes, device_target, tmp_path):
    """The curve of the losses is that of one process. It differs in the order in which numbers are added, by 1e-6 on a
    CPU; on GPUs MindSpore's convolutions round to TF32, too. With nn.BatchNorm2d the curves differ by much more."""
    example, always = ROOT / "examples" / "digits.py", ("--device-target", device_target, "--epochs", 3, "--output")
    _, printed = two_processes(example, *always, tmp_path / "two")  # of three epochs the accuracy is too low
    run_python(example, *always, tmp_path / "one", cwd=tmp_path)
    assert (tmp_path / "two" / "digits.png").is_file(), printed
    one, two = (np.loadtxt(tmp_path / name / "digits.csv", delimiter=",", skiprows=1).T for name in ("one", "two"))
    assert one.shape == (2, 3)
    assert one[0, 2] < 0.1 * one[0, 0]
    np.testing.assert_allclose(two[0], one[0], rtol=1e-4 if device_target == "CPU" else 1e-2)
    np.testing.assert_allclose(two[1], one[1], atol=0.01)
