"""Tests of `python -m msops doctor`: the whole report, Python, MindSpore, and an operator that runs."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

import msops
from child import ROOT, environment
from matrix import interpreter
from msops import pythons
from msops.__main__ import main
from msops.commands import doctor
from msops.commands.doctor import finding, graphs, kernels, modules, smoke
from patient import INSTALL, MAY_NOT, NEW, REINSTALL, UNKNOWN, gcc, nvcc, smi


def run_doctor(*options, program=("-m", "msops"), python=sys.executable, **variables):
    command = [python, *program, "doctor", *options]
    return subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True)


def test_this_environment():
    """The doctor reports on this environment, with the real MindSpore."""
    done = run_doctor(NVCC="")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(("msops works on CPU.\n", "msops works on CPU and GPU.\n"))
    state = {what: state for state, what, _ in lines[:-1]}
    text = {what: text for _, what, text in lines[:-1]}
    assert lines[0] == ["ok", "msops", f"{msops.__version__}, {ROOT / 'msops'}"]
    assert {state[what] for what in ("Python", "MindSpore", "NumPy", "SciPy", "cache", "libraries", "CPU")} == {"ok"}
    assert text["MindSpore"].startswith("mindspore 2.")
    names = sorted(path.stem for path in (ROOT / "aot_kernels").glob("*.cu"))
    assert [name for line in lines if line[1] == "libraries" for name in line[2].split(":")[0].split(", ")] == names
    assert "export" not in done.stdout  # nothing is wrong, so that no command is needed


def test_nothing_installed(patient):
    """A Python without site-packages still gets the report as JSON, and exit status 1."""
    done = run_doctor("--json", program=("-S", "-m", "msops"), PYTHONPATH="", PATH=str(patient.commands))
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (done.returncode, report["devices"]) == (1, [])
    found = {finding["what"]: finding for finding in report["findings"]}
    for what in ("NumPy", "SciPy"):
        assert found[what]["text"] == "not installed"
    wanted = f"'mindspore>=2.7,<2.11' {BOUNDS}"
    assert found["MindSpore"] == {
        "what": "MindSpore", "state": "wrong", "text": "not installed", "mend": [f"{INSTALL} {wanted}"]
    }  # fmt: skip
    assert found["CPU"]["text"] == "import mindspore: ModuleNotFoundError: No module named 'mindspore'"
    assert [found[what]["state"] for what in ("driver", "nvcc", "GPU")] == ["none"] * 3
    assert "CUDA 11" not in found


def test_python_before_what_msops_can_be_read_by(tmp_path):
    """A Python that is too old gets as far as the line that says so: what it reads until then has no newer syntax."""
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
        tree = ast.parse((ROOT / "msops" / f"{module}.py").read_text(), feature_version=(3, 7))
        assert "annotations" in [name.name for node in tree.body[:2] for name in getattr(node, "names", ())]


@pytest.mark.parametrize("version", ["3.7", "3.8"])
def test_older_python(version):
    python = interpreter(version)
    if not python:
        pytest.skip(f"there is no Python {version}")
    done = run_doctor(python=python, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0].endswith(f"{python}: must be 3.9 to 3.12")


def test_python_that_is_too_new(patient, monkeypatch):
    """pip has no MindSpore for that Python, so that only another Python helps."""
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    patient.command("python3.12", "exit 1")  # has no venv
    patient.command("python3.10", "exit 0")
    _, python, *others = [*doctor.examine()]
    assert python.text.endswith("must be 3.9 to 3.12")
    assert python.mend == (
        "python3.10 -m venv .venv && .venv/bin/pip install '.[mindspore]'  # in msops' source folder",
    )
    assert {finding.mend for finding in others} == {()}
    patient.command("python3.10", "exit 1")
    assert pythons.another() == "# install Python 3.12: https://www.python.org/downloads"


BOUNDS = "'numpy<2' 'scipy<1.14'"  # without them pip installs the newest that MindSpore's wheel allows
LIB = "ImportError('{}: cannot open shared object file: No such file or directory')"
CUDART, GOMP = LIB.format("libcudart.so.11.0"), LIB.format("libgomp.so.1")
PILLOW = """AttributeError("module 'PIL.Image' has no attribute 'ANTIALIAS'")"""


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
        ("mindspore==2.9.0", "import asttokens", f"{INSTALL} mindspore==2.9.0 {BOUNDS}"),
        ("mindspore-gpu==1.10.0", "import PIL", f"{INSTALL} mindspore-gpu==1.10.0 {BOUNDS} 'pillow<10'"),
        ("mindspore-ascend==1.10.0", "raise ImportError('libx.so: wrong')", f"{REINSTALL} mindspore-ascend==1.10.0"),
        ("mindspore==2.9.0", "import os; os.kill(os.getpid(), 11)", f"{REINSTALL} mindspore==2.9.0"),
        ("mindspore==2.9.0", "import mindspore._c_expression", f"{REINSTALL} mindspore==2.9.0"),
        ("mindspore==2.9.0", "import os; os._exit(0)", f"{REINSTALL} mindspore==2.9.0"),
    ],
)
def test_mindspore_that_cannot_be_imported(patient, requirement, code, mend):
    """The doctor's commands do not replace it with another version."""
    patient.install(*requirement.split("=="), code)
    tried = smoke.run("CPU")
    state, text, mends = modules.mindspore(tried)[1:]
    assert state == tried.finding.state == "wrong"
    assert text.startswith(f"{requirement.replace('==', ' ')} cannot be imported: ")
    assert mends[0] == mend
    again = f"{sys.executable} -m msops doctor  # tells what is then to do"  # `python` may be another one
    assert all(command in (mend, again) for command in mends)


def test_package_that_is_damaged(patient):
    """What lacks a file, or has one that was cut short, is installed again, and not MindSpore that requires it."""

    def install(name, requires=""):
        (patient.site / name).mkdir(exist_ok=True)
        (patient.site / name / "core.py").write_text("12345")
        patient.install(name, "1.0", files=[f"{name}/core.py,,5", f"{name}/__pycache__/core.pyc,,9", "../bin/f,,9"])
        info = patient.site / f"{name}-1.0.dist-info"
        (info / "RECORD").write_text((info / "RECORD").read_text().replace(",,\n", "\n"))
        with (info / "METADATA").open("a") as file:
            file.write(requires)
        return patient.site / name / "core.py"

    patient.install("mindspore", "2.9.0", f"raise {GOMP}")
    with (patient.site / "mindspore-2.9.0.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: one >=1.0\n")
    one, two = install("one", "Requires-Dist: two\nRequires-Dist: three ; extra == 'test'\n"), install("two")
    install("three").unlink()
    system = ("apt install libgomp1  # elsewhere the package that has libgomp.so.1",)
    tried = smoke.run("CPU")
    assert modules.mindspore(tried).mend == system
    two.write_text("123")
    assert modules.mindspore(tried).mend == (f"{REINSTALL} two==1.0",)
    one.unlink()
    assert modules.mindspore(tried).mend == (f"{REINSTALL} one==1.0 two==1.0",)
    one.write_text("12345")
    two.write_text("12345")
    assert modules.mindspore(tried).mend == system
    two.write_text("123")
    lacks = smoke.Smoke(finding.Finding("CPU", "wrong", ""), "2.9.0", "RuntimeError: no")
    assert modules.device(lacks).mend == (f"{REINSTALL} two==1.0",)
    patient.install("mindspore_gpu", "1.10.0", "raise ImportError")  # has a line that comes first
    assert modules.device(lacks).mend == ()


def test_package_that_mindspore_imports_later(patient, monkeypatch):
    """MindSpore 1.10 is imported without asttokens, which its first operator needs."""
    patient.install("mindspore-gpu", "1.10.0", "__version__ = '1.10.0'")
    error = "ModuleNotFoundError: No module named 'asttokens'"
    monkeypatch.setattr(smoke, "output", lambda *command, **settings: f"imported 1.10.0\nerror {error}")
    for name, below in {"numpy": "1.26.4", "scipy": "1.13.1"}.items():
        patient.install(name, below)
    on_cpu = {finding.what: finding for finding in doctor.examine()}["CPU"]
    mend = f"{INSTALL} mindspore-gpu==1.10.0 {BOUNDS} 'pillow<10'"
    assert on_cpu == ("CPU", "wrong", f"msops: {error}", (mend,))


def test_one_library_that_is_missing(patient, monkeypatch, capsys):
    """The last line does not say that all is well where a device works, but something is wrong."""
    monkeypatch.setattr(smoke, "output", lambda *command, **settings: "imported 2.9.0\npassed sigmoid")
    patient.install("msops", "0.1.0", files=["msops/lib/lltm.so"])
    monkeypatch.setattr(sys, "argv", ["msops", "doctor"])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr().out
    assert "wrong  libraries  lltm: not built" in printed
    assert printed.endswith("msops works on CPU; see what is wrong above.\n")
    assert not caught.value.code


def test_library_of_cuda_that_is_there_but_not_found(patient):
    patient.install("mindspore-gpu", "1.10.0", f"raise {CUDART}")
    folder = patient.site / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.11.0").touch()
    (mend,) = modules.mindspore(smoke.run("CPU")).mend
    patient.do(mend)
    assert os.environ["LD_LIBRARY_PATH"] == str(folder)


def test_two_mindspores(patient):
    """The doctor finds two distributions, as when 2.9.0 was installed over mindspore-gpu 1.10.0."""
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


def test_two_mindspores_without_top_level(patient):
    """The lists of files tell, too, which distributions have the package. One of both works."""
    for name, version in {"mindspore": "2.9.0", "mindspore-gpu": "1.10.0"}.items():
        patient.install(name, version, files=["mindspore/__init__.py"])
    patient.install("mindspore-lite", "2.9.0", files=["mindspore_lite/__init__.py"])
    works = smoke.Smoke(finding.Finding("CPU", "ok", ""), "2.9.0", "")
    state, text, mend = modules.mindspore(works)[1:]
    assert (state, len(mend)) == ("wrong", 2)
    assert text.endswith(" overwrite each other")
    assert "lite" not in text


def test_variables_that_break_mindspore(patient, monkeypatch):
    """The doctor finds which variables keep the operator from running, one or two, and names no reinstallation."""
    for name in ("GLOG_v", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "wrong")
    patient.install("mindspore", "2.9.0")
    for guilty in (["GLOG_v"], ["GLOG_v", "LD_LIBRARY_PATH"]):

        def tried(*command, guilty=guilty, env=None, **settings):
            bad = any(name in (os.environ if env is None else env) for name in guilty)
            return "error ValueError: wrong level" if bad else "imported 2.9.0\npassed sigmoid"

        monkeypatch.setattr(smoke, "output", tried)
        on_cpu = smoke.run("CPU")
        assert on_cpu.finding == ("CPU", "wrong", "import mindspore: ValueError: wrong level", ())
        mend = modules.mindspore(on_cpu).mend
        assert sorted(mend) == [f"unset {name}" for name in guilty]
    patient.do(*mend)
    assert smoke.run("CPU").finding.state == "ok"


def test_each_command_once(monkeypatch):
    """A command is printed where it is needed first, and nothing is installed before what hides it is moved."""
    pip, unset, move = finding.pip("install", "x"), "unset LD_LIBRARY_PATH", "mv -n /x.py /my_x.py"

    def commands(*mends):
        found = [finding.Finding("x", "wrong", "", mend) for mend in mends]
        monkeypatch.setattr(doctor, "_look", lambda python: iter(found))
        return [each.mend for each in doctor.examine()]

    assert commands((unset,), (unset, pip), (pip,), ("make -C x all",)) == [(unset,), (pip,), (), ("make -C x all",)]
    assert commands((f"NVCC= {pip}",), (f"ARCHS='80 90' PTX=75 {pip}",)) == [(f"NVCC= {pip}",), ()]
    for first in (move, "unset PYTHONPATH"):
        assert commands((first,), (unset, pip), ("make -C x all",)) == [(first,), (unset, finding.AGAIN), ()]


def test_too_few_open_files(patient, monkeypatch):
    """Many public names fail, each with an error of its own: one line has one command, which installs nothing."""
    errors = tuple((f"op{n}", f"OSError: [Errno 24] Too many open files: 'op{n}.py'") for n in range(26))
    tried = smoke.Smoke(finding.Finding("CPU", "ok", ""), "2.9.0", "", errors)
    (line,) = modules.operators(tried)
    assert line.text.startswith("op0, op1, ")
    assert line.text.endswith("OSError: [Errno 24] Too many open files: 'op0.py'; and 25 other errors")
    (mend,) = line.mend
    shell = f"ulimit -S -n 20\n{mend}\nulimit -S -n"
    assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout == "1024\n"
    patient.install("mindspore", "2.9.0", "raise OSError('[Errno 24] Too many open files')")
    assert modules.mindspore(smoke.run("CPU")).mend == (mend,)
    monkeypatch.setattr(finding.resource, "getrlimit", lambda which: (20, finding.resource.RLIM_INFINITY))
    assert finding.few_files("Too many open files") == (mend,)
    monkeypatch.setattr(finding.resource, "getrlimit", lambda which: (20, 20))
    assert finding.few_files("Too many open files") == (
        "# open another shell: the processes of this one may open 20 files at most",
    )


def test_one_operator_that_is_broken(tmp_path, monkeypatch):
    """The device works, by another operator if need be, and the names that are broken have a line."""
    monkeypatch.setenv("MSOPS_SIGMOID", str(tmp_path / "lost.so"))
    on_cpu = smoke.run("CPU")
    assert on_cpu.finding == ("CPU", "ok", "msops.silu works", ())
    assert [name for name, _ in on_cpu.broken] == ["Sigmoid", "sigmoid"]
    (line,) = modules.operators(on_cpu)
    assert line.state == "wrong"
    assert line.text.startswith("Sigmoid, sigmoid: ImportError: msops cannot load the library sigmoid: ")


def test_module_that_is_missing(tmp_path):
    """The package is installed again where a module of it is missing, also if the doctor itself needs it."""
    site, wheel = tmp_path / "site", tmp_path / "msops.whl"
    wheel.touch()
    shutil.copytree(ROOT / "msops", site / "msops", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    info = site / "msops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: msops\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri()}))
    paths = sorted(path for path in site.glob("msops/**/*.py*") if path.is_file())
    (info / "RECORD").write_text("".join(f"{path.relative_to(site)},,\n" for path in paths))

    def examined():
        command = [*MAY_NOT, sys.executable, "-S", "-m", "msops", "doctor"]
        done = subprocess.run(command, cwd=site, env={"PATH": "/bin"}, capture_output=True, text=True)
        assert done.returncode == 1
        return done

    (site / "msops" / "operators" / "silu.py").unlink()
    line, mend = examined().stdout.splitlines()[:2]
    assert line.startswith("wrong  msops      0.1.0.dev0, ")
    assert line.endswith("; operators/silu.py: not as pip installed it")
    assert mend.split() == f"{REINSTALL} {wheel}".split()
    (site / "msops" / "core" / "build.py").unlink()
    line, mend = examined().stderr.splitlines()
    assert line == "wrong  msops      core/build.py, operators/silu.py: not as pip installed it"
    assert mend.split() == f"{REINSTALL} {wheel}".split()
    (site / "msops" / "core" / "build.py").write_text("what_is_no_name")
    assert examined().stderr.splitlines() == ["wrong  msops      operators/silu.py: not as pip installed it", mend]
    core = site / "msops" / "core"
    core.chmod(0)
    line, mend = examined().stderr.splitlines()
    assert (line, mend.strip()) == (
        f"wrong  msops      {core}: may not be read", f"chmod -R a+rX {core}  # as root or its owner"
    )  # fmt: skip
    subprocess.run(["sh", "-c", mend], check=True)
    assert "not as pip installed it" in examined().stderr


@pytest.mark.parametrize("version", ["2.11.0", "1.9.0", "2.3.0rc1"])
def test_mindspore_that_nobody_tried(patient, version):
    patient.install("mindspore", version, f"__version__ = {version!r}")
    _, text, mend = modules.mindspore(smoke.Smoke(finding.Finding("CPU", "wrong", ""), version, ""))[1:]
    assert text == f"mindspore {version}, backends: CPU; msops was tried with 1.10, 2.0, 2.7, 2.8, 2.9, 2.10 only"
    assert mend == ()


def test_mindspore_of_no_distribution(patient):
    """The doctor reports a MindSpore that belongs to no distribution, such as one built from source."""
    package = patient.site / "mindspore" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('no')")
    assert modules.mindspore(smoke.run("CPU"))[1:] == (
        "wrong", f"in {package.parent} {UNKNOWN} cannot be imported: ImportError: no", ()
    )  # fmt: skip
    package.with_name("version.py").write_text("__version__ = '2.9.0'\n")
    assert modules.mindspore(smoke.run("CPU"))[1:] == (
        "wrong",
        f"mindspore 2.9.0 in {package.parent} {UNKNOWN} cannot be imported: ImportError: no",
        (f"{REINSTALL} mindspore==2.9.0",),
    )
    works = smoke.Smoke(finding.Finding("CPU", "ok", ""), "2.9.0", "")
    assert modules.mindspore(works).text == f"mindspore 2.9.0 in {package.parent} {UNKNOWN}, backends: CPU"


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


def test_gpu_that_msops_has_no_kernels_for(patient):
    """The doctor names no command, since neither nvcc nor CUDA 11 would help."""
    patient.command("nvidia-smi", smi("6.1"))
    patient.command("nvcc", nvcc(*NEW))
    patient.command("g++", "echo 12.2.0")
    patient.library("add")
    found = [*doctor.examine()]
    assert [finding.what for finding in found if finding.mend and "pip install" not in finding.mend[0]] == []
    assert found[-3:] == [(name, "none", "not tried", ()) for name in ("GPU", "graphs", "kernels")]


@pytest.mark.parametrize(
    ("printed", "state", "text"),
    [
        ("a warning\nrecorded", "ok", "msops.cuda_graph works"),
        ("error cuda_graph needs MindSpore 2.10", "none", "cuda_graph needs MindSpore 2.10"),
        ("", "none", "the process ended early"),
        ("no answer in 300 s", "none", "no answer in 300 s"),
    ],
)
def test_cuda_graphs(monkeypatch, printed, state, text):
    monkeypatch.setattr(graphs, "output", lambda *command, seconds: printed)
    assert graphs.finding(finding.Finding("GPU", "ok", "")) == ("graphs", state, text, ())


@pytest.mark.parametrize(
    ("printed", "state", "text"),
    [
        (
            "a warning\nreplaced 389",
            "ok",
            "msops.patch_mindspore replaces 389 of MindSpore's functions that launch kernels",
        ),
        ("replaced 0", "none", "msops.patch_mindspore leaves MindSpore's kernels as they are"),
        ("", "none", "msops.patch_mindspore leaves MindSpore's kernels as they are"),
    ],
)
def test_kernels(monkeypatch, printed, state, text):
    monkeypatch.setattr(kernels, "output", lambda *command, seconds: printed)
    assert kernels.finding(finding.Finding("GPU", "ok", "")) == ("kernels", state, text, ())


SIGMOID = """
#define ENTRY __attribute__((visibility("default"))) int
ENTRY SigmoidForward(void) { %s }
ENTRY SigmoidBackward(void) { return 0; }
ENTRY SigmoidBackwardBackward(void) { return 0; }
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("*(volatile int*)0 = 0; return 0;", "crash: SIGSEGV"),
        ("return 0;", "ValueError: sigmoid gave "),
    ],
)
def test_operator_that_fails(tmp_path, monkeypatch, code, error):
    gcc("-o", tmp_path / "sigmoid.so", source=SIGMOID % code)
    for name in {*os.environ} - {"HOME", "PATH", "LD_LIBRARY_PATH"}:  # few suspects take few processes
        monkeypatch.delenv(name)
    monkeypatch.setenv("MSOPS_SIGMOID", str(tmp_path / "sigmoid.so"))
    tried = smoke.run("CPU")
    assert tried.finding.text.startswith(f"msops: {error}")
    assert tried.culprits == ("MSOPS_SIGMOID",)


@pytest.mark.wide
def test_gpu_without_cuda11():
    """MindSpore itself is asked for a GPU where there is none. A real GPU is hidden, since its CUDA 11 may be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        tried = smoke.run("GPU")
    assert tried.finding.state == "wrong"
    assert tried.finding.text.startswith("msops: ")
    assert tried.version
