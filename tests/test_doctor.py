"""`python -m msops doctor`, with one thing broken. What a driver or nvcc says comes from commands on the PATH, and what
is installed from a folder that Python searches: most tests call a part of the doctor, which looks there."""

import ast
import functools
import importlib.metadata
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from child import ROOT, environment
from msops import build, doctor, pythons
from msops.doctor import compilers, cuda11, finding, gpu, libraries, modules, smoke

SAYS = 'echo "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: {1} |"'
SMI = """
case "$1" in
  --query-gpu=driver_version,compute_cap,name) {query} ;;
  --query-gpu=driver_version,name) echo "{driver}, {name}" ;;
  *) {says} ;;
esac
"""
WGET = "https://developer.nvidia.com/cuda-toolkit-archive"
INSTALL = f"{sys.executable} -m pip install"


def smi(*capabilities, driver="580.65.06", cuda="13.0", name="NVIDIA H200"):
    """An nvidia-smi's script; without capabilities that of a driver before 510."""
    query = "; ".join(f'echo "{driver}, {capability}, {name}"' for capability in capabilities)
    query = query or "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    return SMI.format(query=query, driver=driver, name=name, says=SAYS.format(driver, cuda))


def nvcc(release, *archs):
    known = "; ".join(f"echo compute_{arch}" for arch in archs) or ":"
    tells = f'echo "Cuda compilation tools, release {release}, V{release}.1"'
    return f'case "$1" in\n  --version) {tells} ;;\n  --list-gpu-arch) {known} ;;\nesac'


class Patient:
    """An environment of stand-ins, without GPU, nvcc and CUDA 11, in which nothing is installed."""

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
        for module in (finding, libraries, modules):
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
        """A distribution, whose package is a file of this content."""
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
        """A library of the package, as this nvcc stamps it, with code for (kind, architecture)."""
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
    """Makes a library."""
    command = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", *map(str, arguments), "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, env={"PATH": "/usr/bin:/bin"}, check=True)


@functools.cache
def empty_library():
    with tempfile.TemporaryDirectory() as folder:
        gcc("-o", f"{folder}/empty.so")
        return Path(folder, "empty.so").read_bytes()


def fat_binary(*parts):
    """Of (kind, architecture): kind 1 is PTX, 2 machine code."""
    entries = b"".join(struct.pack("<HHIQ12xI32x8x", kind, 0x101, 64, 8, arch) for kind, arch in parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)


def run_doctor(*options, program=("-m", "msops"), **variables):
    command = [sys.executable, *program, "doctor", *options]
    return subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True)


def test_this_environment():
    """All of it, with the real MindSpore."""
    done = run_doctor(NVCC="")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    state = {what: state for state, what, _ in lines[:-1]}
    text = {what: text for _, what, text in lines[:-1]}
    assert lines[0] == ["ok", "msops", f"{importlib.metadata.version('msops')}, {ROOT / 'msops'}"]
    assert {state[what] for what in ("Python", "MindSpore", "NumPy", "SciPy", "cache", "libraries", "CPU")} == {"ok"}
    assert text["MindSpore"].startswith("mindspore 2.")
    names = sorted(path.stem for path in (ROOT / "aot_kernels").glob("*.cu"))
    assert [name for line in lines if line[1] == "libraries" for name in line[2].split(":")[0].split(", ")] == names
    assert " ".join(lines[-1]).startswith("msops works on CPU")
    assert "export" not in done.stdout  # of what is not wrong


def test_nothing_installed(patient):
    """The report as JSON, and the exit status, of a Python without site-packages."""
    done = run_doctor("--json", program=("-S", "-m", "msops"), PYTHONPATH="", PATH=str(patient.commands))
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (done.returncode, report["devices"]) == (1, [])
    found = {finding["what"]: finding for finding in report["findings"]}
    for what in ("NumPy", "SciPy"):
        assert found[what]["text"] == "not installed"
    wanted = "'mindspore>=2.7,<2.11' 'numpy<2' 'scipy<1.14'"
    assert found["MindSpore"] == {
        "what": "MindSpore", "state": "wrong", "text": "not installed", "mend": [f"{INSTALL} {wanted}"]
    }  # fmt: skip
    assert found["CPU"]["text"] == "import mindspore: ModuleNotFoundError: No module named 'mindspore'"
    assert [found[what]["state"] for what in ("driver", "nvcc", "GPU")] == ["none"] * 3
    assert "CUDA 11" not in found


def test_python_before_what_msops_can_be_read_by(tmp_path):
    """It gets as far as the line that says so; what it reads until then has no newer syntax."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ast, runpy, sys\n"
        "sys.version_info = (3, 8, 20)\n"
        "runpy.run_module('msops', run_name='__main__', alter_sys=True)"
    )
    done = run_doctor(program=("-S", program), PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    line, mend = done.stderr.splitlines()
    assert line.startswith("wrong  Python     3.")
    assert line.endswith(f"{sys.executable}: must be 3.9 to 3.12")
    assert "-m venv .venv && .venv/bin/pip install '.[mindspore]'" in mend or "# install Python 3.12" in mend
    for module in ("__init__", "__main__", "pythons"):
        ast.parse((ROOT / "msops" / f"{module}.py").read_text(), feature_version=(3, 7))


def test_python_that_is_too_new(patient, monkeypatch):
    """pip has no MindSpore for it, so that no other command would help."""
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    patient.command("python3.12", "exit 1")  # without venv
    patient.command("python3.10", "exit 0")
    _, python, *others = doctor.examine()
    assert python.text.endswith("must be 3.9 to 3.12")
    assert python.mend == (
        "python3.10 -m venv .venv && .venv/bin/pip install '.[mindspore]'  # in msops' source folder",
    )
    assert {finding.mend for finding in others} == {()}
    patient.command("python3.10", "exit 1")
    assert pythons.another() == "# install Python 3.12: https://www.python.org/downloads"


LIB = "ImportError('{}: cannot open shared object file: No such file or directory')"
CUDART, GOMP = LIB.format("libcudart.so.11.0"), LIB.format("libgomp.so.1")
PILLOW = """AttributeError("module 'PIL.Image' has no attribute 'ANTIALIAS'")"""
REINSTALL = f"{INSTALL} --force-reinstall --no-deps"


@pytest.mark.parametrize(
    ("requirement", "code", "mend"),
    [
        ("mindspore-gpu==1.10.0", f"raise {PILLOW}", f"{INSTALL} 'pillow<10'"),
        (
            "mindspore-gpu==1.10.0",
            f"import atexit, os; atexit.register(os.abort); raise {CUDART}",
            f"{INSTALL} nvidia-cuda-runtime-cu11",
        ),
        ("mindspore==2.9.0", f"raise {GOMP}", "apt install libgomp1  # elsewhere the package that has libgomp.so.1"),
        ("mindspore==2.9.0", "import asttokens", f"{INSTALL} mindspore==2.9.0"),
        ("mindspore-ascend==1.10.0", "raise ImportError('libx.so: wrong')", f"{REINSTALL} mindspore-ascend==1.10.0"),
        ("mindspore==2.9.0", "import os; os.kill(os.getpid(), 11)", f"{REINSTALL} mindspore==2.9.0"),
        ("mindspore==2.9.0", "import os; os._exit(0)", f"{REINSTALL} mindspore==2.9.0"),
    ],
)
def test_mindspore_that_cannot_be_imported(patient, requirement, code, mend):
    """No command puts another version in its place."""
    patient.install(*requirement.split("=="), code)
    tried = smoke.run("CPU")
    state, text, mends = modules.mindspore(tried)[1:]
    assert state == tried.finding.state == "wrong"
    assert text.startswith(f"{requirement.replace('==', ' ')} cannot be imported: ")
    assert mends[0] == mend
    assert all(command in (mend, finding.AGAIN) for command in mends)


def test_library_of_cuda_that_is_there_but_not_found(patient):
    patient.install("mindspore-gpu", "1.10.0", f"raise {CUDART}")
    folder = patient.site / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.11.0").touch()
    (mend,) = modules.mindspore(smoke.run("CPU")).mend
    patient.do(mend)
    assert os.environ["LD_LIBRARY_PATH"] == str(folder)


def test_two_mindspores(patient):
    """As after a doctor that put 2.9.0 over mindspore-gpu 1.10.0."""
    patient.install("mindspore-gpu", "1.10.0", "raise ImportError")
    patient.install("mindspore", "2.9.0", "raise ImportError")
    state, text, mend = modules.mindspore(smoke.run("CPU"))[1:]
    assert state == "wrong"
    assert sorted(text.removesuffix(" overwrite each other").split(" and ")) == [
        "mindspore 2.9.0",
        "mindspore-gpu 1.10.0",
    ]
    assert mend[0].startswith(f"{sys.executable} -m pip uninstall --yes mindspore")
    assert f"{INSTALL} mindspore==2.9.0" in mend[1]
    assert f"{INSTALL} mindspore-gpu==1.10.0" in mend[1]


@pytest.mark.parametrize("version", ["2.11.0", "1.9.0", "2.3.0rc1"])
def test_mindspore_that_nobody_tried(patient, version):
    patient.install("mindspore", version, f"__version__ = {version!r}")
    _, text, mend = modules.mindspore(smoke.Smoke(finding.Finding("CPU", "wrong", ""), version, ""))[1:]
    assert text == f"mindspore {version}, backends: CPU; msops was tried with 1.10, 2.0, 2.7, 2.8, 2.9, 2.10 only"
    assert mend == ()


def test_mindspore_of_no_distribution(patient):
    """As one that was built from source."""
    package = patient.site / "mindspore" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('no')")
    assert modules.mindspore(smoke.run("CPU"))[1:] == (
        "wrong", f"in {package.parent} cannot be imported: ImportError: no", ()
    )  # fmt: skip


@pytest.mark.parametrize(("name", "version", "bound"), [("NumPy", "2.0.0", "2"), ("SciPy", "1.14.0rc1", "1.14")])
def test_version_trap(patient, name, version, bound):
    mend = (f"{INSTALL} '{name.lower()}<{bound}'",)
    assert modules.module(name)[1:] == ("wrong", "not installed", mend)
    patient.install(name.lower(), version)
    assert modules.module(name)[1:] == ("wrong", f"{version}: MindSpore needs one below {bound}", mend)
    shutil.rmtree(patient.site)
    patient.site.mkdir()
    patient.install(name.lower(), "1.13.9")
    assert modules.module(name)[1:] == ("ok", "1.13.9", ())


T4 = smi(driver="470.57.02", cuda="11.4", name="Tesla T4")
PASCAL = smi("6.1", "6.0", name="TITAN")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
NO_DRIVER = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."


@pytest.mark.parametrize(
    ("script", "state", "text", "mend"),
    [
        (smi("9.0"), "ok", "580.65.06 for CUDA up to 13.0; NVIDIA H200 (sm_90)", ()),
        (T4, "ok", "470.57.02 for CUDA up to 11.4; Tesla T4 (sm_?)", ()),
        (PASCAL, "wrong", "580.65.06 for CUDA up to 13.0; TITAN (sm_61), TITAN (sm_60): must be sm_70 or newer", ()),
        (f'echo "{MISMATCH}"; exit 18', "wrong", f"nvidia-smi finds no GPU: {MISMATCH}", ("reboot  # as root",)),
        (f'echo "{NO_DRIVER}"', "wrong", f"nvidia-smi finds no GPU: {NO_DRIVER}", ("modprobe nvidia  # as root",)),
        ('echo "No devices were found"', "wrong", "nvidia-smi finds no GPU: No devices were found", ()),
        ("exec /bin/sleep 60", "wrong", "nvidia-smi finds no GPU: no answer in 0.2 s", ("reboot  # as root",)),
    ],
)
def test_driver(patient, monkeypatch, script, state, text, mend):
    patient.command("nvidia-smi", script)
    if "sleep" in script:
        assert finding.output.__kwdefaults__["seconds"] == 10
        monkeypatch.setitem(finding.output.__kwdefaults__, "seconds", 0.2)
    assert gpu.finding(gpu.look())[1:] == (state, text, mend)


def test_gpu_that_msops_has_no_kernels_for(patient):
    """No command follows: neither nvcc nor CUDA 11 would help."""
    patient.command("nvidia-smi", smi("6.1"))
    patient.command("nvcc", nvcc(*NEW))
    patient.command("g++", "echo 12.2.0")
    patient.library("add")
    found = doctor.examine()
    assert [finding.what for finding in found if finding.mend and "pip install" not in finding.mend[0]] == []
    assert found[-1] == ("GPU", "none", "not tried", ())


NONE = "none on the PATH or in CUDA_HOME: msops.load compiles for the CPU alone"
TOO_NEW = "13.0, {nvcc}, is too new for the driver, which is for CUDA up to 12.4"
H200, V100, NEW, OLD = smi("9.0"), smi("7.0"), ("13.0", 75, 90), ("11.8", 35, 90)
CUDA12 = smi("9.0", driver="550.54", cuda="12.4")


@pytest.mark.parametrize(
    ("driver", "on_path", "toolkits", "text", "install"),
    [
        (H200, None, [], NONE, "13.0 or older: {WGET}"),
        (H200, None, [NEW, OLD], NONE, "13.0"),
        (H200, ("11.6",), [NEW], "11.6, {nvcc}, does not compile", "13.0"),  # as in a CUDA_HOME without compiler
        (V100, NEW, [OLD, ("12.9", 50, 90)], "13.0, {nvcc}, is too new for sm_70", "12.9"),
        (V100, NEW, [], "13.0, {nvcc}, is too new for sm_70", "12.9 or older: {WGET}"),
        (H200, ("11.1", 35, 86), [("11.8", 35, 90)], "11.1, {nvcc}, is too old for sm_90", "11.8"),
        (H200, ("11.1", 35, 86), [], "11.1, {nvcc}, is too old for sm_90", "13.0 or older, newer than 11.1: {WGET}"),
        (CUDA12, NEW, [("12.8", 50, 90)], TOO_NEW, "12.8"),
        (CUDA12, NEW, [("13.1", 75, 90)], TOO_NEW,
         "12.4 or older: {WGET}, or a driver for CUDA 13.0: https://www.nvidia.com/drivers"),
    ],
)  # fmt: skip
def test_nvcc(patient, driver, on_path, toolkits, text, install):
    """The command names a toolkit that mends it; where none is there, what to install."""
    patient.command("nvidia-smi", driver)
    path = on_path and patient.command("nvcc", nvcc(*on_path))
    paths = {toolkit[0]: patient.toolkit(*toolkit) for toolkit in toolkits}
    state, said, mend = patient.nvcc()[0][1:]
    assert (state, said) == ("wrong", text.format(nvcc=path))
    if "{WGET}" in install:
        assert mend == (f"# install the CUDA toolkit, {install.format(WGET=WGET)}",)
        patient.library("add")
        assert patient.libraries()[0].mend == (*mend, finding.AGAIN)
        return
    assert mend == (f"export NVCC={paths[install]}",)
    assert patient.nvcc()[1] == str(paths[install])
    patient.do(*mend)
    assert patient.nvcc()[0] == ("nvcc", "ok", f"{install}, {paths[install]}", ())


def test_nvcc_that_takes_the_assembler_of_another(patient, monkeypatch):
    """As Debian's does, which has no profile beside it: ptxas 13 refuses what nvcc 11.8 compiles for sm_70."""
    patient.command("nvidia-smi", V100)
    patient.command("ptxas", nvcc("13.0"))
    debian, own = patient.command("nvcc", nvcc(*OLD)), patient.toolkit("12.9", 50, 90)
    own.with_name("nvcc.profile").touch()
    state, text, mend = patient.nvcc()[0][1:]
    assert (state, text) == ("wrong", f"11.8, {debian}, takes the ptxas of CUDA 13.0 from the PATH")
    assert mend == (f"export NVCC={own}",)


def test_nvcc_that_is_switched_off(patient, monkeypatch):
    monkeypatch.setenv("NVCC", "")
    patient.command("nvcc", nvcc(*NEW))
    state, _, mend = patient.nvcc()[0][1:]
    assert state == "none"
    patient.do(*mend)
    assert patient.nvcc()[0] == ("nvcc", "ok", f"13.0, {patient.commands / 'nvcc'}", ())


def test_nvcc_without_gpu(patient):
    assert patient.nvcc()[0].state == "none"


# Refuses a host compiler of a name, as nvcc 11.8 refuses GCC 12.
TAKES_11 = "gcc versions later than 11 are not supported!"
REFUSES = f"""
case "$*" in
  "-ccbin {{path}}/"{{refused}}" -E -x cu /dev/null") echo "error: {TAKES_11}" >&2; exit 1 ;;
esac"""


def test_cxx(patient, monkeypatch):
    """What nvcc refuses, and what is missing beside it."""

    def found():
        build.host_compiler.cache_clear()
        return compilers.cxx_finding(patient.nvcc()[0])[1:]

    assert found()[0] == "none"
    patient.command("nvcc", nvcc("11.8", 35, 90) + REFUSES.format(path=patient.commands, refused="*++"))
    assert found()[::2] == ("wrong", ("apt install g++",))
    patient.command("g++", "echo 12.2.0")
    state, text, mend = found()
    assert text.startswith(f"{patient.commands}/nvcc takes GCC up to 11, and g++ is newer")
    assert (state, mend) == ("wrong", ("apt install g++-11",))
    monkeypatch.setenv("CXX", "g++")
    assert found()[::2] == ("wrong", ("unset CXX", "apt install g++-11"))
    path = patient.command("g++-11", "echo 11.3.0")
    assert found()[::2] == ("wrong", ("unset CXX",))
    patient.do("unset CXX")
    assert found() == ("ok", f"11.3.0, {path}", ())


def test_cache(patient, monkeypatch):
    def found():
        return compilers.cache_finding()[1:]

    assert found() == ("ok", str(patient.folder / ".cache" / "msops"), ())
    (patient.folder / "file").touch()
    for path, complaint in {
        f"{patient.folder}/a:b": "its path has a colon",
        f"{patient.folder}/file/cache": f"{patient.folder}/file is not a folder",
        "/proc/msops": "/proc: No such file or directory",
    }.items():
        monkeypatch.setenv("MSOPS_CACHE", path)
        state, text, mend = found()
        assert (state, text) == ("wrong", f"msops.load keeps nothing in {path}: {complaint}")
    patient.do(*mend)
    assert found()[0] == "ok"
    monkeypatch.delenv("MSOPS_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # whom the system does not know
    assert found() == ("wrong", "there is no home folder, so msops.load keeps nothing", mend)


def test_libraries_that_pip_installed(patient):
    """What there must be is in the list that the wheel has of its files."""
    files = ["msops/__init__.py", "msops/lib/add.so", "msops/lib/lltm.so", "msops/lib/lltm_sequence.so"]
    assert patient.libraries()[0].state == "wrong"
    patient.install("msops", "0.1.0", files=files)
    patient.library("add")
    library = patient.library("lltm")
    built, missing = patient.libraries()
    assert built[1:] == ("ok", "add, lltm: for the CPU; by C++ compiler 14", ())
    mend = f"{REINSTALL} .  # in msops' source folder"
    assert missing[1:] == ("wrong", "lltm_sequence: not built", (mend,))
    for size, complaint in [(0, "file too short"), (len(empty_library()) // 3, "")]:
        library.write_bytes(empty_library()[:size])
        found = {finding.text.partition(":")[0]: finding for finding in patient.libraries()}
        assert found["lltm"].text.startswith(f"lltm: cannot be loaded: {complaint}")
        assert found["lltm"].mend == (mend,)


def test_libraries_that_are_built_in_the_source_folder(patient):
    """The sources tell which there must be; git has what is no more."""
    patient.command("git", 'exec /usr/bin/git "$@"')
    kernels = patient.site / "aot_kernels"
    kernels.mkdir()
    for name in ("add.cu", "lltm.cu"):
        (kernels / name).write_text(name)
    (patient.site / "Makefile").touch()
    make = f"make -C {patient.site} -B all"
    (missing,) = patient.libraries()
    assert missing == ("libraries", "wrong", "add, lltm: not built", (make,))
    git = ["/usr/bin/git", "-C", str(patient.site), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "Makefile", "aot_kernels"], ["commit", "-qm", "."]):
        subprocess.run([*git, *command], check=True)
    patient.library("lltm").write_bytes(b"")
    (kernels / "lltm.cu").unlink()
    restore = f"git -C {patient.site} checkout -- aot_kernels/lltm.cu"
    assert [finding.mend for finding in patient.libraries()] == [(restore, make)] * 2
    patient.do(restore)
    assert (kernels / "lltm.cu").read_text() == "lltm.cu"
    (kernels / "add.cu").write_text("other")
    restore = f"git -C {patient.site} checkout -- aot_kernels/add.cu  # unless the changes are yours"
    assert patient.libraries()[0].mend == (restore, make)


def test_library_that_links_what_is_missing(patient):
    path = patient.library("add")
    lost = patient.folder / "liblost.so.1"
    gcc("-Wl,-soname=liblost.so.1", "-o", lost)
    gcc(lost, "-o", path)
    lost.unlink()
    mend = "apt install liblost1  # elsewhere the package that has liblost.so.1"
    assert patient.libraries()[0].mend == (mend,)


def test_library_on_a_file_system_without_execution(patient, monkeypatch):
    patient.library("add").write_bytes(b"")

    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: NoExec)
    (found,) = patient.libraries()
    (mend,) = found.mend
    mount = mend.split()[3]
    assert os.path.ismount(mount)
    assert found.text.endswith(f"; {mount} is mounted with noexec")
    assert mend.startswith(f"mount -o remount,exec {mount}  # as root")


@pytest.mark.parametrize("what", ["folder", "file"])
def test_library_that_may_not_be_read(patient, what):
    path = patient.library("add")
    patient.install("msops", "0.1.0", files=["msops/lib/add.so"])
    # Root may read anything, unless it gives that up.
    may_not = ["/usr/bin/setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    program = (
        f"import sys; sys.path[:0] = {[str(patient.site), str(ROOT)]}\n"
        "from pathlib import Path\n"
        "from msops.doctor import compilers, gpu, libraries\n"
        f"libraries.PACKAGE = Path({str(patient.site / 'msops')!r})\n"
        "gpus = gpu.look()\n"
        "print(*(finding[1:] for finding in libraries.findings(gpus, compilers.nvcc_finding(gpus)[0])), sep='\\n')"
    )
    closed, text = (
        (path, f"add: {path} may not be read") if what == "file" else (path.parent, f"{path.parent} may not be read")
    )
    closed.chmod(0)
    command = [*may_not, sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    mend = f"chmod -R a+rX {closed}  # as root or its owner"
    expected = ("wrong", text, (mend,))
    try:
        assert done.stdout == f"{expected}\n", done.stderr
        patient.do(mend)
        assert "for the CPU" in subprocess.run(command, capture_output=True, text=True).stdout
    finally:
        path.parent.chmod(0o755)


def test_library_that_a_variable_names(patient, monkeypatch):
    patient.library("add")
    for path in ("/no/sigmoid.so", "", "/dev/null"):
        monkeypatch.setenv("MSOPS_ADD", path)
        state, text, mend = patient.libraries()[0][1:]
        assert state == "wrong"
        assert text.startswith(f"add: MSOPS_ADD names {path or 'nothing'}; ")
        assert mend == ("unset MSOPS_ADD",)
    moved = shutil.copy(patient.site / "msops" / "lib" / "add.so", patient.folder)
    monkeypatch.setenv("MSOPS_ADD", moved)
    assert patient.libraries()[0][1:] == ("ok", f"add: MSOPS_ADD names {moved}; for the CPU; by C++ compiler 14", ())
    patient.do("unset MSOPS_ADD")
    assert patient.libraries()[0].text == "add: for the CPU; by C++ compiler 14"


TOO_OLD = "; the driver is for CUDA up to 12.4"


@pytest.mark.parametrize(
    ("driver", "release", "parts", "complaint"),
    [
        (H200, "13.0", [], "; not for the GPU"),
        (H200, "13.0", [(2, 80), (2, 86)], "; not for sm_90"),
        (H200, "13.0", [(2, 100), (1, 100)], "; not for sm_90"),
        (H200, "13.0", [(2, 80), (1, 75)], ""),
        (H200, "13.0", [(2, 80), (2, 90)], ""),
        (H200, "13.1", [(2, 90)], ""),  # machine code runs with all drivers of a major version, PTX does not
        (H200, "13.1", [(1, 90)], "; as PTX, for sm_90, it needs a driver for CUDA 13.1, not 13.0"),
        (CUDA12, "13.0", [(2, 90)], TOO_OLD),
        (smi(driver="470.57", cuda="11.4"), "11.1", [(2, 80)], ""),
        (smi(driver="470.57", cuda="11.4"), "11.1", [], "; not for the GPU"),
    ],
)  # fmt: skip
def test_architectures(patient, driver, release, parts, complaint):
    patient.command("nvidia-smi", driver)
    patient.command("nvcc", nvcc("12.0", 50, 90))
    patient.library("add", release, parts)
    built = "".join(f", sm_{arch}" for kind, arch in parts if kind == 2)
    built += "".join(f", PTX {arch}" for kind, arch in parts if kind == 1)
    state, text, mend = patient.libraries()[0][1:]
    assert text == f"add: for the CPU{built}; by nvcc {release}, C++ compiler 14{complaint}"
    assert (state, bool(mend)) == (("wrong", True) if complaint else ("ok", False))


def test_driver_older_than_the_nvcc_that_built(patient):
    """The commands do not build again with the nvcc that built what does not run."""
    patient.command("nvidia-smi", CUDA12)
    patient.command("nvcc", nvcc(*NEW))
    patient.library("add", "13.0", [(2, 90)])
    (found,) = patient.libraries()
    assert found.text.endswith(TOO_OLD)
    assert found.mend[0].startswith("# install the CUDA toolkit, 12.4 or older")
    assert found.mend[1:] == (finding.AGAIN,)
    path = patient.toolkit("12.4", 50, 90)
    patient.toolkit("13.1", 75, 90)
    export, build = patient.libraries()[0].mend
    assert export == f"export NVCC={path}"
    assert build.startswith(INSTALL)


@pytest.mark.parametrize(
    ("capability", "release", "lost"),
    [
        ("9.0", "11.6", "machine code for sm_90, TMA, wgmma, clusters"),
        ("9.0", "11.8", "TMA, wgmma, clusters"),
        ("9.0", "12.0", "clusters"),
        ("9.0", "12.1", None),
        ("8.9", "11.6", "machine code for sm_89"),
        ("8.9", "11.8", None),
        ("8.0", "11.1", None),
    ],
)
def test_what_an_older_toolkit_loses(patient, capability, release, lost):
    patient.command("nvidia-smi", smi(capability))
    patient.library("add", release, [(1, 80)])
    first, *rest = patient.libraries()
    assert first.state == "ok"
    assert [finding.state for finding in rest] == ["none"] * bool(lost)
    assert all(f"built by nvcc {release}, so without {lost}, which" in finding.text for finding in rest)


def test_architectures_as_nvcc_writes_them(tmp_path):
    path = build.find_nvcc()
    if not {80, 90} <= set(
        compilers.look(path).archs if path else ()
    ):  # such as one that only tells MindSpore a release
        pytest.skip("no nvcc for sm_90")
    (tmp_path / "a.cu").write_text("__global__ void f(float* x) { *x = 1; }")
    code = [
        f"-gencode=arch=compute_{arch},code={form}_{arch}" for arch, form in [(80, "sm"), (90, "sm"), (80, "compute")]
    ]
    subprocess.run([path, "-shared", "-Xcompiler=-fPIC", *code, "a.cu", "-o", "a.so"], cwd=tmp_path, check=True)
    assert libraries.architectures((tmp_path / "a.so").read_bytes()) == ([80, 90], [80])


SIGMOID = """
#define ENTRY __attribute__((visibility("default"))) int
ENTRY SigmoidForward(void) { %s }
ENTRY SigmoidBackward(void) { return 0; }
ENTRY SigmoidBackwardBackward(void) { return 0; }
"""


@pytest.mark.parametrize(
    ("code", "error"),
    [("*(volatile int*)0 = 0; return 0;", "crash: SIGSEGV"), ("return 0;", "ValueError: sigmoid gave ")],
)
def test_operator_that_fails(tmp_path, monkeypatch, code, error):
    gcc("-o", tmp_path / "sigmoid.so", source=SIGMOID % code)
    monkeypatch.setenv("MSOPS_SIGMOID", str(tmp_path / "sigmoid.so"))
    assert smoke.run("CPU").finding.text.startswith(f"msops: {error}")


def test_gpu_without_cuda11():
    """MindSpore itself, on what is no GPU; a real one is hidden, for which CUDA 11 may be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        tried = smoke.run("GPU")
    assert tried.finding.state == "wrong"
    assert tried.finding.text.startswith("msops: ")
    assert tried.version


def test_cuda11(patient, monkeypatch):
    """A backend for CUDA 11.1 and one for 11.6, which link two libraries that no machine has. Each command mends."""

    def found():
        gpus = gpu.look()
        return {one.what: one for one in cuda11.findings(gpus, compilers.nvcc_finding(gpus)[1])}

    patient.command("ldd", 'exec /usr/bin/ldd "$@"')
    plugins = patient.site / "mindspore" / "lib" / "plugin"
    plugins.mkdir(parents=True)
    (patient.site / "mindspore" / "__init__.py").touch()
    wheels = {"cublas": "libcublas.so.0", "cudnn": "libcudnn.so.0"}
    for name, library in wheels.items():
        folder = patient.site / "not yet" / name / "lib"
        folder.mkdir(parents=True)
        gcc(f"-Wl,-soname={library}", "-o", folder / library)
    linked = [str(patient.site / "not yet" / name / "lib" / library) for name, library in wheels.items()]
    for version, of in {"11.1": linked[:1], "11.6": linked}.items():
        gcc(*of, "-o", plugins / f"libmindspore_gpu.so.{version}")

    assert {one.state for one in found().values()} == {"none"}
    patient.command("nvidia-smi", H200)
    assert found()["CUDA_HOME"].text == "not set, so that MindSpore has no GPU"
    missing = found()["CUDA 11"]
    assert missing.text == "MindSpore's GPU backend misses libcublas.so.0, libcudnn.so.0"
    assert missing.mend == (f"{INSTALL} '.[gpu]'  # in msops' source folder", finding.AGAIN)
    patient.install("msops", "0.1.0")
    assert found()["CUDA 11"].mend[0] == f"{INSTALL} 'msops[gpu]'"

    (patient.site / "not yet").rename(patient.site / "nvidia")
    (export,) = found()["CUDA 11"].mend
    folders = [str(patient.site / "nvidia" / name / "lib") for name in wheels]
    assert export == f'export LD_LIBRARY_PATH="{":".join(folders)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
    # The nvcc that one command names stays the one that msops uses after the other.
    toolkit = patient.toolkit(*NEW)
    patient.do(*patient.nvcc()[0].mend, *found()["CUDA_HOME"].mend, export)
    assert patient.nvcc()[0].text == f"13.0, {toolkit}"
    assert found()["CUDA_HOME"].state == "ok"
    assert found()["CUDA 11"] == ("CUDA 11", "ok", f"2 libraries in {', '.join(folders)}", ())

    path = patient.folder / "home" / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(patient.folder / "home"))
    for release, count in [("11.8", 2), ("11.3", 1)]:
        patient.command(path, nvcc(release))
        assert found()["CUDA_HOME"].text == f"{patient.folder}/home, of CUDA {release}"
        assert found()["CUDA 11"].text.startswith(f"{count} libraries in ")
    patient.command(path, nvcc("12.8"))
    assert found()["CUDA_HOME"].text.startswith(f"{patient.folder}/home/bin/nvcc does not tell CUDA 11.6")

    # An nvcc of the system: CUDA_HOME is the folder above bin. Unset, it would be / to whoever joins the two.
    system = patient.command(patient.folder / "bin" / "nvcc", nvcc("11.8", 35, 90))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{system.parent}")
    monkeypatch.delenv("CUDA_HOME")
    assert found()["CUDA_HOME"].mend == (f"export CUDA_HOME={patient.folder}",)

    for plugin in plugins.iterdir():  # 1.10 has one backend, and asks nobody for a release
        plugin.unlink()
    shutil.copy(patient.site / "nvidia" / "cublas" / "lib" / "libcublas.so.0", plugins / "libmindspore_gpu.so")
    assert list(found()) == ["CUDA 11"]
