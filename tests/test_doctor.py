"""`python -m msops doctor`, with one thing broken. What a driver or nvcc says comes from commands on the PATH;
what is installed, from the working folder, which Python searches first."""

import json
import shutil
import struct
import subprocess
import sys

import pytest

from child import ROOT, environment
from msops import doctor
from msops.library import _find_nvcc

OPERATORS = ["add", "depthwise_conv2d", "lltm", "sigmoid", "trilinear_interpolation"]
GPU = """
case "$1" in
  --query-gpu=*) echo "NVIDIA H200, 9.0, 580.65.06" ;;
  *) echo "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |" ;;
esac
"""
NVCC = """
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  --list-gpu-arch) echo compute_75; echo compute_90 ;;
esac
"""
SIGMOID = """
#define ENTRY extern "C" __attribute__((visibility("default"))) int
ENTRY SigmoidForward() { %s }
ENTRY SigmoidBackward() { return 0; }
ENTRY SigmoidBackwardBackward() { return 0; }
"""


class Patient:
    """A copy of the package in a folder of its own, and an environment without GPU, nvcc and CUDA 11."""

    def __init__(self, folder):
        self.folder, self.commands = folder, folder / "commands"
        self.commands.mkdir()
        shutil.copytree(ROOT / "msops", folder / "msops", ignore=shutil.ignore_patterns("__pycache__"))
        self.command("ldd", 'exec /usr/bin/ldd "$@"')
        unset = {"CUDA_HOME", "LD_LIBRARY_PATH", "NVCC"}
        self.environment = {name: value for name, value in environment().items() if name not in unset}
        self.environment |= {"PATH": str(self.commands), "HOME": str(folder)}

    def command(self, name, script):
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def library(self, name, source="", fat_binary=b""):
        """Takes the place of one of the package's."""
        path = self.folder / "msops" / "lib" / f"{name}.so"
        path.unlink(missing_ok=True)
        compiler = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        subprocess.run(compiler, input=source, text=True, check=True)
        path.write_bytes(path.read_bytes() + fat_binary)

    def examine(self, *options, before=":"):
        """The findings by what they are of, and the exit status."""
        command = f'{before}\nexec "$0" "$@"'
        without = {"PYTHONPATH"} if "-S" in options else ()  # where MindSpore may be
        done = subprocess.run(
            ["/bin/sh", "-c", command, sys.executable, *options, "-m", "msops", "doctor", "--json"],
            cwd=self.folder,
            env={name: value for name, value in self.environment.items() if name not in without},
            capture_output=True,
            text=True,
        )
        assert done.stderr == ""
        report = json.loads(done.stdout)
        assert done.returncode == (0 if report["devices"] else 1)
        findings = {}
        for finding in report["findings"]:
            findings.setdefault(finding.pop("what"), []).append(finding)
        assert [device for device in ("CPU", "GPU") if findings[device][0]["state"] == "ok"] == report["devices"]
        return {what: found[0] if len(found) == 1 else found for what, found in findings.items()}

    def of_library(self, name):
        """The finding of a library, in an environment where MindSpore is not loaded."""
        found = self.examine("-S")["libraries"]
        (finding,) = (one for one in (found if isinstance(found, list) else [found]) if name in one["text"])
        return finding


@pytest.fixture
def patient(tmp_path):
    return Patient(tmp_path)


def wrong(finding, text):
    assert finding["state"] == "wrong"
    assert text in finding["text"]
    return finding["mend"]


def fat_binary(*parts):
    """Of (kind, architecture): kind 1 is PTX, 2 machine code."""
    entries = b"".join(struct.pack("<HHIQ12xI32x8x", kind, 0x101, 64, 8, arch) for kind, arch in parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_healthy(patient):
    findings = patient.examine()
    for what in ("Python", "MindSpore", "NumPy", "SciPy", "libraries", "CPU"):
        assert findings[what]["state"] == "ok", findings[what]
    for what in ("driver", "nvcc", "GPU"):
        assert findings[what]["state"] == "none"
    assert findings["MindSpore"]["text"].startswith("2.")
    text = findings["libraries"]["text"]
    assert text.startswith(f"{', '.join(OPERATORS)}: for the CPU")
    assert "C++ compiler " in text


def test_screen(patient):
    (patient.folder / "msops" / "lib" / "add.so").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "msops", "doctor"],
        cwd=patient.folder,
        env=patient.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1] == "msops works on no device."
    at = lines.index("wrong  libraries  add: not built")
    assert "pip install" in lines[at + 1]
    assert lines[at + 2].startswith("ok     libraries  depthwise_conv2d, lltm, ")
    assert len(lines) < 30
    assert "export" not in done.stdout  # of what is not wrong


def test_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 8, 20))
    finding = doctor._python()
    assert "must be 3.9 to 3.12" in finding.text
    assert finding.state == "wrong"


def test_nothing_installed(patient):
    findings = patient.examine("-S")
    (mend,) = wrong(findings["MindSpore"], "not installed")
    assert mend.endswith("-m pip install 'mindspore>=2.7,<2.11' 'numpy<2' 'scipy<1.14'")
    wrong(findings["NumPy"], "not installed")
    wrong(findings["SciPy"], "not installed")
    wrong(findings["CPU"], "import mindspore: ModuleNotFoundError: No module named 'mindspore'")
    assert "CUDA 11" not in findings


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libx.so: wrong')", "import mindspore: ImportError: libx.so: wrong"),
        ("import os; os.kill(os.getpid(), 11)", "import mindspore: crash: SIGSEGV"),
        ("import os; os._exit(0)", "import mindspore: the process ended early"),
    ],
)
def test_mindspore_that_cannot_be_imported(patient, code, error):
    (patient.folder / "mindspore.py").write_text(code)
    findings = patient.examine()
    (mend,) = wrong(findings["MindSpore"], "cannot be imported")
    assert "--force-reinstall" in mend
    wrong(findings["CPU"], error)


@pytest.mark.parametrize(("name", "version", "bound"), [("NumPy", "2.0.0", "2"), ("SciPy", "1.14.0rc1", "1.14")])
def test_version_trap(patient, name, version, bound):
    info = patient.folder / f"{name.lower()}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.lower()}\nVersion: {version}\n")
    (mend,) = wrong(patient.examine("-S")[name], f"{version}: MindSpore needs one below {bound}")
    assert mend.endswith(f"-m pip install '{name.lower()}<{bound}'")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.lower()}\nVersion: 1.13.9\n")
    assert patient.examine("-S")[name]["state"] == "ok"


def test_missing_library(patient):
    (patient.folder / "msops" / "lib" / "sigmoid.so").unlink()
    findings = patient.examine()
    added, missing = findings["libraries"]
    assert added["state"] == "ok"
    (mend,) = wrong(missing, "sigmoid: not built")
    assert "--force-reinstall" in mend
    wrong(findings["CPU"], "msops.sigmoid: ImportError: msops cannot load the library sigmoid: ")


def test_broken_libraries(patient):
    library = patient.folder / "msops" / "lib" / "lltm.so"
    content = library.read_bytes()
    library.write_bytes(b"")
    wrong(patient.of_library("lltm"), "lltm: cannot be loaded: file too short")
    library.write_bytes(content[: len(content) // 2])
    wrong(patient.of_library("lltm"), "lltm: cannot be loaded: crash: SIG")


def test_rebuild_in_source_folder(patient):
    (patient.folder / "Makefile").touch()
    (patient.folder / "msops" / "lib" / "lltm.so").unlink()
    assert wrong(patient.of_library("lltm"), "not built") == [f"make -C {patient.folder} -B all"]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "; not for the GPU"),
        ([(2, 80), (2, 86)], "; not for sm_90"),
        ([(2, 100), (1, 100)], "; not for sm_90"),
        ([(2, 80), (1, 75)], None),
        ([(2, 80), (2, 90)], None),
    ],
)
def test_architectures(patient, parts, text):
    patient.command("nvidia-smi", GPU)
    patient.command("nvcc", NVCC)
    patient.library("add", 'asm(".ident \\"msops: nvcc 13.0, C++ compiler 14\\"");', fat_binary(*parts) * bool(parts))
    finding = patient.of_library("add")
    built = "".join(f", sm_{arch}" for kind, arch in parts if kind == 2)
    built += "".join(f", PTX {arch}" for kind, arch in parts if kind == 1)
    assert f"add: for the CPU{built}; by nvcc 13.0, C++ compiler 14" in finding["text"]
    if text is None:
        assert finding["state"] == "ok"
    else:
        assert len(wrong(finding, text)) == 1


def test_architectures_as_nvcc_writes_them(tmp_path):
    nvcc = _find_nvcc()
    if doctor._nvcc([90]).state != "ok":  # such as one that only tells MindSpore a release
        pytest.skip("no nvcc for sm_90")
    (tmp_path / "a.cu").write_text("__global__ void f(float* x) { *x = 1; }")
    code = [
        f"-gencode=arch=compute_{arch},code={form}_{arch}" for arch, form in [(80, "sm"), (90, "sm"), (80, "compute")]
    ]
    subprocess.run([nvcc, "-shared", "-Xcompiler=-fPIC", *code, "a.cu", "-o", "a.so"], cwd=tmp_path, check=True)
    assert doctor._architectures((tmp_path / "a.so").read_bytes()) == ([80, 90], [80])


def test_driver_older_than_the_libraries(patient):
    patient.command("nvidia-smi", GPU.replace("CUDA Version: 13.0", "CUDA Version: 12.4"))
    patient.library("add", 'asm(".ident \\"msops: nvcc 13.0, C++ compiler 14\\"");', fat_binary((2, 90)))
    wrong(patient.of_library("add"), "; the driver is for CUDA up to 12.4")


def test_driver(patient):
    patient.command("nvidia-smi", GPU)
    finding = patient.examine("-S")["driver"]
    assert finding == {"state": "ok", "text": "580.65.06 for CUDA up to 13.0; NVIDIA H200 (sm_90)", "mend": []}
    patient.command("nvidia-smi", 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18')
    wrong(patient.examine("-S")["driver"], "nvidia-smi finds no GPU: Failed to initialize NVML: Driver/library version")
    patient.command("nvidia-smi", GPU.replace("9.0", "6.1"))
    wrong(patient.examine("-S")["driver"], "must be sm_70 or newer")


def test_nvcc(patient):
    def nvcc():
        return patient.examine("-S")["nvcc"]

    assert nvcc()["state"] == "none"
    patient.command("nvidia-smi", GPU)
    assert len(wrong(nvcc(), "none on the PATH or in CUDA_HOME")) == 1
    patient.library("add")
    assert len(wrong(patient.of_library("add"), "not for the GPU")) == 2  # nvcc, then make
    patient.command("nvcc", NVCC)
    assert nvcc() == {"state": "ok", "text": f"13.0, {patient.commands / 'nvcc'}", "mend": []}
    patient.command("nvcc", NVCC.replace("compute_75; echo compute_90", "compute_100"))
    wrong(nvcc(), "is too new for sm_90")
    patient.command(
        "nvcc", 'echo "Cuda compilation tools, release 11.6, V11.6.0"'
    )  # as in a CUDA_HOME without compiler
    wrong(nvcc(), "does not compile")
    patient.environment["NVCC"] = ""
    assert nvcc() == {"state": "none", "text": nvcc()["text"], "mend": ["unset NVCC"]}


def test_gpu_without_cuda11(patient):
    """MindSpore itself, on what seems to be a GPU; a real one is hidden, for which CUDA 11 may be there."""
    patient.environment["CUDA_VISIBLE_DEVICES"] = ""
    patient.command("nvidia-smi", GPU)
    findings = patient.examine()
    assert findings["CPU"]["state"] == "ok"
    wrong(findings["GPU"], "msops.sigmoid: ")
    wrong(findings["CUDA_HOME"], "not set")


def test_cuda11(patient):
    """A backend for CUDA 11.1 and one for 11.6, which link two libraries that no machine has. Each command mends."""
    plugins = patient.folder / "mindspore" / "lib" / "plugin"
    plugins.mkdir(parents=True)
    (patient.folder / "mindspore" / "__init__.py").touch()
    wheels = {"cublas": "libcublas.so.0", "cudnn": "libcudnn.so.0"}
    for name, library in wheels.items():
        folder = patient.folder / "not yet" / name / "lib"
        folder.mkdir(parents=True)
        build = ["g++", "-shared", "-fPIC", "-x", "c++", "/dev/null"]
        subprocess.run([*build, f"-Wl,-soname={library}", "-o", folder / library], check=True)
    linked = [str(patient.folder / "not yet" / name / "lib" / library) for name, library in wheels.items()]
    for version in ("11.1", "11.6"):
        # -x none: what follows is no C++.
        of = linked if version == "11.6" else linked[:1]
        output = plugins / f"libmindspore_gpu.so.{version}"
        subprocess.run([*build, "-x", "none", "-Wl,--no-as-needed", *of, "-o", output], check=True)

    assert patient.examine()["CUDA 11"]["state"] == "none"
    patient.command("nvidia-smi", GPU)
    findings = patient.examine()
    assert findings["MindSpore"]["text"].endswith("backends: CPU, GPU with CUDA 11.1, GPU with CUDA 11.6")
    wrong(findings["CUDA_HOME"], "not set")
    install, _ = wrong(findings["CUDA 11"], "misses libcublas.so.0, libcudnn.so.0")
    assert install.endswith("-m pip install 'msops[gpu]'")
    install, _ = wrong(patient.examine("-S")["CUDA 11"], "misses")
    assert install.endswith("-m pip install '.[gpu]'  # in msops' source folder")

    (patient.folder / "not yet").rename(patient.folder / "nvidia")
    (patient.folder / "nvidia" / "__init__.py").touch()
    (found,) = wrong(patient.examine()["CUDA 11"], "misses")
    folders = [str(patient.folder / "nvidia" / name / "lib") for name in wheels]
    assert found == f'export LD_LIBRARY_PATH="{":".join(folders)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
    patient.environment["PATH"] += ":/usr/bin:/bin"  # mkdir and chmod
    home = "\n".join(findings["CUDA_HOME"]["mend"])
    findings = patient.examine(before=f"{home}\n{found}")
    assert findings["CUDA 11"] == {"state": "ok", "text": f"2 libraries in {', '.join(folders)}", "mend": []}
    assert findings["CUDA_HOME"]["state"] == "ok"

    path = patient.folder / "home" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    patient.environment["CUDA_HOME"] = str(patient.folder / "home")
    for release, count in [("11.8", 2), ("11.3", 1)]:
        path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.1"\n')
        findings = patient.examine(before=found)
        assert findings["CUDA_HOME"]["text"] == f"{patient.folder}/home, of CUDA {release}"
        assert findings["CUDA 11"]["text"].startswith(f"{count} libraries in ")
    path.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.8, V12.8.1"\n')
    wrong(patient.examine()["CUDA_HOME"], "home/bin/nvcc does not tell CUDA 11.6")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("*(volatile int*)0 = 0; return 0;", "crash: SIGSEGV"),
        ("return 3;", "RuntimeError: "),
        ("return 0;", "ValueError: "),
    ],
)
def test_operator_that_fails(patient, code, error):
    patient.library("sigmoid", SIGMOID % code)
    findings = patient.examine()
    assert all(finding["state"] == "ok" for finding in findings["libraries"])
    wrong(findings["CPU"], f"msops.sigmoid: {error}")
