"""Tests what the doctor says of the driver, nvcc, the C++ compiler, the cache, and MindSpore's CUDA 11."""

import os
import shutil

import pytest

from msops.commands.doctor import compilers, cuda11, finding, gpu
from msops.core import build
from patient import CUDA12, H200, INSTALL, NEW, OLD, SAYS, V100, gcc, nvcc, smi

ARCHIVE = "https://developer.nvidia.com/cuda-toolkit-archive"
T4 = smi(driver="470.57.02", cuda="11.4", name="Tesla T4")
PASCAL = smi("6.1", "6.0", name="TITAN")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
ANEW = "; this stays so until the machine starts anew"
NO_DRIVER = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."


@pytest.mark.parametrize(
    ("script", "state", "text", "mend"),
    [
        (smi("9.0"), "ok", "580.65.06 for CUDA up to 13.0; NVIDIA H200 (sm_90)", ()),
        (T4, "ok", "470.57.02 for CUDA up to 11.4; Tesla T4 (sm_?)", ()),
        (PASCAL, "wrong", "580.65.06 for CUDA up to 13.0; TITAN (sm_61), TITAN (sm_60): must be sm_70 or newer", ()),
        (f'echo "{MISMATCH}"; exit 18', "wrong", f"nvidia-smi finds no GPU: {MISMATCH}{ANEW}", ()),
        (f'echo "{NO_DRIVER}"', "wrong", f"nvidia-smi finds no GPU: {NO_DRIVER}", ("modprobe nvidia  # as root",)),
        ('echo "No devices were found"', "wrong", "nvidia-smi finds no GPU: No devices were found", ()),
        ("exec /bin/sleep 60", "wrong", f"nvidia-smi finds no GPU: no answer in 0.2 s{ANEW}", ()),
    ],
)
def test_driver(patient, monkeypatch, script, state, text, mend):
    patient.command("nvidia-smi", script)
    if "sleep" in script:
        assert gpu.SECONDS == 10
        monkeypatch.setattr(gpu, "SECONDS", 0.2)
    assert gpu.finding(gpu.look())[1:] == (state, text, mend)


NONE = "none on the PATH or in CUDA_HOME: msops.load compiles for the CPU alone"
TOO_NEW = "13.0, {nvcc}, is too new for the driver, which is for CUDA up to 12.4"


@pytest.mark.parametrize(
    ("driver", "on_path", "toolkits", "text", "install"),
    [
        (H200, None, [], NONE, "13.0 or older: {ARCHIVE}"),
        (H200, None, [NEW, OLD], NONE, "13.0"),
        (H200, ("11.6",), [NEW], "11.6, {nvcc}, does not compile", "13.0"),  # as in a CUDA_HOME that has no compiler
        (V100, NEW, [OLD, ("12.9", 50, 90)], "13.0, {nvcc}, is too new for sm_70", "12.9"),
        (V100, NEW, [], "13.0, {nvcc}, is too new for sm_70", "12.9 or older: {ARCHIVE}"),
        (H200, ("11.1", 35, 86), [("11.8", 35, 90)], "11.1, {nvcc}, is too old for sm_90", "11.8"),
        (H200, ("11.1", 35, 86), [], "11.1, {nvcc}, is too old for sm_90", "13.0 or older, newer than 11.1: {ARCHIVE}"),
        (CUDA12, NEW, [("12.8", 50, 90)], TOO_NEW, "12.8"),
        (CUDA12, NEW, [("13.1", 75, 90)], TOO_NEW,
         "12.4 or older: {ARCHIVE}, or a driver for CUDA 13.0: https://www.nvidia.com/drivers"),
    ],
)  # fmt: skip
def test_nvcc(patient, driver, on_path, toolkits, text, install):
    """The command names a toolkit that solves the problem; where there is none, it tells what to install."""
    patient.command("nvidia-smi", driver)
    path = on_path and patient.command("nvcc", nvcc(*on_path))
    paths = {toolkit[0]: patient.toolkit(*toolkit) for toolkit in toolkits}
    state, said, mend = patient.nvcc()[0][1:]
    assert (state, said) == ("wrong", text.format(nvcc=path))
    if "{ARCHIVE}" in install:
        assert mend == (f"# install the CUDA toolkit, {install.format(ARCHIVE=ARCHIVE)}",)
        patient.library("add")
        assert patient.libraries()[0].mend == (*mend, finding.AGAIN)
        return
    assert mend == (f"export NVCC={paths[install]}",)
    assert patient.nvcc()[1] == str(paths[install])
    patient.do(*mend)
    assert patient.nvcc()[0] == ("nvcc", "ok", f"{install}, {paths[install]}", ())


def test_nvcc_that_takes_the_assembler_of_another(patient, monkeypatch):
    """The doctor finds an nvcc that runs another's ptxas, as Debian's does, since it has no profile beside it. ptxas 13
    refuses what nvcc 11.8 compiles for sm_70."""
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


@pytest.mark.parametrize("driver", ["", H200])
def test_nvcc_that_a_variable_names_in_vain(patient, monkeypatch, driver):
    if driver:
        patient.command("nvidia-smi", driver)
    monkeypatch.setenv("NVCC", "/nonexistent/nvcc")
    state, text, mend = patient.nvcc()[0][1:]
    assert (state, text) == ("wrong", "there is no /nonexistent/nvcc, which the environment variable NVCC names")
    assert mend[0] == "unset NVCC"
    assert [command[:14] for command in mend[1:]] == ["# install the "] * bool(driver)
    path = patient.toolkit(*NEW)
    assert patient.nvcc()[0].mend == (f"export NVCC={path}",)
    patient.do("unset NVCC")
    assert NONE in patient.nvcc()[0].text


def test_nvcc_without_gpu(patient):
    assert patient.nvcc()[0].state == "none"


@pytest.mark.parametrize(
    ("on_path", "text"),
    [
        (None, NONE),
        (NEW, "13.0, {nvcc}, is too new for the driver, which is for CUDA up to 11.4"),
        (OLD, "11.8, {nvcc}, is too new for the driver, which is for CUDA up to 11.4"),  # it would compile PTX
    ],
)
def test_driver_without_gpu(patient, on_path, text):
    """nvidia-smi shows a driver for CUDA 11.4 and no card. What the CPU runs is not wrong, whatever compiled it."""
    patient.command("nvidia-smi", f'case "$1" in --query*) ;; *) {SAYS.format("470.57", "11.4")} ;; esac')
    path = on_path and patient.command("nvcc", nvcc(*on_path))
    needed = "; for a GPU of this driver, it must be of CUDA 11.4 or older"
    assert patient.nvcc()[0][1:3] == ("none", text.format(nvcc=path) + needed)
    patient.library("add", "13.0", [(2, 90)])
    assert [finding.state for finding in patient.libraries()] == ["ok"]
    patient.command("nvcc", nvcc("11.4", 35, 86))
    assert patient.nvcc()[0].state == "ok"


# This nvcc refuses a host compiler by its name, as nvcc 11.8 refuses GCC 12.
TAKES_11 = "gcc versions later than 11 are not supported!"
REFUSES = f"""
case "$*" in
  "-ccbin {{path}}/"{{refused}}" -E -x cu /dev/null") echo "error: {TAKES_11}" >&2; exit 1 ;;
esac"""


def test_cxx(patient, monkeypatch):
    """The doctor names the compiler that nvcc refuses, and the one that is missing."""

    def found():
        build.host_compiler.cache_clear()
        return compilers.cxx_finding(patient.nvcc()[0])[1:]

    assert found()[0] == "none"
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert found() == ("wrong", "there is no /nonexistent/g++, which CXX names", ("unset CXX",))
    monkeypatch.delenv("CXX")
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
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user whom the system does not know
    assert found() == ("wrong", "there is no home folder, so msops.load keeps nothing", mend)


def test_cuda11(patient, monkeypatch):
    """MindSpore has a backend for CUDA 11.1 and one for 11.6, which link two libraries that no machine has. Each of the
    doctor's commands solves its problem."""

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
    # The second command must not change which nvcc msops uses after the first.
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

    # For the system's nvcc, CUDA_HOME is the folder above bin. To a program that joins paths, an unset one would be /.
    system = patient.command(patient.folder / "bin" / "nvcc", nvcc("11.8", 35, 90))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{system.parent}")
    monkeypatch.delenv("CUDA_HOME")
    assert found()["CUDA_HOME"].mend == (f"export CUDA_HOME={patient.folder}",)

    for plugin in plugins.iterdir():  # MindSpore 1.10 has one backend, and does not look for a release of CUDA
        plugin.unlink()
    shutil.copy(patient.site / "nvidia" / "cublas" / "lib" / "libcublas.so.0", plugins / "libmindspore_gpu.so")
    assert list(found()) == ["CUDA 11"]


RUNTIME = "int cudaRuntimeGetVersion(int* release) { *release = %d; return 0; }"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (RUNTIME % 11000, "is of CUDA 11.0, older than 11.6"),
        ("int f(void) { return 0; }", "undefined symbol: cudaRuntimeGetVersion"),
        (None, "file too short"),
        (RUNTIME % 11080, ""),
        (RUNTIME % 0, ""),  # as without a driver
    ],
)
def test_foreign_cuda(patient, monkeypatch, source, complaint):
    """LD_LIBRARY_PATH leads to another libcudart than the one of CUDA 11, which a wheel has."""

    def found():
        gpus = gpu.look()
        return [*cuda11.findings(gpus, "")][-1]

    patient.command("ldd", 'exec /usr/bin/ldd "$@"')
    patient.command("nvidia-smi", H200)
    plugin = patient.site / "mindspore" / "lib" / "plugin" / "libmindspore_gpu.so.11.6"
    plugin.parent.mkdir(parents=True)
    (patient.site / "mindspore" / "__init__.py").touch()
    right, foreign = patient.site / "nvidia" / "cuda_runtime" / "lib", patient.folder / "foreign"
    for folder, text in ((right, RUNTIME % 11080), (foreign, source)):
        folder.mkdir(parents=True)
        gcc("-Wl,-soname=libcudart.so.11.0", "-o", folder / "libcudart.so.11.0", source=text or "")
    gcc(right / "libcudart.so.11.0", "-o", plugin)
    if source is None:
        (foreign / "libcudart.so.11.0").write_text("x")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(foreign))
    if not complaint:
        assert found()[1:] == ("ok", f"1 libraries in {foreign}", ())
        return
    state, text, mend = found()[1:]
    where = f"LD_LIBRARY_PATH names {foreign}/libcudart.so.11.0, which MindSpore's GPU backend cannot use"
    assert (state, text) == ("wrong", f"{where}: {complaint}")
    patient.do(*mend)
    assert found()[1:] == ("ok", f"1 libraries in {right}", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(foreign))
    (right / "libcudart.so.11.0").unlink()
    assert found().mend == ("unset LD_LIBRARY_PATH", finding.AGAIN)
