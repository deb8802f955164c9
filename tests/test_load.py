"""Tests msops.load: what it compiles when, and its messages when it cannot."""

import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import msops
from child import ROOT, environment
from msops.core import build
from msops.testing.entry import has_gpu_code

ANSWER = 'extern "C" __attribute__((visibility("default"))) int Answer() { return %s; }\n'


class Compiler:
    """Runs g++ and logs each run. It waits while the file `hold` exists."""

    def __init__(self, folder):
        self.path, self.log, self.hold = folder / "compiler", folder / "log", folder / "hold"
        self.set_version("1.0")

    def set_version(self, version):
        self.path.write_text(
            f"""#!/bin/sh
            if [ "$1" = --version ]; then echo {version}; exit; fi
            echo "$@" >> {self.log}
            while [ -e {self.hold} ]; do sleep 0.05; done
            exec g++ "$@"
            """
        )
        self.path.chmod(0o755)
        build.compiler_version.cache_clear()

    def runs(self):
        """Returns how many sources were compiled since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sum(" -c " in line for line in lines)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a Compiler in place of g++, with an empty cache and without nvcc."""
    folder = tmp_path / "compiler"
    folder.mkdir()
    compiler = Compiler(folder)
    monkeypatch.setenv("NVCC", "")
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("MSOPS_CACHE", str(tmp_path / "cache"))
    return compiler


def answer(loaded):
    return loaded.handle.Answer()


def python(code, **variables):
    """Starts a process that runs code."""
    command, output = [sys.executable, "-c", code], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(**variables), text=True, **output)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_text(compiler):
    loaded = msops.load("answer", ANSWER % 42)
    assert answer(loaded) == 42
    assert loaded.name == "answer"
    assert loaded.Answer == msops.Entry(loaded, "Answer")
    assert repr(loaded) == f"Library({str(loaded.path)!r})"


def test_files_and_text_together(compiler, tmp_path):
    (tmp_path / "one.cc").write_text("int one() { return 1; }\n")
    (tmp_path / "two.cu").write_text("int two() { return 2; }\n")
    third = "int one();\nint two();\n" + ANSWER % "one() + two()"
    assert answer(msops.load("answer", [tmp_path / "one.cc", str(tmp_path / "two.cu"), third])) == 3
    assert compiler.runs() == 3


def test_relative_file(compiler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("answer.cc").write_text(ANSWER % 1)
    assert answer(msops.load("answer", "answer.cc")) == 1
    assert answer(msops.load("answer", Path("answer.cc"))) == 1
    assert compiler.runs() == 1


def test_folders_with_spaces_and_quotes(compiler, tmp_path):
    folder = tmp_path / "it's a $folder #1"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 7\n")
    (folder / "answer.cc").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    for _ in range(2):
        assert answer(msops.load("answer", folder / "answer.cc", cache_folder=folder / "cache")) == 7
    assert compiler.runs() == 1
    (folder / "number.h").write_text("#define NUMBER 8\n")
    assert answer(msops.load("answer", folder / "answer.cc", cache_folder=folder / "cache")) == 8


@pytest.mark.wide
@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
def test_nvcc(tmp_path, monkeypatch, compiler):
    monkeypatch.delenv("NVCC")
    monkeypatch.setenv("CXX", "g++")
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 3\n")
    source = '#include "number.h"\n__global__ void kernel() {}\nconst int numbers[] = {NUMBERS};\n'
    source += ANSWER % "NUMBER + numbers[1] * __CUDACC_VER_MAJOR__"
    settings = dict(include_paths=[tmp_path], archs=["90"], cxx_flags=["-DNUMBERS=1, 2"])
    loaded = [msops.load("answer", source, **settings) for _ in range(2)]
    assert loaded[0].path == loaded[1].path
    assert answer(loaded[0]) > 20
    assert b"nv_fatbin" in loaded[0].path.read_bytes()
    header.write_text("#define NUMBER 4\n")
    assert answer(msops.load("answer", source, **settings)) == answer(loaded[0]) + 1
    assert msops.load("answer", source, **{**settings, "archs": ["80"]}).path != loaded[0].path
    with pytest.raises(msops.CompileError, match=r"/nvcc .*\n(.*\n)*.*number\.h"):
        msops.load("answer", source)


@pytest.mark.wide
@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
def test_functions_of_the_host_on_the_gpu(monkeypatch, compiler, capfd):
    """A constexpr function of the host works; any other one is an error, not a kernel that stores nothing."""
    monkeypatch.delenv("NVCC")
    monkeypatch.delenv("CXX")
    kernel = "#include <algorithm>\nfloat half(float x) { return x / 2; }\n"
    kernel += "__global__ void kernel(float* y) { *y = %s; }\n"
    msops.load("answer", kernel % "std::max(*y, 0.f)")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(msops.CompileError, match=r"""error.*: calling a __host__ function\("half\(float\)"\)"""):
        msops.load("answer", kernel % "half(*y)")


@pytest.mark.wide
@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
@pytest.mark.parametrize("name", ["swish", "logsumexp"])
def test_examples_for_gpus(monkeypatch, compiler, capfd, name):
    """The examples compile for both devices without a warning. Other tests compile them for the CPU alone."""
    monkeypatch.delenv("NVCC")
    monkeypatch.delenv("CXX")
    library = msops.load(name, ROOT / "examples" / name / f"{name}.cu")
    assert capfd.readouterr() == ("", "")
    assert has_gpu_code(library)


def test_cache(compiler):
    first = msops.load("answer", ANSWER % 1)
    assert compiler.runs() == 1
    assert msops.load("answer", ANSWER % 1).path == first.path
    assert compiler.runs() == 0
    other = python(f"import msops; print(msops.load('answer', {ANSWER % 1!r}).path)")
    assert other.communicate()[0] == f"{first.path}\n"
    assert compiler.runs() == 0
    assert msops.load("other", ANSWER % 1).path != first.path


def test_changed_source(compiler):
    """The old and the new source work in one process."""
    first, second = msops.load("answer", ANSWER % 1), msops.load("answer", ANSWER % 2)
    assert compiler.runs() == 2
    assert (answer(first), answer(second)) == (1, 2)


def test_changed_header(compiler, tmp_path):
    """The old and the new header work in one process."""
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    (tmp_path / "answer.cc").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    first = msops.load("answer", tmp_path / "answer.cc")
    header.write_text("#define NUMBER 2\n")
    second = msops.load("answer", tmp_path / "answer.cc")
    assert compiler.runs() == 2
    assert (answer(first), answer(second)) == (1, 2)
    header.write_text("#define NUMBER 1\n")
    assert answer(msops.load("answer", tmp_path / "answer.cc")) == 1


def test_removed_header(compiler, tmp_path):
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    (tmp_path / "answer.cc").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    msops.load("answer", tmp_path / "answer.cc")
    header.unlink()
    with pytest.raises(msops.CompileError, match=r"number\.h"):
        msops.load("answer", tmp_path / "answer.cc")


def test_changed_header_of_the_package(compiler, tmp_path, monkeypatch):
    include = tmp_path / "include"
    for name in ("common", "compile"):
        shutil.copytree(Path(msops.get_include(), name), include / name)
    monkeypatch.setattr(build, "get_include", lambda: str(include))
    source = '#include "common/dtype.h"\n' + ANSWER % "msops::Constant<5>::value"
    msops.load("answer", source)
    msops.load("answer", source)
    assert compiler.runs() == 1
    with (include / "common" / "dtype.h").open("a") as header:
        header.write("// another line\n")
    assert answer(msops.load("answer", source)) == 5
    assert compiler.runs() == 1
    with (include / "common" / "rows.h").open("a") as header:  # the source does not include it
        header.write("// another line\n")
    msops.load("answer", source)
    assert compiler.runs() == 0


def test_changed_flags(compiler):
    first, second = (msops.load("answer", ANSWER % "NUMBER", cxx_flags=[f"-DNUMBER={n}"]) for n in (1, 2))
    assert compiler.runs() == 2
    assert (answer(first), answer(second)) == (1, 2)


def test_changed_compiler(compiler):
    first = msops.load("answer", ANSWER % "__GNUC__")
    compiler.set_version("2.0")
    assert msops.load("answer", ANSWER % "__GNUC__").path != first.path
    assert compiler.runs() == 2


def test_changed_host_compiler_of_nvcc(compiler, monkeypatch):
    def look_up(folder, stem, *others):
        raise LookupError(stem)

    monkeypatch.setenv("NVCC", "/bin/true")
    monkeypatch.setattr(build, "Build", look_up)
    stems = set()
    for version in ("1.0", "2.0"):
        compiler.set_version(version)
        with pytest.raises(LookupError) as caught:
            msops.load("answer", ANSWER % 1)
        stems.add(str(caught.value))
    assert len(stems) == 2


@pytest.mark.parametrize("record", ["", "[]", "null", "{}", '{"library": "x.so", "headers": {}}', '{"library": 1}'])
def test_broken_record(compiler, record):
    (file,) = msops.load("answer", ANSWER % 1).path.parent.glob("*.json")
    file.write_text(record)
    assert answer(msops.load("answer", ANSWER % 1)) == 1
    assert compiler.runs() == 2


def test_damaged_library(compiler):
    """A damaged library is built again."""
    path = msops.load("answer", ANSWER % 1).path
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:5000]):
        path.unlink()  # this process has it loaded
        path.write_bytes(damaged)
        assert answer(msops.load("answer", ANSWER % 1)) == 1
        assert path.read_bytes() == content
    assert compiler.runs() == 4


def test_record_of_a_library_elsewhere(compiler, tmp_path):
    """A record that names a library in another folder is not used."""
    foreign = msops.load("answer", ANSWER % 2, cache_folder=tmp_path / "elsewhere").path
    own = msops.load("answer", ANSWER % 1).path
    (file,) = own.parent.glob("*.json")
    record = json.loads(file.read_text())
    for library_file in (str(foreign), f"../elsewhere/{foreign.name}"):
        file.write_text(json.dumps({**record, "library": library_file}))
        assert answer(msops.load("answer", ANSWER % 1)) == 1


LOAD = f"import msops; print(msops.load('answer', {ANSWER % 5!r}).handle.Answer())"


def test_one_process_builds(compiler):
    """One process builds, and the others wait for it."""
    compiler.hold.touch()
    processes = [python(LOAD) for _ in range(4)]
    wait_until(compiler.log.exists)
    time.sleep(2)  # lets the others start
    compiler.hold.unlink()
    assert [process.communicate()[0] for process in processes] == ["5\n"] * 4
    assert compiler.runs() == 1


def test_killed_builder(compiler, tmp_path):
    """A killed builder does not block the others, and the files that it left do no harm."""
    compiler.hold.touch()
    process = python(LOAD)
    wait_until(compiler.log.exists)
    process.send_signal(signal.SIGKILL)
    compiler.hold.unlink()  # lets the builder's compiler end, which would outlive it
    process.communicate()
    assert answer(msops.load("answer", ANSWER % 5)) == 5
    assert compiler.runs() == 2


def test_header_that_changes_while_it_is_compiled(compiler, tmp_path):
    """A source is compiled again if its header changes during the compilation."""
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    (tmp_path / "answer.cc").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    script = compiler.path.read_text()
    compiler.path.write_text(script.replace("exec g++", f"echo '#define NUMBER 2' > {tmp_path}/new\ng++"))
    compiler.path.write_text(compiler.path.read_text() + f"mv {tmp_path}/new {header}\n")
    msops.load("answer", tmp_path / "answer.cc")
    compiler.path.write_text(script)
    assert answer(msops.load("answer", tmp_path / "answer.cc")) == 2
    compiler.runs()
    assert answer(msops.load("answer", tmp_path / "answer.cc")) == 2
    assert compiler.runs() == 0


def test_source_that_changes_before_it_is_compiled(compiler, tmp_path):
    """A library that was compiled from the changed source is not taken for that of the original one."""
    source = tmp_path / "answer.cc"
    source.write_text(ANSWER % 1)
    script = compiler.path.read_text()
    compiler.path.write_text(script.replace("exec g++", f"echo '{ANSWER.strip() % 2}' > {source}\nexec g++"))
    assert answer(msops.load("answer", source)) == 2
    compiler.path.write_text(script)
    source.write_text(ANSWER % 1)
    assert answer(msops.load("answer", source)) == 1


def test_process_that_is_forked_while_one_builds(compiler, monkeypatch):
    """A forked process inherits the lock's file, but does not keep the lock."""
    descriptors = Path("/proc/self/fd")
    copies, compile_ = [], build.Build._compile

    def forked(made):
        opened = {fd.name: os.path.realpath(fd) for fd in descriptors.iterdir()}
        copies.extend(os.dup(int(fd)) for fd, path in opened.items() if path == f"{made.folder / made.stem}.lock")
        return compile_(made)

    monkeypatch.setattr(build.Build, "_compile", forked)
    (lock,) = msops.load("answer", ANSWER % 1).path.parent.glob("*.lock")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(copies) == 1
    os.close(copies[0])


def test_does_not_compile(compiler, tmp_path):
    with pytest.raises(msops.CompileError) as caught:
        msops.load("answer", "int x;\n\nint broken(;\n")
    lines = str(caught.value).splitlines()
    assert lines[0] == "msops.load: this command failed:"
    assert lines[1].startswith(f"{compiler.path} -std=c++17 -O3 ")
    assert "answer:3:" in lines[2]
    assert "error:" in str(caught.value)
    (tmp_path / "broken.cc").write_text("int broken(;\n")
    with pytest.raises(msops.CompileError, match=rf"\n{tmp_path}/broken\.cc:1:"):
        msops.load("answer", tmp_path / "broken.cc")
    assert not list((tmp_path / "cache").glob("*.so"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_does_not_link(compiler):
    with pytest.raises(msops.CompileError, match="multiple definition of `Answer'"):
        msops.load("answer", [ANSWER % 1, ANSWER % 2])


def test_missing_symbol(compiler):
    with pytest.raises(
        ImportError, match=r"^msops cannot load the library answer: .*undefined symbol: missing\(int\)$"
    ):
        msops.load("answer", "int missing(int);\n" + ANSWER % "missing(1)")


def test_no_compiler(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(msops.CompileError, match=r"^msops\.load: there is neither nvcc nor no-compiler "):
        msops.load("answer", ANSWER % 1)
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    with pytest.raises(msops.CompileError, match=r"^msops\.load: there is no /nowhere/nvcc"):
        msops.load("answer", ANSWER % 1)


@pytest.mark.parametrize("does", ["exit 0", "exit 1", "kill -9 $$", "g++ --no-such-flag"])
def test_broken_compiler(compiler, tmp_path, does):
    """A broken compiler leaves nothing behind, even if it reports success."""
    script = compiler.path.read_text()
    compiler.path.write_text(script.replace("exec g++", f"{does} #"))
    with pytest.raises(msops.CompileError, match=rf"^msops\.load: this command failed:\n{compiler.path} "):
        msops.load("answer", ANSWER % 1)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}
    compiler.path.write_text(script)
    assert answer(msops.load("answer", ANSWER % 1)) == 1


def test_missing_file(compiler, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^msops\.load: there is no source nowhere\.cu$"):
        msops.load("answer", "nowhere.cu")
    with pytest.raises(FileNotFoundError, match=r"^msops\.load: there is no source "):
        msops.load("answer", tmp_path)


@pytest.mark.parametrize("sources", [None, 3, [None], [b"x.cu"]], ids=str)
def test_sources_of_another_type(sources):
    with pytest.raises(TypeError, match=r"^msops\.load: sources must be a str, a Path or a list of these, got "):
        msops.load("a", sources)


def test_no_sources(compiler):
    with pytest.raises(ValueError, match=r"^msops\.load: there must be a source$"):
        msops.load("answer", [])


@pytest.mark.parametrize("what", ["cxx_flags", "nvcc_flags", "include_paths", "archs"])
def test_text_instead_of_a_list(compiler, what):
    with pytest.raises(TypeError, match=f"^msops.load: {what} must be a list, got '90'$"):
        msops.load("answer", ANSWER % 1, **{what: "90"})


@pytest.mark.parametrize("name", ["", "a b", "../x", "größe", None])
def test_wrong_name(compiler, name):
    with pytest.raises(ValueError, match=r"^msops\.load: name must be of letters, digits and underscores, got "):
        msops.load(name, ANSWER % 1)


def test_cache_folder_with_a_colon(compiler, tmp_path):
    """msops refuses a colon before it compiles, since MindSpore takes what follows it for the entry's name."""
    for cache in (tmp_path / "a: b", tmp_path / "a:b"):
        words = f"^msops.load: the cache folder must have no colon in its path, got {cache}$"
        with pytest.raises(ValueError, match=words):
            msops.load("answer", ANSWER % 1, cache_folder=cache)
    assert compiler.runs() == 0


def test_source_with_a_colon_in_its_path(compiler, tmp_path):
    folder = tmp_path / "a: b:c"
    folder.mkdir()
    (folder / "answer.cc").write_text('#include "number.h"\n' + ANSWER % "NUMBER")
    for n in (1, 2):
        (folder / "number.h").write_text(f"#define NUMBER {n}\n")
        assert answer(msops.load("answer", folder / "answer.cc")) == n


def test_cache_folder_that_cannot_be_written(compiler, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder", Path("/proc/cache")):
        with pytest.raises(OSError, match=rf"^msops\.load: answer cannot be kept in {folder}: .* MSOPS_CACHE can name"):
            msops.load("answer", ANSWER % 1, cache_folder=folder)


def test_cache_that_may_only_be_read(compiler, monkeypatch):
    """A read-only cache serves what it has."""
    msops.load("answer", ANSWER % 1)
    monkeypatch.setattr(build, "open", None, raising=False)
    monkeypatch.setattr(Path, "mkdir", None)
    assert answer(msops.load("answer", ANSWER % 1)) == 1


def test_full_cache(compiler, tmp_path):
    """A process that may write at most 1000 bytes to a file gets an error and leaves no library. The limit ends at the
    process' exit, where coverage writes its own file."""
    code = "import atexit, msops; from resource import *; limits = getrlimit(RLIMIT_FSIZE);"
    code += "setrlimit(RLIMIT_FSIZE, (1000, limits[1])); atexit.register(setrlimit, RLIMIT_FSIZE, limits)\n"
    process = python(code + LOAD)
    said = process.communicate()[0]
    assert process.returncode == 1
    assert "msops.load: this command failed:\n" in said
    assert "File size limit exceeded" in said or "File too large" in said
    assert not list((tmp_path / "cache").glob("*.so"))
    assert answer(msops.load("answer", ANSWER % 5)) == 5


def test_warnings(compiler, capfd):
    """Warnings are shown when the source is compiled, and only then."""
    for warnings in (1, 0):
        msops.load("answer", "#warning a warning\n" + ANSWER % 1)
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("warning: #warning a warning") == warnings


def test_entry_without_return(compiler):
    with pytest.raises(msops.CompileError, match=r"error: no return statement .*-Werror=return-type"):
        msops.load("answer", "int answer() {\n}\n")


def test_verbose(compiler, capfd):
    loaded = msops.load("answer", ANSWER % 1, verbose=True)
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == [str(compiler.path)] * 2
    assert err == ""
    msops.load("answer", ANSWER % 1, verbose=True)
    assert capfd.readouterr().out == f"msops.load: {loaded.path} is up to date\n"


def test_variable(compiler, monkeypatch):
    monkeypatch.setenv("MSOPS_TEST_ANSWER", "")
    loaded = msops.load("answer", ANSWER % 1, variable="MSOPS_TEST_ANSWER")
    assert (loaded.variable, os.environ["MSOPS_TEST_ANSWER"]) == ("MSOPS_TEST_ANSWER", str(loaded.path))


def test_home_in_the_cache_folder(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MSOPS_CACHE", "~/kept")
    assert msops.load("answer", ANSWER % 1).path.parent == tmp_path / "kept"
    assert msops.load("answer", ANSWER % 1, cache_folder="~/other").path.parent == tmp_path / "other"


def test_long_errors(compiler, tmp_path):
    """The message shows the first error, and a file has all of them."""
    source = "#warning long\n" * 300 + "int first(;\n" + "".join(f"int next_{i}(;\n" for i in range(300))
    with pytest.raises(msops.CompileError) as caught:
        msops.load("answer", source)
    lines = str(caught.value).splitlines()
    assert len(str(caught.value)) < 8000
    assert lines[2].startswith("answer:301:")
    log, size = re.fullmatch(r"These are 6000 of (\d+) characters: (.*) has all\.", lines[-1]).group(2, 1)
    said = Path(log).read_text()
    assert len(said) == int(size) > 20000
    assert "\nanswer:601:14: error:" in said


def test_stays_loaded(compiler):
    path = str(msops.load("answer", ANSWER % 6).path)
    loaded = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    assert loaded.Answer() == 6
