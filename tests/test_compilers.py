"""Tests what make and msops.load share: the host compiler (host_compiler.sh), the GPUs (gpu_code.sh) and the flags."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import msops
from child import ROOT
from msops.core.build import find_nvcc, host_compiler

pytestmark = pytest.mark.wide

REFUSAL = "#error -- unsupported GNU version! gcc versions later than 11 are not supported! The nvcc flag"
NVCC = f"""#!/bin/sh
case "$*" in
  --list-gpu-arch) for arch in 35 70 80 90; do echo compute_$arch; done; exit ;;
  --help) exit ;;
  "-ccbin ${{0%nvcc}}g++-"[789]" -E -x cu /dev/null" | "-ccbin ${{0%nvcc}}g++-1"[01]" -E -x cu /dev/null") ;;
  *) echo "In file included from cuda_runtime.h:83:" >&2; echo "host_config.h:132:2: error: {REFUSAL}" >&2; exit 1
esac
"""


class Machine:
    """Sets up a PATH that holds only given commands. Its nvcc takes g++-7 to g++-11, and knows sm_70, 80 and 90."""

    def __init__(self, folder):
        self.folder = folder
        self.nvcc = str(folder / "nvcc")
        for command in ("sh", "sed", "grep", "head", "sort", "dirname"):
            (folder / command).symlink_to(shutil.which(command, path=os.defpath))
        self.install("nvcc", NVCC)

    def install(self, *names_and_script):
        *names, script = names_and_script
        for name in names:
            (self.folder / name).write_text(script)
            (self.folder / name).chmod(0o755)

    def compilers(self, *names):
        self.install(*names, "#!/bin/sh\n")

    def gpus(self, *capabilities):
        self.install("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo {capability}\n" for capability in capabilities))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return Machine(folder)


def test_default(machine):
    """The script tries g++ first, since each trial costs a third of a second."""
    machine.compilers("g++", "g++-9", "g++-11")
    machine.install("nvcc", '#!/bin/sh\n[ "$2" = "$PATH/g++" ]\n')
    assert host_compiler(machine.nvcc) == str(machine.folder / "g++")


@pytest.mark.parametrize(("names", "chosen"), [(("g++", "g++-9", "g++-11", "g++-12"), "g++-11"), (("g++-8",), "g++-8")])
def test_newest_that_nvcc_takes(machine, names, chosen):
    machine.compilers(*names)
    assert host_compiler(machine.nvcc) == str(machine.folder / chosen)


def test_none_that_nvcc_takes(machine):
    machine.compilers("g++", "g++-12")
    words = r"nvcc takes GCC up to 11, and g\+\+ is newer: install g\+\+-11 \(Debian: apt install g\+\+-11\)$"
    with pytest.raises(LookupError, match=words):
        host_compiler(machine.nvcc)


def test_none_at_all(machine):
    with pytest.raises(LookupError, match=r"^there is no g\+\+ for the host code of .* \(Debian: apt install g\+\+\)$"):
        host_compiler(machine.nvcc)


def test_named(machine):
    machine.compilers("g++", "g++-9", "g++-11", "c++")
    assert host_compiler(machine.nvcc, "g++-9") == str(machine.folder / "g++-9")
    with pytest.raises(LookupError, match=r"takes GCC up to 11, and c\+\+ is newer: .* and set CXX=g\+\+-11$"):
        host_compiler(machine.nvcc, "c++")
    with pytest.raises(LookupError, match=r"^there is no g\+\+-10, which CXX names"):
        host_compiler(machine.nvcc, "g++-10")


def test_broken_nvcc(machine):
    machine.compilers("g++")
    machine.install("nvcc", "#!/bin/sh\necho 'nvcc fatal   : no cicc' >&2; exit 1\n")
    with pytest.raises(LookupError, match=r"does not take g\+\+ for its host code: nvcc fatal   : no cicc$"):
        host_compiler(machine.nvcc)


def make(machine, *variables, goal="all"):
    commands = f"{machine.folder}:{os.defpath}"
    command = [shutil.which("make", path=os.defpath), "-n", goal, f"NVCC={machine.nvcc}", *variables]
    return subprocess.run(command, cwd=ROOT, env={"PATH": commands}, capture_output=True, text=True)


def test_make_and_load(machine, monkeypatch):
    """make and msops.load take the script's compiler and, for libraries of -O3, the same flags, and print the script's
    messages."""
    machine.compilers("g++", "g++-11")
    machine.gpus("9.0")
    monkeypatch.setenv("NVCC", machine.nvcc)
    (making,) = re.findall(r"^(.*) -MMD .* aot_kernels/knn.cu ", make(machine).stdout, re.MULTILINE)
    with pytest.raises(msops.CompileError) as caught:
        msops.load("answer", "int answer();\n", cache_folder=machine.folder / "cache")
    (loading,) = re.findall(r"\n(.*) -MMD ", str(caught.value))
    assert making.startswith(f"{machine.nvcc} -ccbin {machine.folder}/g++-11 -std=c++17 ")
    compiling = re.sub(r"-shared|-Xlinker \S+", "", making)  # only make links in this command
    made = set(compiling.replace("-Xcompiler ", "-Xcompiler=").split())
    assert made == set(loading.split()) - {f"-I{msops.get_include()}"}
    assert made >= {"--expt-relaxed-constexpr", "-Xcompiler=-Werror=return-type", "-gencode=arch=compute_90,code=sm_90"}
    words = r"nvcc takes GCC up to 11, and g\+\+ is newer: "
    done = make(machine, "CXX=g++")
    monkeypatch.setenv("CXX", "g++")
    with pytest.raises(msops.CompileError, match=f"^msops.load: .*{words}"):
        msops.load("answer", "int answer();\n", cache_folder=machine.folder / "cache")
    assert f"host_compiler.sh {machine.nvcc} g++\n" in done.stdout  # comes first, so that its failure ends make
    assert done.stdout.index("host_compiler.sh") < done.stdout.index("-MMD")


def code(machine, *arguments):
    """Returns the GPUs that gpu_code.sh names, and its other flags."""
    script = Path(msops.get_include(), "compile", "gpu_code.sh")
    done = subprocess.run(["sh", script, machine.nvcc, *arguments], capture_output=True, text=True)
    assert done.stderr == ""
    return [flag.replace("-gencode=arch=compute_", "").partition("code=")[2] or flag for flag in done.stdout.split()]


@pytest.mark.parametrize(
    ("at_hand", "archs"),
    [
        ((), ["compute_70"]),  # the oldest architecture that both msops and nvcc know
        (("9.0",), ["sm_90"]),
        (("9.0", "8.0", "9.0"), ["sm_80", "sm_90"]),
        (("8.6",), ["compute_80"]),  # nvcc knows an older architecture, but not this one
        (("12.0", "10.3", "8.0"), ["sm_80", "compute_90"]),
        (("6.0",), ["compute_70"]),
    ],
)
def test_gpus_at_hand(machine, at_hand, archs):
    machine.gpus(*at_hand)
    assert code(machine) == archs


def test_gpus_that_are_named(machine):
    machine.gpus("8.0")
    assert code(machine, "70 90") == ["sm_70", "sm_90"]
    assert code(machine, "90", "70 75") == ["sm_90", "compute_70", "compute_75"]
    assert code(machine, "", "75") == ["compute_75"]


def test_wheel(machine):
    """A wheel has code for more GPUs than this machine's, unless ARCHS says otherwise."""
    machine.compilers("g++", "g++-11")
    machine.gpus("7.0")
    for variables, archs in (((), ["sm_80", "sm_90", "compute_75"]), (("ARCHS=70",), ["sm_70"])):
        said = make(machine, *variables, goal="wheel").stdout
        (line,) = re.findall(r"^.* -MMD .* aot_kernels/add.cu .*$", said, re.MULTILINE)
        assert re.findall(r",code=(\w+)", line) == archs


def test_what_newer_nvccs_know(machine):
    machine.install("nvcc", "#!/bin/sh\necho compute_75; echo '  --threads <number>'\n")  # newer ones know sm_90a, too
    assert code(machine) == ["compute_75"]
    assert code(machine, "80 90", "75") == ["sm_80", "sm_90a", "compute_75", "--threads=0"]


def nvcc_11_8():
    """Returns the path of Debian's nvcc 11.8, or None."""
    path = shutil.which("nvcc", path="/usr/bin")
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
    return path if "release 11.8" in said and shutil.which("g++-11") else None


@pytest.mark.skipif(not nvcc_11_8(), reason="there is no nvcc 11.8 with g++-11")
def test_nvcc_11_8():
    with pytest.raises(LookupError, match=r"takes GCC up to 11, and g\+\+-12 is newer"):
        host_compiler(nvcc_11_8(), "g++-12")
    assert Path(host_compiler(nvcc_11_8())).name == "g++-11"


def test_nvcc_without_cuda_home(machine, monkeypatch):
    """An empty CUDA_HOME stands neither for the root folder nor for the current one."""
    monkeypatch.delenv("NVCC", raising=False)
    (machine.folder / "bin").mkdir()
    (machine.folder / "nvcc").rename(machine.folder / "bin" / "nvcc")
    monkeypatch.chdir(machine.folder)
    monkeypatch.setenv("CUDA_HOME", "")
    assert find_nvcc() == ""
    monkeypatch.delenv("CUDA_HOME")
    assert find_nvcc() == ""
    monkeypatch.setenv("CUDA_HOME", str(machine.folder))
    assert find_nvcc() == str(machine.folder / "bin" / "nvcc")


def test_make_without_cuda_home(machine):
    """make does not take /bin/nvcc where CUDA_HOME is not set. The test would see that where there is a /bin/nvcc."""
    machine.compilers("g++")
    (machine.folder / "bin").mkdir()
    (machine.folder / "nvcc").rename(machine.folder / "bin" / "nvcc")
    command = [shutil.which("make", path=os.defpath), "--dry-run", "all"]
    for variables in ({}, {"CUDA_HOME": ""}, {"CUDA_HOME": str(machine.folder)}):
        environment = {"PATH": str(machine.folder), **variables}
        said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
        assert ("msops is built for the CPU only" in said) == (variables.get("CUDA_HOME", "") == "")
        assert (f"{machine.folder}/bin/nvcc -ccbin" in said) == (variables.get("CUDA_HOME", "") != "")
