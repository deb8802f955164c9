"""Tests that the examples reach what they promise, or fail with a clear message."""

import importlib
import re
import signal

import numpy as np
import pytest
from matplotlib.axes import Axes

from child import ROOT, run_python


@pytest.fixture
def run(device_target, tmp_path):
    """Returns a function that runs an example with the test's folder as its output."""

    def run_example(name, *options):
        script = ROOT / "examples" / f"{name}.py"
        always = "--device-target", device_target, "--output", tmp_path
        return run_python(script, *always, *options, cwd=tmp_path)

    return run_example


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 20_000


@pytest.mark.wide
@pytest.mark.parametrize(("name", "least"), [("digits", 97), ("rows", 95)])
def test_digits_are_read(run, tmp_path, name, least):
    result = run(name)
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"test accuracy: ([\d.]+)%", result.stdout)[1]) >= least
    assert is_picture(tmp_path / f"{name}.png")


@pytest.mark.wide
def test_volume_is_fitted(run, tmp_path):
    result = run("volume")
    assert result.returncode == 0, result.stderr
    errors = re.search(r"relative error: ([\d.]+)% before training, ([\d.]+)% after", result.stdout)
    before, after = map(float, errors.groups())
    assert before > 50
    assert after <= 2
    assert is_picture(tmp_path / "volume.png")


@pytest.mark.wide
def test_picture_is_learned(run, tmp_path):
    result = run("picture", "--steps=800")
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"PSNR: ([\d.]+) dB", result.stdout)[1]) >= 30
    assert is_picture(tmp_path / "picture.png")


@pytest.mark.wide
def test_surface_is_learned(run, tmp_path):
    result = run("surface")
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"mean error of distances: ([\d.]+)", result.stdout)[1]) <= 0.01
    assert is_picture(tmp_path / "surface.png")


@pytest.mark.wide
def test_scene_is_learned(run, tmp_path):
    result = run("nerf", "--steps=600")
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"held out: ([\d.]+) dB", result.stdout)[1]) >= 27
    assert is_picture(tmp_path / "nerf.png")


def test_picture_of_the_volume_has_room(monkeypatch):
    """There is a gap between the label of the curve and the label of the colour bar."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    volume = importlib.import_module("volume")
    values = np.zeros(volume._PIXELS**2)
    figure = volume.draw({"Target": values, "Before": values, "After": values}, [1.0, 0.1, 0.01])
    figure.draw_without_rendering()
    labels = {}
    for axes in figure.findobj(Axes):
        labels[axes.get_ylabel()] = axes.yaxis.label.get_window_extent()
    gap = labels["relative error"].x0 - labels["value at z = 0.5"].x1
    assert gap > 2 * labels["relative error"].width


@pytest.mark.wide
def test_shapes_are_named(run, tmp_path):
    result = run("points")
    assert result.returncode == 0, result.stderr
    accuracies = re.search(r"test accuracy: shapes ([\d.]+)%, parts ([\d.]+)%", result.stdout).groups()
    shapes, parts = map(float, accuracies)
    assert shapes >= 95
    assert parts >= 85
    assert is_picture(tmp_path / "points.png")


def test_shapes_have_their_curvature(monkeypatch):
    """Each shape has as many points as it is asked for, in the unit ball except for noise, and parts as its formula."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    shapes = importlib.import_module("shapes")
    rng = np.random.default_rng(0)
    parts = {"sphere": "bulging", "cube": "flat", "tetrahedron": "flat", "cone": "flat bent", "cylinder": "flat bent",
             "capsule": "bulging bent", "hemisphere": "flat bulging", "torus": "bulging saddle"}  # fmt: skip
    for shape in shapes.SHAPES:
        points, kinds = shapes.cloud(rng, shape, 500)
        assert points.shape == (500, 3)
        assert np.linalg.norm(points, axis=1).max() < 1.1
        found = {shapes.PARTS[kind] for kind in kinds}
        assert found == set(parts.get(shape.__name__, " ".join(found)).split())
    torus, kinds = shapes.torus(rng, 500)
    np.testing.assert_array_equal(kinds == shapes.SADDLE, np.hypot(torus[:, 0], torus[:, 1]) < 1)


@pytest.mark.wide
def test_mamba_learns(run, tmp_path):
    """Three networks of about the same size learn for the same time. Steps give the scores of all of a text at once."""
    result = run("mamba", "--seconds=5")
    losses = dict(
        re.findall(r"^(\w+): \d+ parameters, \d+ steps, validation loss ([\d.]+)$", result.stdout, re.MULTILINE)
    )
    sizes = [int(size) for size in re.findall(r"(\d+) parameters", result.stdout)]
    assert list(losses) == ["Mamba", "Llama", "LLTM"]
    assert max(sizes) < 1.1 * min(sizes)
    assert float(losses["Mamba"]) < 3
    assert float(re.search(r"at once differ by (\S+)$", result.stdout, re.MULTILINE)[1]) < 1e-3
    assert float(re.search(r"^selective copying: ([\d.]+)% of", result.stdout, re.MULTILINE)[1]) > 90
    assert is_picture(tmp_path / "mamba.png")


@pytest.mark.wide
def test_experts_learn(run, tmp_path):
    """Experts learn about as fast as a dense model at first, though they drop some slots; later they are better."""
    result = run("mixtral", "--steps=80", "--capacity=2")
    assert result.returncode == 0, result.stderr
    sizes, losses = zip(*re.findall(r"^\w+: (\d+) parameters, validation loss ([\d.]+)$", result.stdout, re.MULTILINE))
    assert int(sizes[1]) > 3 * int(sizes[0])
    assert float(losses[1]) < 1.03 * float(losses[0]) < 2.8
    assert float(re.search(r"^left out of the validation text: ([\d.]+)%", result.stdout, re.MULTILINE)[1]) < 30
    assert is_picture(tmp_path / "mixtral.png")


@pytest.mark.wide
def test_text_is_learned(run, tmp_path):
    """Both kinds of operators compute the same losses. After 80 steps the model is better than the bigram table."""
    result = run("text", "--operators=both", "--steps=80")
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"^(msops|mindspore): [\d.]+ ms a step, validation loss ([\d.]+)$", result.stdout, re.MULTILINE)
    assert [name for name, _ in losses] == ["msops", "mindspore"]
    bigram = float(re.search(r"^bigram table: validation loss ([\d.]+)$", result.stdout, re.MULTILINE)[1])
    assert 2 < bigram < 2.6
    first, later = map(
        float, re.search(r"^losses differ by (\S+) in .*, (\S+) in all$", result.stdout, re.MULTILINE).groups()
    )
    assert first < 1e-4
    assert later < 0.02
    assert len(re.findall(r"^--- (?:before|after) training", result.stdout, re.MULTILINE)) == 4
    assert is_picture(tmp_path / "text.png")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("rows", "--epochs=1", "accuracy must be at least 95%"),
        ("volume", "--steps=1", "error must be at most 2%"),
        ("picture", "--steps=1", "PSNR must be at least 30 dB"),
        ("surface", "--steps=1", "mean error must be at most 0.01"),
        ("nerf", "--steps=1", "PSNR must be at least 27 dB"),
    ],
)
def test_too_little_training_is_an_error(run, name, option, message):
    result = run(name, option)
    assert result.returncode == 1
    assert message in result.stderr


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("program")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--epochs=0", "--epochs: must be a whole number from 1 to 1000000000, got '0'"),
        ("--seed=-1", "--seed: must be a whole number from 0 to 4294967295, got '-1'"),
        ("--device-target=TPU", "--device-target: invalid choice: 'TPU'"),
        (f"--output={__file__}", "--output must be a folder: "),
    ],
)
def test_wrong_options(program, monkeypatch, capsys, option, message):
    monkeypatch.setattr("sys.argv", ["example", option])
    with pytest.raises(SystemExit) as error:
        importlib.import_module("common").options("", "epochs", 30)
    assert message in f"{capsys.readouterr().err}{error.value}"


def test_missing_device(program, monkeypatch):
    def refuse(device_target):
        raise RuntimeError(f"Unsupported device target {device_target}. Please check\n----")

    monkeypatch.setattr("mindspore.set_device", refuse)
    with pytest.raises(
        SystemExit, match=r"cannot use the GPU: Unsupported device target GPU\. `python -m msops doctor`"
    ):
        program.use("GPU")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_wait(program, number):
    """What stands in `finished` ends before Ctrl-C takes effect, but does not wait for a second Ctrl-C."""
    done, before = [], signal.getsignal(number)

    def interrupted(times):
        with program.finished() as noted:
            for _ in range(times):
                signal.raise_signal(number)
            done.append((times, len(noted)))

    interrupted(0)
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(times)
    assert done == [(0, 0), (1, 1)]
    assert signal.getsignal(number) is before


def lines_of(path):
    """Returns the number of lines that are neither blank nor a comment."""
    texts = map(str.strip, path.read_text().splitlines())
    return sum(bool(text) and not text.startswith("//" if path.suffix == ".cu" else "#") for text in texts)


def test_line_counts():
    """The examples have the line counts that examples/README.md states."""
    folder = ROOT / "examples"
    readme = (folder / "README.md").read_text()
    for name, most in (("swish", 30), ("logsumexp", 80)):
        counts = [lines_of(folder / name / file) for file in (f"{name}.cu", f"{name}.py", f"test_{name}.py")]
        (row,) = re.findall(rf"\| \[`{name}`\].*\|((?: \d+ \|){{4}})", readme)
        assert row == "".join(f" {count} |" for count in (*counts, sum(counts)))
        assert sum(counts) <= most
    scripts = re.findall(r"\| \[`(\w+\.py)`\].*\| (\d+) \|", readme)
    assert {name: int(lines) for name, lines in scripts} == {p.name: lines_of(p) for p in folder.glob("*.py")}
