"""Tests what the doctor says of the package's own libraries."""

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys

import pytest

from child import ROOT
from msops.commands.doctor import compilers, finding, libraries
from msops.core import build
from patient import CUDA12, H200, INSTALL, MAY_NOT, NEW, REINSTALL, empty_library, gcc, nvcc, smi


def test_libraries_that_pip_installed(patient, monkeypatch):
    """The wheel's list of files tells which libraries must exist, also in Python 3.12."""
    there = property(lambda distribution: [])  # `files` has those alone that exist
    monkeypatch.setattr(importlib.metadata.Distribution, "files", there)
    files = ["msops/__init__.py", "msops/lib/add.so", "msops/lib/lltm.so", "msops/lib/lltm_cell.so"]
    assert patient.libraries()[0].state == "wrong"
    patient.install("msops", "0.1.0", files=files)
    patient.library("add")
    library = patient.library("lltm")
    built, missing = patient.libraries()
    assert built[1:] == ("ok", "add, lltm: for the CPU; by C++ compiler 14", ())
    mend = f"NVCC= {REINSTALL} .  # in msops' source folder"
    assert missing[1:] == ("wrong", "lltm_cell: not built", (mend,))
    for size, complaint in [(0, "file too short"), (len(empty_library()) // 3, "")]:
        library.write_bytes(empty_library()[:size])
        found = {finding.text.partition(":")[0]: finding for finding in patient.libraries()}
        assert found["lltm"].text.startswith(f"lltm: cannot be loaded: {complaint}")
        assert found["lltm"].mend == (mend,)


def test_libraries_that_are_built_in_the_source_folder(patient):
    """The sources tell which libraries must exist, and git restores a source that is gone."""
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
    each = [f"make -C {patient.site} -B msops/lib/{name}.so" for name in ("add", "lltm")]
    assert [finding.mend for finding in patient.libraries()] == [(restore, make) for make in each]
    (patient.site / "msops" / "lib" / "lltm.so").unlink()
    assert [finding.text for finding in patient.libraries()] == ["add, lltm: not built"]
    assert patient.libraries()[0].mend == (restore, make)
    patient.do(restore)
    assert (kernels / "lltm.cu").read_text() == "lltm.cu"
    (kernels / "add.cu").write_text("other")
    restore = f"git -C {patient.site} checkout -- aot_kernels/add.cu  # unless the changes are yours"
    assert patient.libraries()[0].mend == (restore, make)


@pytest.mark.parametrize(
    ("built", "variables"),
    [
        (("",), "NVCC= "),
        (("13.0", [(2, 80), (2, 90), (1, 75)]), "ARCHS='80 90' PTX=75 "),
        (("13.0", [(1, 75)]), "PTX=75 "),
    ],
)
def test_one_library_of_the_source_folder(patient, built, variables):
    """The library that is missing is built alone, for the devices that the others are for."""
    (patient.site / "aot_kernels").mkdir()
    for file in ("Makefile", "aot_kernels/add.cu", "aot_kernels/lltm.cu"):
        (patient.site / file).touch()
    patient.library("add", *built)
    missing = patient.libraries()[1]
    make = f"{variables}make -C {patient.site} -B msops/lib/lltm.so"
    assert missing == ("libraries", "wrong", "lltm: not built", (make,))


def test_libraries_of_a_wheel(patient):
    """The wheel that pip recorded is installed again, also where another file is in a library's place."""
    paths = {name: patient.library(name) for name in ("add", "lltm")}
    digest = base64.urlsafe_b64encode(hashlib.sha256(paths["add"].read_bytes()).digest()).decode().rstrip("=")
    patient.install("msops", "0.1.0", files=[f"msops/lib/{name}.so,sha256={digest}" for name in paths])
    url = patient.site / "msops-0.1.0.dist-info" / "direct_url.json"
    wheel = patient.folder / "a wheel.whl"
    wheel.touch()
    url.write_text(json.dumps({"url": f"file://{patient.folder}/a%20wheel.whl", "archive_info": {}}))
    assert [finding.state for finding in patient.libraries()] == ["ok"]
    with paths["add"].open("ab") as file:
        file.write(b"changed")
    again = f"{REINSTALL} '{wheel}'"
    ok, wrong = sorted(patient.libraries(), key=lambda finding: finding.state)
    assert (ok.text, ok.mend) == ("lltm: for the CPU; by C++ compiler 14", ())
    assert wrong.text == "add: for the CPU; by C++ compiler 14; not the file that pip installed"
    assert wrong.mend == (again,)
    paths["add"].unlink()
    assert ("libraries", "wrong", "add: not built", (again,)) in patient.libraries()
    for given, command in {
        f"file://{patient.folder}": f"NVCC= {REINSTALL} {patient.folder}",
        "https://host/msops.whl": f"{REINSTALL} https://host/msops.whl",
        "file:///lost.whl": f"NVCC= {REINSTALL} .  # in msops' source folder",
    }.items():
        url.write_text(json.dumps({"url": given}))
        assert ("libraries", "wrong", "add: not built", (command,)) in patient.libraries()
    for given in ("https://host/msops", f"file://{patient.folder}"):
        url.write_text(json.dumps({"url": given, "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
        command = f"NVCC= {REINSTALL} git+{given}@abc"
        assert ("libraries", "wrong", "add: not built", (command,)) in patient.libraries()


def test_library_that_is_stale(patient):
    """A library that is older than a source of it, or has not the entries of its source, is built again."""
    kernels = patient.site / "aot_kernels"
    kernels.mkdir()
    (patient.site / "Makefile").touch()
    (kernels / "add.cu").write_text("MSOPS_FORMULA(AddForward, (x), (y), y = x)\n")
    path = patient.library("add")
    make = f"make -C {patient.site} -B all"
    text = "add: has no entry AddForward, so it is built from another source"
    assert patient.libraries() == [("libraries", "wrong", text, (make,))]
    gcc("-o", path, source='__attribute__((visibility("default"))) int AddForward(void) { return 0; }')
    assert patient.libraries()[0].state == "ok"
    header = kernels / "common" / "call.h"
    header.parent.mkdir()
    header.touch()
    os.utime(header, (path.stat().st_mtime + 1,) * 2)
    path.with_suffix(".d").write_text("msops/lib/add.so: aot_kernels/add.cu \\\n aot_kernels/common/call.h\n")
    state, text, mend = patient.libraries()[0][1:]
    assert text.endswith("; older than its source aot_kernels/common/call.h")
    assert (state, mend) == ("wrong", (make,))
    os.utime(path, (header.stat().st_mtime + 1,) * 2)
    assert patient.libraries()[0].state == "ok"


def test_library_for_another_processor(patient):
    """The loader itself says that there is no such file."""
    path = patient.library("add")
    code = bytearray(path.read_bytes())
    code[18:20] = (183).to_bytes(2, "little")  # is AArch64's number
    path.write_bytes(code)
    (found,) = patient.libraries()
    assert found.text == "add: cannot be loaded: built for another processor than this Python"
    assert found.mend == (f"{REINSTALL} .  # in msops' source folder",)


def test_library_that_a_variable_breaks(patient, monkeypatch):
    """LD_LIBRARY_PATH leads to another libdep, which lacks what the library calls."""
    path = patient.library("add")
    for folder, source in (("right", "int f(void) { return 1; }"), ("wrong", "")):
        (patient.folder / folder).mkdir()
        gcc("-Wl,-soname=libdep.so.1", "-o", patient.folder / folder / "libdep.so.1", source=source)
    right = patient.folder / "right" / "libdep.so.1"
    gcc(right, f"-Wl,-z,now,-rpath={right.parent}", "-o", path, source="int f(void); int g(void) { return f(); }")
    assert patient.libraries()[0].state == "ok"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(patient.folder / "wrong"))
    monkeypatch.setenv("LD_BIND_NOW", "")
    state, text, mend = patient.libraries()[0][1:]
    assert text.endswith("undefined symbol: f; not so without LD_LIBRARY_PATH")
    assert (state, mend) == ("wrong", ("unset LD_LIBRARY_PATH",))
    patient.do(*mend)
    assert patient.libraries()[0].state == "ok"


def test_library_that_links_what_is_missing(patient):
    path = patient.library("add")
    lost = patient.folder / "libLost.so.1"
    gcc("-Wl,-soname=libLost.so.1", "-o", lost)
    gcc(lost, "-o", path)
    lost.unlink()
    mend = "apt install liblost1  # elsewhere the package that has libLost.so.1"
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
    program = (
        f"import sys; sys.path[:0] = {[str(patient.site), str(ROOT)]}\n"
        "from pathlib import Path\n"
        "from msops.commands.doctor import compilers, gpu, libraries\n"
        f"libraries.PACKAGE = Path({str(patient.site / 'msops')!r})\n"
        "gpus = gpu.look()\n"
        "print(*(finding[1:] for finding in libraries.findings(gpus, compilers.nvcc_finding(gpus)[0])), sep='\\n')"
    )
    closed, text = (
        (path, f"add: {path} may not be read") if what == "file" else (path.parent, f"{path.parent} may not be read")
    )
    closed.chmod(0)
    command = [*MAY_NOT, sys.executable, "-S", "-c", program]
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
        (H200, "13.1", [(2, 90)], ""),  # machine code runs with every driver of a major version, PTX does not
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
    """No command builds again with the nvcc whose code the driver cannot run."""
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


def test_architectures_as_nvcc_writes_them(tmp_path, monkeypatch):
    monkeypatch.delenv("NVCC", raising=False)  # it is empty in tests on the CPU
    path = build.find_nvcc()
    if not {80, 90} <= set(
        compilers.look(path).archs if path else ()
    ):  # nvcc may be a script that only tells MindSpore a release
        pytest.skip("no nvcc for sm_90")
    (tmp_path / "a.cu").write_text("__global__ void f(float* x) { *x = 1; }")
    code = [
        f"-gencode=arch=compute_{arch},code={form}_{arch}" for arch, form in [(80, "sm"), (90, "sm"), (80, "compute")]
    ]
    subprocess.run([path, "-shared", "-Xcompiler=-fPIC", *code, "a.cu", "-o", "a.so"], cwd=tmp_path, check=True)
    assert libraries.architectures((tmp_path / "a.so").read_bytes()) == ([80, 90], [80])
