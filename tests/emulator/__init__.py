"""Builds libraries whose kernels run in an emulator of a GPU (see include/emulator.h).

The folder aot_kernels is copied with three changes: dynamic shared memory becomes that of the emulator, the headers
of common/gpu with inline assembly are replaced by those of gpu/ here, and no call is on the CPU, whose loops g++ then
leaves out. Kernels are launched by ``cudaLaunchKernelEx``, which the emulator has.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ROOT / "aot_kernels"
FLAGS = (
    *("-std=c++17", "-Og", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-x", "c++", "-w", "-Wno-psabi"),
    *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),  # a GPU refuses addresses that do not fit the type
    *("-D__CUDACC__", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-ffp-contract=off"),
)


def library(source, into=ROOT / "build" / "emulator"):
    """Builds the library of a .cu file, unless it is there already, and returns its path."""
    headers = sorted(path for folder in (HERE, SOURCES) for path in folder.rglob("*.h"))
    text = b"".join(path.read_bytes() for path in (*headers, source, Path(__file__)))
    path = into / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not path.exists():
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into) as folder:
            tree, built = Path(folder), Path(folder) / path.name
            for header in SOURCES.rglob("*.h"):
                copy = tree / header.relative_to(SOURCES)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(translated(header.read_text()))
            shutil.copytree(HERE / "gpu", tree / "common" / "gpu", dirs_exist_ok=True)
            (tree / source.name).write_text(translated(source.read_text()))
            command = ("g++", *FLAGS, f"-I{HERE / 'include'}", f"-I{tree}", tree / source.name, "-o", built, "-ldl")
            subprocess.run(command, check=True)
            built.rename(path)
    return path


def translated(text):
    """Returns a source or a header as g++ can compile it."""
    text = text.replace("is_on_cpu() const { return stream_ == nullptr; }", "is_on_cpu() const { return false; }")
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(::emulator::dynamic_shared);",
        text,
    )
    text = re.sub(r"__shared__ (alignas\(\w+\))", r"\1 __shared__", text)
    return re.sub(r"(?<![.>])\b(threadIdx|blockIdx|blockDim|gridDim)\.([xyz])\b", r"unsigned(\1.\2)", text)
