"""MindSpore's data parallelism: two processes train as one does. On GPUs, NCCL adds their gradients."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from child import ROOT, environment
from data_parallel import losses
from msops.library import _output


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_train_as_one(mode, device_target, tmp_path):
    if device_target == "GPU" and len(_output("nvidia-smi", "-L").splitlines()) < 2:
        pytest.skip("there is one GPU")
    folder = Path(sys.executable).parent  # msrun starts the first python of the PATH
    msrun = shutil.which("msrun", path=folder)
    assert msrun, f"there is no msrun in {folder}"
    workers = ["--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
    script = [ROOT / "tests" / "data_parallel.py", device_target, mode, tmp_path]
    variables = environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run([msrun, *workers, *script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [np.load(tmp_path / f"{rank}.npy") for rank in range(2)]
    assert (parts[0] != parts[1]).all()
    np.testing.assert_allclose(np.mean(parts, 0), losses(0, 1), rtol=1e-4)
