"""Tests that the examples in docstrings run, and that each block of code in README and docs runs and prints what the
page shows.

The line that begins a block tells what becomes of it:

- ```` ```python ```` runs in the page's folder, after the blocks before it; ```` ```sh ```` runs in that folder;
- ```` ```cuda ```` and ```` ```cpp ```` compile;
- ```` ```LANGUAGE file=NAME ```` is written to the page's folder, for the blocks after it;
- ```` ```text ```` is what the block before it printed: numbers agree to 1 %, and ``...`` stands for anything;
- ```` ```LANGUAGE norun ```` is not run, since it installs, takes minutes or needs what is not here. The targets and
  modules that it names must exist, and its Python must parse.
"""

import doctest
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import mindspore
import pytest

import msops.testing.entry
from card import cards
from child import ROOT, environment
from operator_test import PLAIN, OperatorTest

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
# `make test-full` runs these pages. That of installing runs the doctor, as test_doctor.py does.
LONG = ("calling.md", "first_operator.md", "headers.md", "install.md", "opcheck.md", "porting.md")
README = PAGES[0].read_text()
NUMBER = r"\d+\.?\d*(?:e[+-]\d+)?"


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name) for module in (msops, msops.testing) for name in module.__all__
}
PUBLIC["msops.testing.entry.prepare"] = msops.testing.entry.prepare


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (name == "msops.testing.opcheck")) for name in PUBLIC]
)
def test_docstring(name):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    public = PUBLIC[name]
    (example,) = doctest.DocTestFinder(recurse=False).find(public, name, globs={})
    assert example.examples or "See :func:`msops." in public.__doc__
    failures = []
    doctest.DocTestRunner().run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_reference_has_all_names():
    """The reference names every public name; its directive `operators` stands for the package's operators."""
    names = re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs" / "api.rst").read_text(), re.MULTILINE)
    listed = {f"msops.{name.removeprefix('msops.')}" for name in names}
    assert {name for name in PUBLIC if not PUBLIC[name].__module__.startswith("msops.operators.")} == listed


def test_readme_has_each_operator_once():
    table = re.search(r"^\| function \| Cell \|.*?\n\n", README, re.MULTILINE | re.DOTALL)[0]
    operators = [name for name in msops.__all__ if getattr(msops, name).__module__.startswith("msops.operators.")]
    assert sorted(re.findall(r"`(\w+)\(", table)) == sorted(operators)


def test_readme_says_which_gradients_are_missing():
    """The cards tell which operators have a gradient, and one of second order."""
    sentences = re.search(r"^Every floating input has a gradient.*?\n\n", README, re.MULTILINE | re.DOTALL)[0]
    none, second = re.search(
        r"; (.*?) return indices.*Second order is missing in (.*?);", sentences, re.DOTALL
    ).groups()
    own = [card for card in cards() if isinstance(card, OperatorTest) and card.function is not None]
    public = {card.function.__name__: card for card in own if card.function.__name__ in msops.__all__}
    without = {name for name, card in public.items() if not card.second_order}
    assert without == set(re.findall(r"`(\w+)`", none + second))
    indices = {name for name in without if not public[name].variables(public[name].cases[public[name].small][0])}
    assert indices == set(re.findall(r"`(\w+)`", none))


def test_headers_name_each_status():
    statuses = re.findall(r"^  (k\w+) = (\d),$", (ROOT / "aot_kernels" / "common" / "call.h").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| (\d) \| `(k\w+)` \|", (ROOT / "docs" / "headers.md").read_text(), re.MULTILINE)
    assert rows == [(number, name) for name, number in statuses]


@pytest.fixture
def folder(tmp_path, monkeypatch, device_target):
    """Returns a working folder from which Python imports. It holds only the benchmarks."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    if device_target == "CPU":
        monkeypatch.setenv("NVCC", "")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:convert_bfloat16")  # a page shows what it warns of
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.wide] * (page.name in LONG)) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page(page, folder, monkeypatch, capfd):
    module = types.ModuleType("page")  # needs a file, since MindSpore reads the source of what it compiles
    module.__file__ = str(folder / "page.py")
    monkeypatch.setitem(sys.modules, "page", module)
    source, printed = "", ""
    blocks = re.findall(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    for number, (language, mark, code) in enumerate(blocks):
        if mark == "norun":
            check(language, code)
        elif language == "text":
            compare(code, printed)
        elif mark.startswith("file="):
            path = Path(mark.removeprefix("file="))
            path.write_text(code)
            sys.modules.pop(path.stem, None)  # may be another module of that name, such as an example
        elif language == "python":
            Path(module.__file__).write_text(source + code)
            exec(compile("\n" * source.count("\n") + code, module.__file__, "exec"), vars(module))  # noqa: S102
            source += code
            printed = capfd.readouterr().out
        elif language == "sh":
            done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        elif language in ("cuda", "cpp"):
            msops.load(f"{page.stem}_{number}", code, cxx_flags=["-Werror", *PLAIN])
        elif mark not in ("{toctree}", "{include} ../README.md"):
            pytest.fail(f"a block of {language} {mark}:\n{code}")


@pytest.mark.parametrize("page", [PAGES[0], *ROOT.glob("docs/*.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_page(page):
    """Lines of 98 letters fit a page that is 1,280 pixels wide, as docs/_static/wide.css lays it out."""
    blocks = re.findall(r"^```\w* ?.*\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 98]


def check(language, code):
    if language == "python":
        compile(code, "norun", "exec")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", code, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m ([\w.]+)", code):
        assert importlib.util.find_spec(module), module


def compare(shown, printed):
    shown, printed = (" ".join(text.split()) for text in (shown, printed))
    parts = re.split(rf"({NUMBER}|\.\.\.)", shown)
    numbers = [float(part) for part in parts if re.fullmatch(NUMBER, part)]
    pattern = "".join(
        ".*" if part == "..." else f"({NUMBER})" if re.fullmatch(NUMBER, part) else re.escape(part) for part in parts
    )
    match = re.fullmatch(pattern, printed)
    assert match, f"the page shows\n{shown}\nbut this was printed:\n{printed}"
    assert [float(number) for number in match.groups()] == pytest.approx(numbers, rel=0.01)
