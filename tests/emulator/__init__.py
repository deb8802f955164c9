"""Builds libraries whose kernels run in an emulator of a GPU (see include/emulator.h).

The folder aot_kernels is copied with four changes: a launch by ``<<<>>>`` becomes a call, dynamic shared memory
becomes that of the emulator, the headers of common/gpu with inline assembly are replaced by those of gpu/ here, and no
call is on the CPU, whose loops g++ then leaves out.
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
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-x", "c++", "-w", "-Wno-psabi"),
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
    text = re.sub(r"(?<![.>])\b(threadIdx|blockIdx|blockDim|gridDim)\.([xyz])\b", r"unsigned(\1.\2)", text)
    while "<<<" in text:
        at = text.index("<<<")
        begin = _beginning_of_name(text, at)
        end = text.index(">>>", at)
        configuration = text[at + 3 : end]
        after = _end_of_parentheses(text, end + 3)
        kernel, arguments = text[begin:at].strip(), text[end + 3 : after]
        text = f"{text[:begin]}launch_emulated([&] {{ {kernel}{arguments}; }}, {configuration}){text[after:]}"
    return text


def _beginning_of_name(text, end):
    """Returns where a name with template arguments begins that ends at `end`."""
    at = len(text[:end].rstrip())
    if text[at - 1] == ">":
        depth = 1
        while depth:
            at -= 1
            depth += {">": 1, "<": -1}.get(text[at - 1], 0)
        at -= 1
    while re.match(r"[\w:]", text[at - 1]):
        at -= 1
    return at


def _end_of_parentheses(text, begin):
    """Returns where the parentheses end that begin at `begin`."""
    depth = 0
    for at in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError("parentheses do not end")
