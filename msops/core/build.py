"""Compiles C++ and CUDA sources to libraries, and keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .library import Library, get_include

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def default_cache_folder() -> Path:
    return Path(os.environ.get("MSOPS_CACHE") or Path.home() / ".cache" / "msops").expanduser().absolute()


class CompileError(RuntimeError):
    """A source does not compile: the message has the command and what the compiler said. See :func:`msops.load`."""


def load(
    name: str,
    sources: str | Path | Sequence[str | Path],
    *,
    cxx_flags: Sequence[str] = (),
    nvcc_flags: Sequence[str] = (),
    include_paths: Sequence[str | Path] = (),
    archs: Sequence[str] | None = None,
    cache_folder: str | Path | None = None,
    variable: str | None = None,
    verbose: bool = False,
) -> Library:
    """Compiles sources to a library, and loads it.

    By nvcc if there is one, for the GPUs at hand, else by a C++ compiler for the CPU. What was compiled before, from
    the same sources and headers, with the same flags and compiler, is loaded at once; of several processes one compiles
    while the others wait. A compiler's warnings go to stderr.

    The compilers are those of the environment variables ``NVCC`` and ``CXX``, else ``nvcc`` of the PATH or CUDA_HOME,
    and ``g++`` or the newest ``g++-N`` that nvcc takes. With an empty ``NVCC``, all is for the CPU alone.

    Args:
        name (str): The library's, for messages and its file: letters, digits and underscores.
        sources (str, Path, list): Files, ``.cu`` (for both devices) or C++; or text, which has several lines.
        cxx_flags (list[str]): More flags for the C++ compiler, nvcc's one too. Default: none.
        nvcc_flags (list[str]): More flags for nvcc. Default: none.
        include_paths (list[str]): Folders for headers besides :func:`msops.get_include` and those of the sources.
            Default: none.
        archs (list[str]): GPUs to compile for, such as ``["80", "90"]`` . Default: those at hand; without any, the
            oldest that nvcc knows, in a form (PTX) that drivers translate for newer ones.
        cache_folder (str, Path): Where libraries are kept. Default: the environment variable ``MSOPS_CACHE`` , else
            ``~/.cache/msops`` .
        variable (str): An environment variable for exported networks, as :class:`msops.Library` has it. Default: none.
        verbose (bool): Whether to print the commands. Default: ``False`` .

    Returns:
        Library.

    Raises:
        CompileError: If a source does not compile, or there is no compiler.
        FileNotFoundError: If there is no such source.
        TypeError: If flags, folders or GPUs are no list.
        ValueError: If the name has other characters, there are no sources, or the cache folder's path has a colon.
        OSError: If the cache folder cannot be written.

    Examples:
        >>> import msops
        >>> library = msops.load("twice", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(Twice, (x), (y), y = 2 * x)
        ... ''')
        >>> print(library.Twice.name)
        Twice
    """
    began = time.time()
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name, re.ASCII):
        raise ValueError(f"msops.load: name must be of letters, digits and underscores, got {name!r}")
    lists = {"cxx_flags": cxx_flags, "nvcc_flags": nvcc_flags, "include_paths": include_paths, "archs": archs}
    for what, given in lists.items():
        if isinstance(given, (str, Path)):
            raise TypeError(f"msops.load: {what} must be a list, got {given!r}")
    folder = Path(cache_folder or default_cache_folder()).expanduser().absolute()
    if ":" in str(folder):  # MindSpore reads FILE:FUNCTION
        raise ValueError(f"msops.load: the cache folder must have no colon in its path, got {folder}")
    texts, folders = {}, [get_include(), *map(str, include_paths)]
    for i, source in enumerate([sources] if isinstance(sources, (str, Path)) else sources):
        if isinstance(source, str) and "\n" in source:
            texts[f"{name}_{i}.cu"] = f'#line 1 "{name}"\n{source}'.encode()
            continue
        path = Path(source).absolute()
        if not path.is_file():
            raise FileNotFoundError(f"msops.load: there is no source {source}")
        texts[str(path)] = path.read_bytes()
        folders.append(str(path.parent))
    if not texts:
        raise ValueError("msops.load: there must be a source")
    cxx = _cxx()
    command = _command(cxx, tuple(cxx_flags), tuple(nvcc_flags), tuple(dict.fromkeys(folders)), archs and tuple(archs))
    key = digest(command, _version(command[0]), _version(cxx), texts)
    build = _Build(folder, f"{name}-{key}", command, texts, verbose, began)
    try:
        return Library(build.find() or build.make(), name, variable)
    except OSError as error:
        raise type(error)(
            f"msops.load: {name} cannot be kept in {folder}: {error}. The environment variable MSOPS_CACHE can name "
            "another folder."
        ) from None


_SHOWN = 6000  # characters of what a compiler says


class _Build:
    """One library in the cache: a file that lists the headers it was made from, and one that holds it."""

    def __init__(
        self, folder: Path, stem: str, command: list[str], texts: dict[str, bytes], verbose: bool, began: float
    ) -> None:
        self.folder, self.stem, self.command, self.texts, self.verbose = folder, stem, command, texts, verbose
        self.began = began
        self.record = folder / f"{stem}.json"

    def find(self) -> Path | None:
        """The path of the library, or None if there is none of these sources and headers."""
        try:
            record = json.loads(self.record.read_text())
            path = self.folder / record["library"]
            whole = path == self._path_of(path.read_bytes())
            current = whole and record["headers"] == _digests(record["headers"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if current and self.verbose:
            print(f"msops.load: {path} is up to date")
        return path if current else None

    def make(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, if not before
            try:
                return self.find() or self._compile()
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too

    def _compile(self) -> Path:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f"{self.stem}.") as scratch:
            objects, headers = [], set()
            for i, (source, text) in enumerate(self.texts.items()):
                path = Path(source)
                if not path.is_absolute():
                    path = Path(scratch) / source
                    path.write_bytes(text)
                objects.append(f"{scratch}/{i}.o")
                language = ["-x", "c++"] if path.suffix == ".cu" and not find_nvcc() else []
                output = ["-MMD", "-MF", f"{scratch}/{i}.d", "-c", str(path), "-o", objects[-1]]
                self._run([*self.command, *language, *output])
                headers |= set(_prerequisites(Path(scratch, f"{i}.d").read_text())) - {str(path)}
            made = Path(scratch, "library.so")
            self._run([*self.command, "-shared", *objects, "-o", str(made)])
            library = self._path_of(made.read_bytes())
            record = Path(scratch, "record.json")
            kept = {"library": library.name, "headers": _digests(sorted(headers)), "command": self.command}
            record.write_text(json.dumps(kept))
            made.replace(library)
            # If a file changed meanwhile, nobody knows which content was compiled: the next load compiles again.
            files = (Path(file) for file in [*headers, *filter(os.path.isabs, self.texts)])
            if all(file.stat().st_mtime < self.began for file in files if file.exists()):
                record.replace(self.record)
        return library

    def _path_of(self, content: bytes) -> Path:
        """A name of its own for each content: a process may have the last one loaded."""
        return self.folder / f"{self.stem}-{digest(content)}.so"

    def _run(self, command: list[str]) -> None:
        line = shlex.join(command)
        if self.verbose:
            print(line)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not Path(command[-1]).exists():  # which is the output
            raise CompileError(f"msops.load: this command failed:\n{line}\n{self._shortened(done.stdout)}")
        print(done.stdout, end="", file=sys.stderr)

    def _shortened(self, said: str) -> str:
        """What a compiler said, or the first of its errors and a file that has all: templates can fill many pages."""
        if len(said) <= _SHOWN:
            return said
        log = self.folder / f"{self.stem}.log"
        log.write_text(said)
        first = re.search(r"^.*\berror\b", said, re.MULTILINE)
        errors = said[first.start() if first else 0 :]
        return f"{errors[:_SHOWN]}...\nThese are {_SHOWN} of {len(said)} characters: {log} has all."


def _cxx() -> str:
    """The C++ compiler, for nvcc's host code if there is an nvcc."""
    cxx = os.environ.get("CXX")
    nvcc = find_nvcc()
    if not nvcc:
        if not shutil.which(cxx or "g++"):
            raise CompileError(f"msops.load: there is neither nvcc nor {cxx or 'g++'} (Debian: apt install g++)")
        return cxx or "g++"
    if not shutil.which(nvcc):
        raise CompileError(f"msops.load: there is no {nvcc}, which the environment variable NVCC names")
    try:
        return host_compiler(nvcc, cxx)
    except LookupError as error:
        raise CompileError(f"msops.load: {error}") from None


def _command(
    cxx: str,
    cxx_flags: Sequence[str],
    nvcc_flags: Sequence[str],
    folders: Sequence[str],
    archs: Sequence[str] | None,
) -> list[str]:
    """What compiles a source, except its name and the output's."""
    flags = _flags()
    common = [*flags["FLAGS"], *(f"-I{folder}" for folder in folders)]
    host = [*flags["HOST_FLAGS"], *cxx_flags]
    if nvcc := find_nvcc():
        # nvcc takes lists with commas, and hands their items to a shell.
        through = [f"-Xcompiler={shlex.quote(flag)}".replace(",", r"\,") for flag in host]
        code = _gpu_code(nvcc, " ".join(archs or ()))
        return [nvcc, "-ccbin", cxx, *common, *through, *flags["NVCC_FLAGS"], *code, *nvcc_flags]
    return [cxx, *common, *host]


@functools.cache
def _flags() -> dict[str, list[str]]:
    text = _script("flags.mk").read_text()
    return {name: words.split() for name, words in re.findall(r"^(\w+) := (.*)$", text, re.MULTILINE)}


def _script(name: str) -> Path:
    """A file that the Makefile uses, too."""
    return Path(get_include(), "common", name)


@functools.cache
def _gpu_code(nvcc: str, archs: str) -> list[str]:
    """The flags that tell nvcc which GPUs to compile for."""
    return output_of("sh", str(_script("gpu_code.sh")), nvcc, archs).split()


def find_nvcc() -> str:
    """The nvcc of the environment variable NVCC, else of the PATH, else of CUDA_HOME; "" if there is none."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"]
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (home and shutil.which(f"{home}/bin/nvcc")) or ""


@functools.cache
def host_compiler(nvcc: str, cxx: str | None = None) -> str:
    """The path of the C++ compiler for nvcc's host code: `cxx`, else g++, else the newest g++-N that nvcc takes.

    Raises:
        LookupError: If there is none. The message says what to install.
    """
    command = ["sh", str(_script("host_compiler.sh")), nvcc, *([cxx] if cxx else [])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise LookupError(done.stderr.strip())
    return done.stdout.strip()


def output_of(*command: str) -> str:
    """What a command prints; "" if there is no such command."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


@functools.cache
def _version(compiler: str) -> str:
    return output_of(compiler, "--version")


def _prerequisites(rule: str) -> list[str]:
    """The files that a rule of make depends on, in a compiler's notation."""
    words = re.split(r"(?<!\\)\s+", rule.partition(":")[2].replace("\\\n", " ").strip())
    return [re.sub(r"\\([ #:])", r"\1", word).replace("$$", "$") for word in words if word]


def _digests(paths: Iterable[str]) -> dict[str, str | None]:
    """path -> the digest of its content; None if there is no such file."""
    return {path: digest(Path(path).read_bytes()) if Path(path).is_file() else None for path in paths}


def digest(*things: Any) -> str:
    return hashlib.sha256(repr(things).encode()).hexdigest()[:20]
