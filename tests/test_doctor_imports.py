"""Tests what the doctor says of files and folders that Python imports in the place of what msops needs."""

import ast
import re
import subprocess
import sys
import textwrap

import pytest

from child import ROOT
from matrix import interpreter
from msops import files
from msops.commands.doctor import modules, smoke
from patient import INSTALL, REINSTALL, UNKNOWN


@pytest.mark.parametrize("title", ["MindSpore", "NumPy", "SciPy"])
@pytest.mark.parametrize("name", ["{}.py", "{}/__init__.py"])
def test_file_that_hides_a_package(patient, monkeypatch, title, name):
    """A file in the working folder has a package's name. The command gives it another one, and overwrites nothing."""
    package = title.lower()
    (patient.site / package).mkdir()
    (patient.site / package / "__init__.py").touch()
    patient.install(package, "1.0.0", files=[f"{package}/__init__.py"])
    folder = patient.folder / "a folder"
    path = folder / name.format(package)
    path.parent.mkdir(parents=True)
    path.touch()
    (folder / f"my_{name.format(package).partition('/')[0]}").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    state, text, mend = modules.hidden(title)[1:]
    assert state == "wrong"
    assert text == f"{package} 1.0.0, but {path} is imported instead"
    patient.do(*mend)
    assert modules.hidden(title) is None
    assert (folder / f"my_my_{name.format(package)}").exists()


@pytest.mark.parametrize("other", ["python", "working folder"])
def test_folders_that_break_mindspore(patient, monkeypatch, other):
    """A folder of PYTHONPATH, or a file of the working folder, keeps the operator from running: no package is at fault,
    so that what it hides is not installed again."""
    folder = patient.folder / "other"
    folder.mkdir()
    for name in ("queue.py", "code.py"):
        (folder / name).touch()
    if other == "python":
        monkeypatch.setenv("PYTHONPATH", f"/nowhere:{folder}")
    else:
        monkeypatch.chdir(folder)
    patient.install("mindspore", "2.9.0")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def tried(*command, **settings):
        paths = ast.literal_eval(re.search(r"^sys.path\[:\] = (.*)", command[-1], re.MULTILINE)[1])
        bad = str(folder) in paths and (folder / "queue.py").exists()
        failed = f"error ImportError: no Empty\nfile queue {folder}/queue.py\nfile msops {folder}/msops/__init__.py"
        return failed if bad else "imported 2.9.0\npassed sigmoid"

    monkeypatch.setattr(smoke, "output", tried)
    mend = modules.mindspore(smoke.run("CPU")).mend
    assert mend == ("unset PYTHONPATH" if other == "python" else f"mv -n {folder}/queue.py {folder}/my_queue.py",)
    patient.do(*mend)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder) or other != "python"])
    assert smoke.run("CPU").finding.state == "ok"


def test_packages_of_pythonpath(patient, monkeypatch):
    """pip changes no folder of PYTHONPATH, so that unsetting it comes before what pip does."""
    folder = patient.folder / "other"
    folder.mkdir()
    patient.install("numpy", "1.26.4")
    (patient.site / "numpy-1.26.4.dist-info").rename(folder / "right")
    patient.install("numpy", "2.0.0")
    (patient.site / "numpy-2.0.0.dist-info").rename(folder / "numpy-2.0.0.dist-info")
    (folder / "right").rename(patient.site / "numpy-1.26.4.dist-info")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert modules.module("NumPy")[1:] == ("wrong", "2.0.0: MindSpore needs one below 2", ("unset PYTHONPATH",))
    (folder / "msops").mkdir()
    (folder / "msops" / "__init__.py").touch()
    (patient.site / "msops").mkdir()
    patient.install("msops", "0.1.0", files=["msops/__init__.py"])
    monkeypatch.setattr(files, "PACKAGE", folder / "msops")
    assert modules.msops()[1::2] == ("wrong", ("unset PYTHONPATH",))


def first_lines(count, folder, python=sys.executable):
    """Returns the first lines that the doctor prints in a folder, in an environment where nothing is installed."""
    command = [python, "-S", "-m", "msops", "doctor"]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline().rstrip() for _ in range(count)]
        process.kill()
    return lines


def test_lines_come_as_they_are_known(tmp_path):
    """What is known is printed before MindSpore is imported, which may take minutes or never end."""
    waits = f"""
        import pathlib, time
        folder = pathlib.Path({str(tmp_path)!r})
        for _ in range(2000):
            time.sleep(0.01)
            if (folder / "go").exists(): raise SystemExit
        (folder / "nobody read").touch()
    """
    (tmp_path / "mindspore.py").write_text(textwrap.dedent(waits))
    lines = first_lines(3, tmp_path)
    (tmp_path / "go").touch()
    assert [line.split()[1] for line in lines] == ["msops", "Python", "NumPy"]
    assert not (tmp_path / "nobody read").exists()


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12"])
def test_each_python(tmp_path, version):
    """The doctor begins under each Python that msops runs on."""
    python = interpreter(version)
    if not python:
        pytest.skip(f"there is no Python {version}")
    first, second = first_lines(2, tmp_path, python)
    assert first.startswith("ok     msops")
    assert second.startswith(f"ok     Python     {version}.")


@pytest.mark.parametrize("place", ["working folder", "PYTHONPATH"])
def test_file_that_breaks_some_names(patient, monkeypatch, place):
    """A file in the place of a package that few operators need is named, and msops is not installed again."""
    folder = patient.folder / "other"
    folder.mkdir()
    (folder / "code.py").touch()
    if place == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(folder))
    else:
        monkeypatch.chdir(folder)
    patient.install("msops", "0.1.0")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def tried(*command, **settings):
        paths = ast.literal_eval(re.search(r"^sys.path\[:\] = (.*)", command[-1], re.MULTILINE)[1])
        failed = f"broken lltm AttributeError: no tokens\nfile code {folder}/code.py\n"
        return f"imported 2.9.0\n{failed if str(folder) in paths else ''}passed sigmoid"

    monkeypatch.setattr(smoke, "output", tried)
    on_cpu = smoke.run("CPU")
    mend = "unset PYTHONPATH" if place == "PYTHONPATH" else f"mv -n {folder}/code.py {folder}/my_code.py"
    (line,) = modules.operators(on_cpu)
    assert line[1:] == ("wrong", "lltm: AttributeError: no tokens", (mend,))
    assert modules.device(on_cpu) == ("CPU", "ok", "msops.sigmoid works", ())
    monkeypatch.setattr(smoke, "output", lambda *command, **settings: tried(f"sys.path[:] = {[str(folder)]}"))
    (line,) = modules.operators(smoke.run("CPU"))
    assert line.mend == ()


def test_file_that_hides_a_module_of_python(tmp_path):
    """The doctor itself uses the module, and yet says which file is in the way; its command mends it."""
    (tmp_path / "random.py").touch()
    line, mend = first_lines(2, tmp_path)
    assert line == f"wrong  imports    {tmp_path}/random.py is imported instead of Python's own module"
    subprocess.run(["sh", "-c", mend], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"my_random.py"}
    assert first_lines(1, tmp_path)[0].startswith("ok     msops")


def test_packages_without_record(patient):
    """The doctor names packages of which pip has no record, and the commands that bring it back."""
    for name in ("numpy", "msops"):
        (patient.site / name).mkdir()
        (patient.site / name / "__init__.py").touch()
    assert modules.module("NumPy")[1:] == ("wrong", f"in {patient.site}/numpy {UNKNOWN}", (f"{INSTALL} 'numpy<2'",))
    state, text, mend = modules.msops()[1:]
    assert state == "wrong"
    assert text.endswith(f"{patient.site}/msops; its dist-info is missing, so that pip does not know it")
    assert mend == (f"{REINSTALL} .  # in msops' source folder",)
    patient.install("msops", "0.1.0", files=["msops/__init__.py"])
    assert modules.msops().state == "ok"
