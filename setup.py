"""Builds the kernels with make, and one wheel for every Python: the kernels depend on neither Python nor MindSpore."""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# (y, versions): distributions with glibc 2.y have libstdc++'s symbols up to these versions. The numbers are from
# auditwheel.
DISTRIBUTIONS = (
    (24, {"GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10)}),
    (27, {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}),
    (31, {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12)}),
    (34, {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}),
    (35, {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}),
    (39, {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15)}),
)


def oldest_glibc(libraries):
    """Returns the y of the oldest glibc 2.y whose distributions load these libraries, or None if none is known.

    The libraries also need libgomp, as MindSpore's own libraries do. Any libgomp since GCC 4.9 will do.
    """
    said = subprocess.check_output(["readelf", "--version-info", "--wide", *libraries], text=True)
    newest = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", said):
        newest[name] = max(newest.get(name, ()), tuple(map(int, version.split("."))))
    for minor, versions in DISTRIBUTIONS:
        if all(newest.get(name, ()) <= version for name, version in versions.items()):
            return max(minor, newest["GLIBC"][1])
    return None


def write_version(command, folder):
    """Writes the version into a copy of the package, which has no commits that tell it."""
    Path(folder, "msops", "version.txt").write_text(f"{command.distribution.metadata.version}\n")


class SourceDistribution(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_version(self, base_dir)


class BuildKernels(build_py):
    """Builds the kernels, and copies into the package the headers, what compiles with them, and the examples that are
    templates.

    An editable install uses those in the source folder, where 'make all' builds the libraries.
    """

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # an older build may have files that no longer exist
            subprocess.run(["make", "all"], check=True)
            copies = {f"include/{name}": f"aot_kernels/{name}" for name in ("common", "compile")}
            copies |= {f"templates/{name}": f"examples/{name}" for name in ("swish", "logsumexp")}
            ignored = shutil.ignore_patterns("__pycache__")
            for to, source in copies.items():
                shutil.copytree(source, Path(self.build_lib, "msops", to), dirs_exist_ok=True, ignore=ignored)
            header = "shared/broadcast/operations.h"  # what replaces MindSpore's kernels reads it
            copy = Path(self.build_lib, "msops", "include", header)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path("aot_kernels", header), copy)
        super().run()
        if not self.editable_mode:
            write_version(self, self.build_lib)


class PlatformWheel(bdist_wheel):
    """Makes a wheel whose tag says which glibc its libraries need, such as manylinux_2_24_x86_64."""

    def get_tag(self):
        platform = super().get_tag()[2]
        libraries = list(Path(self.get_finalized_command("build_py").build_lib).glob("msops/lib/*.so"))
        glibc = oldest_glibc(libraries) if libraries else None  # an editable install has no libraries
        return "py3", "none", platform if glibc is None else f"many{platform}".replace("linux", f"linux_2_{glibc}")


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


COMMANDS = {"build_py": BuildKernels, "bdist_wheel": PlatformWheel, "sdist": SourceDistribution}
setup(cmdclass=COMMANDS, distclass=PlatformDistribution)
