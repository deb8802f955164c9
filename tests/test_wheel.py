"""Tests the wheel that pip builds from the source distribution: its files, that it runs, and that it uninstalls without
a trace."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from msops.commands.doctor import cuda11

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.1.0.dev1"  # of the one commit of the source folder, also where git is gone
MINDSPORE = Path(importlib.util.find_spec("mindspore").origin).parent
QUICK = r"-j2 NVCC= FLAGS=-std=c++17\ -O0"  # variables of the Makefile, with which a library takes some seconds
OPERATORS = "add", "lltm_cell", "sigmoid"  # these few show what becomes of a library

PROGRAM = '''
from pathlib import Path
import mindspore
import msops
from msops.compat import set_device

package = Path(msops.__file__).parent
try:
    (package / "lib" / "new").touch()
except PermissionError:
    print(package)
set_device("CPU")
library = msops.load("twice", """
#include "common/formula.h"
MSOPS_FORMULA(Twice, (x), (y), y = 2 * x)
""")
x = mindspore.Tensor([0.0], mindspore.float32)
print(msops.sigmoid(x), mindspore.grad(msops.sigmoid)(x), msops.custom_op(library.Twice, "x -> y")(x + 1))
'''


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("a folder with spaces")


@pytest.fixture(scope="module")
def sdist(folder):
    """Returns the folder of the unpacked source distribution."""
    source = folder / "source"
    # The copy leaves out what tools left in the working tree: an old MANIFEST would name files that this one does not.
    left = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "_build", "output")
    shutil.copytree(ROOT, source, ignore=left)
    (source / "msops" / "lib").mkdir(exist_ok=True)
    (source / "msops" / "lib" / "built.so").touch()
    git = ["git", "-C", source, "-c", "user.name=a", "-c", "user.email=a"]
    run(*git, "init", "--quiet")
    run(*git, "commit", "--quiet", "--allow-empty", "--message=a")
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(folder, sdist):
    tree = shutil.copytree(sdist, folder / "tree")
    stale = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "msops"
    stale.mkdir(parents=True)
    (stale / "stale.py").touch()
    for source in (tree / "aot_kernels").glob("*.cu"):
        if source.stem not in OPERATORS:
            source.unlink()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(*pip, tree, env={**os.environ, "MAKEFLAGS": QUICK})
    (path,) = folder.glob("*.whl")
    return path


def test_sdist(sdist):
    """The source distribution holds the sources, but neither tests nor a built library."""
    paths = {path.relative_to(sdist) for path in sdist.rglob("*")}
    assert {path.parts[0] for path in paths if len(path.parts) > 1} == {
        "aot_kernels",
        "examples",
        "msops",
        "msops.egg-info",
    }
    assert not [path for path in paths if path.suffix == ".so"]


def test_make_wheel():
    """`make wheel` needs no environment with MindSpore."""
    commands = run("make", "--dry-run", "wheel", "NVCC=", cwd=ROOT)
    assert "pip wheel" in commands
    assert ".venv" not in commands


def test_contents(wheel):
    assert wheel.name.startswith(f"msops-{VERSION}-py3-none-manylinux_2_")
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "msops").rglob("*.py")}
    expected |= {f"msops/lib/{name}.so" for name in OPERATORS}
    for name in ("common", "compile"):
        copied = (path for path in (ROOT / "aot_kernels" / name).rglob("*") if path.is_file())
        expected |= {f"msops/include/{path.relative_to(ROOT / 'aot_kernels')}" for path in copied}
    for name in ("swish", "logsumexp"):
        templates = (path for path in (ROOT / "examples" / name).iterdir() if path.is_file())
        expected |= {f"msops/templates/{name}/{path.name}" for path in templates}
    expected |= {"msops/py.typed", "msops/__init__.pyi"}  # type checkers read them
    expected.add("msops/version.txt")
    expected.add("msops/core/fast_calls.cc")  # `use_fast_calls` compiles it
    for folder in ("graphs", "patch/gpu"):  # `cuda_graph` and `patch_mindspore` compile them
        expected |= {f"msops/{folder}/{path.name}" for path in (ROOT / "msops" / folder).glob("*.[ch]*")}
    expected |= {"msops/core/relocations.h", "msops/core/views.h", "msops/include/shared/broadcast/operations.h"}
    info = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt")
    expected |= {f"msops-{VERSION}.dist-info/{name}" for name in info}
    assert set(zipfile.ZipFile(wheel).namelist()) == expected


def test_tag(wheel, tmp_path):
    """The wheel has the tag that docs/install.md promises, and that auditwheel finds from the libraries' symbols. The
    system's libgomp affects neither."""
    audit = [sys.executable, "-m", "auditwheel", "show", "--ldpaths", tmp_path, wheel]
    tag = wheel.name.removesuffix(".whl").split("-")[-1]
    assert tag == re.search(r"manylinux_2_\d+_x86_64", (ROOT / "docs" / "install.md").read_text())[0]
    assert f'constrains the platform tag to "{tag}"' in " ".join(run(*audit).split())


THREAD = """
#include <dlfcn.h>
#include <pthread.h>
static void* one(void* done) { *(int*)done = 1; return nullptr; }
extern "C" int F() {
  int done = 0;
  pthread_t thread;
  if (!dlopen(nullptr, RTLD_NOW) || pthread_create(&thread, nullptr, one, &done)) return 0;
  pthread_join(thread, nullptr);
  return done;
}
"""


def newest_glibc(library):
    """Returns y of the newest version GLIBC_2.y that the library needs."""
    return max(int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", run("readelf", "-VW", library)))


def test_old_glibc(tmp_path):
    """A library linked with the stand-in needs only old versions of what moved into libc in 2.34, and works."""
    (tmp_path / "thread.cc").write_text(THREAD)
    run("sh", ROOT / "aot_kernels" / "compile" / "old_glibc.sh", "stand-in", "g++", cwd=tmp_path)
    run("g++", "-fPIC", "-shared", "thread.cc", "-Wl,--no-as-needed", "stand-in", "-o", "thread.so", cwd=tmp_path)
    assert newest_glibc(tmp_path / "thread.so") <= 27
    assert ctypes.CDLL(str(tmp_path / "thread.so")).F() == 1
    assert {path.name for path in tmp_path.iterdir()} == {"thread.cc", "stand-in", "thread.so"}


@pytest.mark.parametrize("library", sorted((ROOT / "msops" / "lib").glob("*.so")), ids=lambda path: path.stem)
def test_glibc_of_libraries(library):
    """The libraries run on Ubuntu 18.04, the oldest system with a MindSpore for the GPU, and on Debian 9, which have
    glibc 2.27 and 2.24, and the libstdc++ of GCC 6 or later."""
    assert newest_glibc(library) <= 24
    versions = re.findall(r"Name: GLIBCXX_3\.4\.(\d+)", run("readelf", "-VW", library))
    assert max(map(int, versions), default=0) <= 22


def test_gpu_extra(sdist):
    """The extra and the doctor name the CUDA libraries that MindSpore's GPU backends link."""
    linked = set()
    for backend in MINDSPORE.glob("lib/plugin/libmindspore_gpu.so.*"):
        linked |= set(re.findall(r"\[lib(cu\w+|nvrtc)\.so\.\d", run("readelf", "-d", backend)))
    linked -= {"cuda", "cuda_ops"}  # belong to the driver and to MindSpore
    assert linked == set(cuda11.LIBRARIES)
    metadata = (sdist / "PKG-INFO").read_text()
    wheels = re.findall(r'^Requires-Dist: nvidia-([\w-]+)-cu11\b.*; extra == "gpu"', metadata, re.MULTILINE)
    renamed = {"cudart": "cuda-runtime", "nvrtc": "cuda-nvrtc"}
    assert set(wheels) == {renamed.get(name, name) for name in linked}


def test_requirements_of_a_later_python(sdist):
    """Python 3.13 has no requirements, since pip would build NumPy 1 for ten minutes before it says that msops does not
    support that Python."""
    lines = re.findall(r"^Requires-Dist: (.*)", (sdist / "PKG-INFO").read_text(), re.MULTILINE)
    for version, names in {"3.9": {"numpy", "scipy"}, "3.12": {"numpy", "scipy"}, "3.13": set()}.items():
        python = {"python_version": version, "extra": ""}
        needed = {each.name for each in map(Requirement, lines) if not each.marker or each.marker.evaluate(python)}
        assert needed == names


def test_installed(wheel, folder):
    """The wheel works in an environment that cannot be written to."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    before = files(environment)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    assert run(python, "-I", "-c", "import msops; print(msops.__version__)") == f"{VERSION}\n"
    installed = files(environment)
    run(python, "-m", "msops", "new", "my_op", cwd=folder)
    mindspore = site_packages / "mindspore.pth"
    mindspore.write_text(str(MINDSPORE.parent))

    program = folder / "program.py"  # MindSpore reads the source of what it compiles
    program.write_text(PROGRAM)
    # Root can write everywhere, unless it gives up that capability.
    may_not = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    unset = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"NVCC": "", "MSOPS_CACHE": str(folder / "cache")}
    try:
        run("chmod", "-R", "a-w", environment)
        printed = run(*may_not, python, program, cwd=folder, env=variables)
    finally:
        run("chmod", "-R", "u+w", environment)
    mindspore.unlink()
    assert printed.splitlines() == [str(site_packages / "msops"), "[0.5] [0.25] [2.]"]
    assert files(environment) == installed

    run(python, "-m", "pip", "uninstall", "--yes", "msops")
    assert files(environment) == before
