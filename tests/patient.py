"""Sets up a machine for the doctor on which one thing is broken. Tests call a part of the doctor, which finds a driver
or nvcc as commands on the PATH, and installed packages in a folder that Python searches."""

import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from child import ROOT
from msops import files
from msops.commands.doctor import compilers, gpu, libraries, modules

SAYS = 'echo "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: {1} |"'
SMI = """
case "$1" in
  --query-gpu=driver_version,compute_cap,name) {query} ;;
  --query-gpu=driver_version,name) echo "{driver}, {name}" ;;
  *) {says} ;;
esac
"""
INSTALL = f"{sys.executable} -m pip install"
UNKNOWN = "(its dist-info is missing, so that pip does not know it)"
# Root can read everything, unless it gives up that capability.
MAY_NOT = ["/usr/bin/setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
REINSTALL = f"{INSTALL} --force-reinstall --no-deps"


def smi(*capabilities, driver="580.65.06", cuda="13.0", name="NVIDIA H200"):
    """Returns the script of an nvidia-smi. Without capabilities, it is that of a driver before 510."""
    query = "; ".join(f'echo "{driver}, {capability}, {name}"' for capability in capabilities)
    query = query or "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    return SMI.format(query=query, driver=driver, name=name, says=SAYS.format(driver, cuda))


def nvcc(release, *archs):
    known = "; ".join(f"echo compute_{arch}" for arch in archs) or ":"
    tells = f'echo "Cuda compilation tools, release {release}, V{release}.1"'
    return f'case "$1" in\n  --version) {tells} ;;\n  --list-gpu-arch) {known} ;;\nesac'


class Patient:
    """Sets up stand-ins for an environment in which nothing is installed, without GPU, nvcc and CUDA 11."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.commands, self.site = folder / "commands", folder / "site"
        self.commands.mkdir()
        self.site.mkdir()
        for name in ("CUDA_HOME", "CXX", "LD_LIBRARY_PATH", "MSOPS_CACHE", "NVCC"):
            monkeypatch.delenv(name, raising=False)
        for name in [name for name in os.environ if name.startswith("MSOPS_")]:
            monkeypatch.delenv(name)
        for name in ("sh", "sed", "grep", "head"):
            (self.commands / name).symlink_to(shutil.which(name))
        monkeypatch.setenv("PATH", str(self.commands))
        monkeypatch.setenv("HOME", str(folder))
        standard = [path for path in sys.path if "-packages" not in path and path not in ("", str(ROOT))]
        monkeypatch.setattr(sys, "path", [str(self.site), *standard])
        monkeypatch.setattr(compilers, "USUAL", folder / "usual")
        for module in (files, libraries, modules):
            monkeypatch.setattr(module, "PACKAGE", self.site / "msops")

    def command(self, name, script):
        path = self.commands / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def toolkit(self, release, *archs):
        return self.command(self.folder / "usual" / f"cuda-{release}" / "bin" / "nvcc", nvcc(release, *archs))

    def install(self, name, version, package="", files=()):
        """Installs a distribution whose package is a file of this content."""
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        if package:
            (info / "top_level.txt").write_text("mindspore\n")
            (self.site / "mindspore.py").write_text(package)

    def do(self, *commands):
        """Runs commands in a shell, and keeps the variables that they set."""
        script = "\n".join(
            (*commands, f"exec {sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'")
        )
        path = f"{self.commands}:/usr/bin:/bin"
        done = subprocess.run(
            ["/bin/sh", "-ec", script], env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        after = json.loads(done.stdout.splitlines()[-1])
        assert after.pop("PATH") == path
        for name in {*os.environ, *after} - {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}:
            if name in after:
                self.monkeypatch.setenv(name, after[name])
            else:
                self.monkeypatch.delenv(name)

    def library(self, name, nvcc="", parts=()):
        """Writes a library of the package with this nvcc's stamp, and with code for each (kind, architecture)."""
        path = self.site / "msops" / "lib" / f"{name}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = f"msops: {f'nvcc {nvcc}, ' if nvcc else ''}C++ compiler 14\0".encode()
        path.write_bytes(empty_library() + stamp + (fat_binary(*parts) if parts else b""))
        return path

    def nvcc(self):
        return compilers.nvcc_finding(gpu.look())

    def libraries(self):
        gpus = gpu.look()
        return list(libraries.findings(gpus, compilers.nvcc_finding(gpus)[0]))


def gcc(*arguments, source=""):
    """Compiles a library with gcc."""
    command = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", *map(str, arguments), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, env={"PATH": "/usr/bin:/bin"}, check=True)


@functools.cache
def empty_library():
    with tempfile.TemporaryDirectory() as folder:
        gcc("-o", f"{folder}/empty.so")
        return Path(folder, "empty.so").read_bytes()


def fat_binary(*parts):
    """Returns a fat binary with code for each (kind, architecture). Kind 1 is PTX, 2 is machine code."""
    entries = b"".join(struct.pack("<HHIQ12xI32x8x", kind, 0x101, 64, 8, arch) for kind, arch in parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


H200, V100, NEW, OLD = smi("9.0"), smi("7.0"), ("13.0", 75, 90), ("11.8", 35, 90)
CUDA12 = smi("9.0", driver="550.54", cuda="12.4")
