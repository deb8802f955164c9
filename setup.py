"""Builds the kernels with make, and one wheel for every Python: they depend on neither Python nor MindSpore."""

import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildKernels(build_py):
    """An editable install uses what is in the source folder: libraries that 'make all' builds there, headers, and the
    examples that are templates."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # an older build's, with files that are no more
            subprocess.run(["make", "all"], check=True)
            copies = {"include/common": "aot_kernels/common"}
            copies |= {f"templates/{name}": f"examples/{name}" for name in ("swish", "logsumexp")}
            ignored = shutil.ignore_patterns("__pycache__")
            for to, source in copies.items():
                shutil.copytree(source, Path(self.build_lib, "msops", to), dirs_exist_ok=True, ignore=ignored)
        super().run()


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
