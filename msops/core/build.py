"""Compiles C++ and CUDA sources to libraries, and caches the libraries."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .library import Library, get_include

if TYPE_CHECKING:
    from collections.abc import Sequence


def default_cache_folder() -> Path:
    return Path(os.environ.get("MSOPS_CACHE") or Path.home() / ".cache" / "msops").expanduser().absolute()


class CompileError(RuntimeError):
    """A source does not compile. The message has the command and the compiler's output. See :func:`msops.load`."""


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

    If there is an nvcc, it compiles for the machine's GPUs; otherwise a C++ compiler compiles for the CPU. A library
    that was compiled before, from the same sources and headers, with the same flags and compilers, is loaded from the
    cache. If several processes need the same library, one compiles and the others wait. Compiler warnings go to stderr.

    The environment variable ``NVCC`` names nvcc; otherwise it is the ``nvcc`` on the PATH or in CUDA_HOME. ``CXX``
    names the C++ compiler; otherwise it is ``g++``, or the newest ``g++-N`` that nvcc accepts. With an empty ``NVCC``,
    libraries are for the CPU only.

    Args:
        name (str): The name of the library in messages and in its file: letters, digits and underscores.
        sources (str, Path, list): Files in CUDA (``.cu``, for both devices) or C++, or source text. A str that contains
            a line break is text.
        cxx_flags (list[str]): More flags for the C++ compiler, also where nvcc calls it. Default: none.
        nvcc_flags (list[str]): More flags for nvcc. Default: none.
        include_paths (list[str]): More folders of headers. :func:`msops.get_include` and the folders of the sources are
            always searched. Default: none.
        archs (list[str]): GPUs to compile for, such as ``["80", "90"]`` . Default: the GPUs of this machine; if it has
            none, the oldest that nvcc knows, as PTX, which drivers translate for newer GPUs.
        cache_folder (str, Path): Where libraries are kept. Default: the environment variable ``MSOPS_CACHE`` , else
            ``~/.cache/msops`` .
        variable (str): An environment variable that exported networks name instead of the path; see
            :class:`msops.Library`. Default: none.
        verbose (bool): Whether to print the commands. Default: ``False`` .

    Returns:
        Library.

    Raises:
        CompileError: If a source does not compile, or there is no compiler.
        FileNotFoundError: If a source does not exist.
        TypeError: If a source is neither a str nor a Path, or flags, folders or GPUs are not a list.
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
    one = isinstance(sources, (str, Path)) or not isinstance(sources, Iterable)
    for i, source in enumerate([sources] if one else cast("Iterable[Any]", sources)):
        if not isinstance(source, (str, Path)):
            raise TypeError(f"msops.load: sources must be a str, a Path or a list of these, got {source!r}")
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
    key = digest(command, compiler_version(command[0]), compiler_version(cxx), texts)
    build = Build(folder, f"{name}-{key}", command, texts, verbose, began)
    try:
        return Library(build.find() or build.make(), name, variable)
    except OSError as error:
        raise type(error)(
            f"msops.load: {name} cannot be kept in {folder}: {error}. The environment variable MSOPS_CACHE can name "
            "another folder."
        ) from None


_SHOWN = 6000  # characters of a compiler's output that a message shows


def build_by_gxx(source: Path, name: str, missing: str) -> Library:
    """Compiles one file of the package by g++ alone, once for each version of the file.

    Args:
        source (Path): The file.
        name (str): The library's name.
        missing (str): What the error says where there is no g++.
    """
    version = compiler_version("g++")
    if not version:
        raise RuntimeError(missing)
    texts = {str(source): source.read_bytes()}
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{get_include()}"]
    key = digest(command, version, texts)
    made = Build(default_cache_folder(), f"{name}-{key}", command, texts, False, time.time(), ["-ldl"])
    return Library(made.find() or made.make(), name)


class Build:
    """One library in the cache. It has two files: the library, and a record of the headers it was compiled from."""

    def __init__(
        self,
        folder: Path,
        stem: str,
        command: list[str],
        texts: dict[str, bytes],
        verbose: bool,
        began: float,
        libraries: Sequence[str] = (),
    ) -> None:
        self.folder, self.stem, self.command, self.texts, self.verbose = folder, stem, command, texts, verbose
        self.began, self.libraries = began, libraries
        self.record = folder / f"{stem}.json"

    def find(self) -> Path | None:
        """Returns the path of the library, or None if the cache has none for these sources and headers."""
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock ends with the process at the latest
            try:
                return self.find() or self._compile()
            finally:
                # Closing the file would not be enough: a process that was forked meanwhile has it open, too.
                fcntl.flock(lock, fcntl.LOCK_UN)

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
            self._run([*self.command, "-shared", *objects, *self.libraries, "-o", str(made)])
            library = self._path_of(made.read_bytes())
            record = Path(scratch, "record.json")
            kept = {"library": library.name, "headers": _digests(sorted(headers)), "command": self.command}
            record.write_text(json.dumps(kept))
            made.replace(library)
            # If a file changed during the compilation, it is not known which content was compiled. Then no record is
            # written, and the next load compiles again.
            files = (Path(file) for file in [*headers, *filter(os.path.isabs, self.texts)])
            if all(file.stat().st_mtime < self.began for file in files if file.exists()):
                record.replace(self.record)
        return library

    def _path_of(self, content: bytes) -> Path:
        """Returns a path that depends on the content, since a process may still use an earlier library."""
        return self.folder / f"{self.stem}-{digest(content)}.so"

    def _run(self, command: list[str]) -> None:
        line = shlex.join(command)
        if self.verbose:
            print(line)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not Path(command[-1]).exists():  # the last argument is the output file
            raise CompileError(f"msops.load: this command failed:\n{line}\n{self._shortened(done.stdout)}")
        print(done.stdout, end="", file=sys.stderr)

    def _shortened(self, said: str) -> str:
        """Shortens a compiler's output to its first errors and the name of a file that has all of it.

        Errors in templates can fill many pages.
        """
        if len(said) <= _SHOWN:
            return said
        log = self.folder / f"{self.stem}.log"
        log.write_text(said)
        first = re.search(r"^.*\berror\b", said, re.MULTILINE)
        errors = said[first.start() if first else 0 :]
        return f"{errors[:_SHOWN]}...\nThese are {_SHOWN} of {len(said)} characters: {log} has all."


def _cxx() -> str:
    """Returns the C++ compiler, which compiles nvcc's host code if there is an nvcc."""
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
    """Returns the command that compiles a source, without the names of the source and the output."""
    flags = _flags()
    common = [*flags["FLAGS"], *(f"-I{folder}" for folder in folders)]
    host = [*flags["HOST_FLAGS"], *flags.get(f"HOST_FLAGS_{platform.machine()}", ()), *cxx_flags]
    if nvcc := find_nvcc():
        # nvcc splits -Xcompiler at commas, and passes the items to a shell.
        through = [f"-Xcompiler={shlex.quote(flag)}".replace(",", r"\,") for flag in host]
        code = _gpu_code(nvcc, " ".join(archs or ()))
        return [nvcc, "-ccbin", cxx, *common, *through, *flags["NVCC_FLAGS"], *code, *nvcc_flags]
    return [cxx, *common, *host]


@functools.cache
def _flags() -> dict[str, list[str]]:
    text = _script("flags.mk").read_text()
    return {name: words.split() for name, words in re.findall(r"^(\w+) := (.*)$", text, re.MULTILINE)}


def _script(name: str) -> Path:
    """Returns the path of a file that the Makefile uses, too."""
    return Path(get_include(), "compile", name)


@functools.cache
def _gpu_code(nvcc: str, archs: str) -> list[str]:
    """Returns the flags that tell nvcc which GPUs to compile for."""
    return output_of("sh", str(_script("gpu_code.sh")), nvcc, archs).split()


def find_nvcc() -> str:
    """Returns the nvcc that NVCC names, else the one on the PATH, else the one in CUDA_HOME; "" if there is none."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"]
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (home and shutil.which(f"{home}/bin/nvcc")) or ""


@functools.cache
def host_compiler(nvcc: str, cxx: str | None = None) -> str:
    """Returns the path of the C++ compiler for nvcc's host code: `cxx`, else g++ or the newest g++-N that nvcc accepts.

    Raises:
        LookupError: If there is none. The message says what to install.
    """
    command = ["sh", str(_script("host_compiler.sh")), nvcc, *([cxx] if cxx else [])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise LookupError(done.stderr.strip())
    return done.stdout.strip()


def output_of(*command: str) -> str:
    """Returns what a command prints to standard output; "" if there is no such command."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


@functools.cache
def compiler_version(compiler: str) -> str:
    return output_of(compiler, "--version")


def _prerequisites(rule: str) -> list[str]:
    """Returns the files that a rule of make depends on, as a compiler writes such rules."""
    words = re.split(r"(?<!\\)\s+", rule.partition(":")[2].replace("\\\n", " ").strip())
    return [re.sub(r"\\([ #:])", r"\1", word).replace("$$", "$") for word in words if word]


def _digests(paths: Iterable[str]) -> dict[str, str | None]:
    """Maps each path to the digest of the file's content, or to None if there is no such file."""
    return {path: digest(Path(path).read_bytes()) if Path(path).is_file() else None for path in paths}


def digest(*things: Any) -> str:
    return hashlib.sha256(repr(things).encode()).hexdigest()[:20]
