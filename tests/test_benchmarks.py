"""Tests that the benchmark runs on the CPU and writes sound rows, and that its peers compute what our kernels do."""

import contextlib
import csv
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import __main__ as benchmark, llm, naive, numpy_peers, pages, parts, report, targets
from benchmarks.cases import cell_cases, kernel_cases, precisions, sequence_cases
from benchmarks.neural_fields import NeuralField
from benchmarks.operators import BENCHMARKS
from child import ROOT, environment, run_python
from msops.testing.entry import has_gpu_code, outputs_of, prepare_operator

KERNELS = [op for op, benchmark in BENCHMARKS.items() if benchmark.sizes]
NEURAL_FIELDS = [op for op, benchmark in BENCHMARKS.items() if isinstance(benchmark, NeuralField)]
SEQUENCES = [op for op, benchmark in BENCHMARKS.items() if benchmark.sequence_sizes]


@pytest.mark.wide
def test_run(tmp_path):
    """The benchmark runs in a copy of the folder, where one more operator is only one more file."""
    shutil.copytree(
        ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    for folder in ("msops", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    operators = tmp_path / "benchmarks" / "operators"
    (operators / "logistic.py").write_text((operators / "sigmoid.py").read_text())
    arguments = ["-m", "benchmarks", "--quick", "--op", "lltm,logistic", "--dtype", "float32"]
    done = run_python(*arguments, "--device-target", "CPU", "--output", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100%" in done.stderr  # the progress bar
    assert "not measured" not in done.stdout

    rows, about = report.read(tmp_path)
    assert about["mindspore"].startswith("2.10")
    assert {row["part"] for row in rows} == {"device", "kernel", "sequence", "graph", "pynative"}
    assert {row["part"] for row in rows if row["op"] == "logistic"} == {"kernel", "graph", "pynative"}
    for row in rows:
        assert 0 < row["us_25"] <= row["us"] <= row["us_75"]
        assert (row["share"] is not None) == (row["part"] == "kernel")
    kernels = [row for row in rows if row["part"] == "kernel" and row["op"] == "logistic"]
    ours = [row for row in kernels if row["by"] == "msops"]
    assert [row["case"] for row in ours] == [case.name for case in kernel_cases("CPU", ["sigmoid"], quick=True)]
    large = next(row for row in ours if (row["direction"], row["case"]) == ("forward", "2^20"))
    assert large["bytes"] == 2 * 4 * 2**20
    assert large["floor"] == "memory"
    assert large["share"] == pytest.approx(large["floor_us"] / large["us"], rel=1e-3)
    (peer,) = (row for row in kernels if report.what(row) == report.what(large) and row["by"] == "NumPy")
    assert peer["times_faster"] == pytest.approx(peer["us"] / large["us"], rel=1e-3)

    (case,) = sequence_cases("CPU", ["lltm"], quick=True)
    sequence = [row for row in rows if row["part"] == "sequence"]
    directions = [row["direction"] for row in sequence if row["by"] == "msops"]
    assert directions == ["forward", "forward+backward", "loop forward", "loop backward"]
    for row in sequence:
        assert row["case"] == case.name
        assert row["operations"] == case.benchmark.sequence_operations(case.size, row["direction"])
        assert row["us_step"] == pytest.approx(row["us"] / 32, rel=1e-3)
        assert row["by"] == "msops" or row["times_faster"] > 0
    cells = {row["by"] for row in rows if row["op"] == "lltm" and row["part"] in ("graph", "pynative")}
    assert cells == {"msops", "MindSpore", "stepped LLTMCell", "nn.LSTM x 3/4"}
    assert f"lltm loop backward {case.name}" in done.stdout

    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("roof", "speedups", "cells"))
    done = run_python("-m", "benchmarks.targets", tmp_path, cwd=tmp_path)
    assert "| logistic | whole Cells |" in done.stdout, done.stderr


def test_operators_import_no_torch():
    """These modules run in MindSpore's process, where torch crashes on the GPU."""
    for path in (ROOT / "benchmarks" / "operators").glob("*.py"):
        assert not re.search(r"^(import|from) torch", path.read_text(), re.MULTILINE), path.name


def test_only_operators_name_operators():
    for path in (ROOT / "benchmarks").glob("*.*"):
        if path.suffix in (".py", ".cu", ".h"):
            for op in BENCHMARKS:
                assert not re.search(rf"""["']{op}["']""", path.read_text()), f"{path.name} names {op}"


@pytest.mark.wide
def test_interrupt(tmp_path):
    """An interrupted benchmark keeps what it has measured. SIGTERM does what SIGINT does."""
    few = "--op", "silu,sigmoid", "--dtype", "float32", "--quick", "--device-target", "CPU"
    command = [sys.executable, "-m", "benchmarks", *few]
    options = dict(cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([*command, "--output", str(tmp_path)], **options) as process:
        progress = ""
        while "sigmoid" not in progress:
            progress += process.stderr.read(1)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate()
    assert process.returncode == 1
    assert "after the interrupt" in printed
    rows, _ = report.read(tmp_path)
    assert "silu" in {row["op"] for row in rows if row["by"] == "msops"}
    assert "graph" not in {row["part"] for row in rows}


@pytest.mark.parametrize(
    ("arguments", "whole", "kept"),
    [("", True, True), ("", False, False), ("--quick", True, False), ("--dtype float16", True, False),
     ("--op silu", True, False), ("--op llm --jobs training", True, False)],
)  # fmt: skip
def test_a_part_does_not_replace_the_results(tmp_path, monkeypatch, capsys, arguments, whole, kept):
    """Only a run of everything that came to its end writes to the folder of results, unless --output names it."""
    row = dict.fromkeys(report.COLUMNS, "") | dict(part="device", op="copy", us=1.0, bytes=1)
    monkeypatch.setattr(benchmark, "measure", lambda options, log: ([row], [], whole))
    for name in ("RESULTS", "PARTS"):
        monkeypatch.setattr(benchmark, name, tmp_path / name)
    for output in ("", tmp_path / "there"):
        argv = [
            "benchmarks",
            "--device-target",
            "CPU",
            *arguments.split(),
            *(["--output", str(output)] if output else []),
        ]
        monkeypatch.setattr(sys, "argv", argv)
        with contextlib.nullcontext() if whole else pytest.raises(SystemExit):
            benchmark.main()
        folder = output or tmp_path / ("RESULTS" if kept else "PARTS") / "cpu"
        assert f"results: {folder}\n" in capsys.readouterr().out
        assert len(report.read(folder)[0]) == 1
        assert kept or not (tmp_path / "RESULTS").exists()


@pytest.mark.wide
def test_scaling(tmp_path):
    small = ["--channels=4", "--blocks=1", "--size=8", "--batch=8", "--steps=1", "--output", tmp_path / "scaling.csv"]
    done = run_python(ROOT / "benchmarks" / "scaling.py", "--device-target=CPU", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in (tmp_path / "scaling.csv").read_text().splitlines() if not line.startswith("#")]
    one, weak, strong = csv.DictReader(lines)
    assert [(row["processes"], row["batch"]) for row in (one, weak, strong)] == [("1", "8"), ("2", "16"), ("2", "8")]
    for row in (one, weak, strong):
        lowest, speed, highest = (float(row[name]) for name in ("lowest", "images_s", "highest"))
        assert 0 < lowest <= speed <= highest
        assert float(row["times_one"]) == pytest.approx(speed / float(one["images_s"]), rel=1e-3)


def results_of(case, inputs, empty, stream=None):
    """Returns the results of our entry, without scratch, in arrays from `empty(shape, dtype)`."""
    outputs = [empty(*output) for output in outputs_of(case.operator, inputs)]
    call = prepare_operator(case.operator, [*inputs, *outputs], *([] if stream is None else [stream]))
    assert call() == 0
    return outputs[: len(case.results)]


def assert_close(got, want, what):
    assert len(got) == len(want)
    for each in zip(got, want):
        a, b = (np.asarray(array, "float64") for array in each)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1, np.abs(b).max()), err_msg=str(what))


def kernel_calls(op, only_formula=False):
    """Yields a case with its inputs, its results, and the tensors of the forward case before it, by name. If only the
    formula's results have gradients, those of the others are 0."""
    from benchmarks.kernels import CpuArrays, random_inputs

    known = {}
    for case in kernel_cases("CPU", [op], quick=True):
        names, outputs = case.operator.names()
        inputs = random_inputs(case, "float32", CpuArrays())
        if case.formula_inputs:  # a gradient takes what fits of the forward case
            inputs = [
                known[name] if name in known and known[name].shape == x.shape else x for name, x in zip(names, inputs)
            ]
            left_out = {f"d{name}" for name in known if only_formula and name not in case.formula_results}
            inputs = [np.zeros_like(x) if name in left_out else x for name, x in zip(names, inputs)]
        want = results_of(case, inputs, np.empty)
        if case.direction == "forward":
            known = dict(zip([*names, *outputs], [*inputs, *want]))
        yield case, inputs, want, known


@pytest.mark.wide
@pytest.mark.parametrize("op", KERNELS)
def test_numpy_peers_agree(op):
    for case, inputs, want, _ in kernel_calls(op):
        (call,) = numpy_peers.prepare(case, [inputs])
        got = call()
        assert_close(got if isinstance(got, tuple) else (got,), want, case)


@pytest.mark.wide
@pytest.mark.parametrize("op", KERNELS)
def test_torch_peers_agree(op):
    torch = pytest.importorskip("torch")
    from benchmarks import torch_peers

    for case, inputs, want, known in kernel_calls(op, only_formula=True):
        tensors = {name: torch.from_numpy(x) for name, x in known.items()}
        for name, make in torch_peers.peers(case, [[torch.from_numpy(x) for x in inputs]], tensors):
            if name != "torch.compile":
                (call,) = make()
                got = call()
                got = got if isinstance(got, tuple) else (got,)
                # attention also returns lse, which torch keeps to itself
                assert_close([x.detach().numpy() for x in got], want[: len(got)], case)


LIGER = """from torch.nn.functional import rms_norm

class LigerRMSNormFunction:
    def apply(x, weight, eps, offset, casting_mode, in_place):
        assert (offset, casting_mode, in_place) == (0, "llama", False)
        return rms_norm(x, weight.shape, weight, eps)
"""


@pytest.mark.wide
def test_installed_libraries_are_peers(tmp_path, monkeypatch):
    """A library that is installed is a peer on its device, in named and other cases. If it cannot be imported, its own
    calls fail."""
    torch = pytest.importorskip("torch")
    from benchmarks import libraries, torch_peers

    (tmp_path / "stand_in_for_liger.py").write_text(LIGER)
    (tmp_path / "broken_quack.py").write_text("raise ImportError('no CuTe DSL')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "MODULES", {"Liger": "stand_in_for_liger"})
    assert libraries.peers({"Liger": None}, torch.device("cpu")) == {}
    monkeypatch.setattr(libraries, "DEVICE", "cpu")
    for case, inputs, want, known in kernel_calls("rms_norm"):
        tensors = {name: torch.from_numpy(x) for name, x in known.items()}
        for module in ("missing_quack", "broken_quack"):
            monkeypatch.setattr(libraries, "MODULES", {"Liger": "stand_in_for_liger", "quack": module})
            peers = dict(torch_peers.peers(case, [[torch.from_numpy(x) for x in inputs]], tensors))
            of_quack = ["quack"] if module == "broken_quack" else []
            assert list(peers) == ["torch", "Liger", *of_quack, *["torch.compile"] * case.named]
        (call,) = peers["Liger"]()
        for _ in range(2):
            got = call()
            assert_close([x.detach() for x in (got if isinstance(got, tuple) else (got,))], want, case)
        with pytest.raises(ImportError, match="no CuTe DSL"):
            [call() for call in peers["quack"]()]


@pytest.fixture(params=SEQUENCES)
def sequence(request):
    """Returns a case's benchmark, its inputs, the gradients of its results, and (our results, our gradients)."""
    from benchmarks.kernels import CpuArrays

    (case,) = sequence_cases("CPU", [request.param], quick=True)
    inputs, douts, calls = case.benchmark.sequence_calls(case.size, "float32", CpuArrays(), None)
    return case.benchmark, inputs, douts, (calls["forward"](), calls["forward+backward"]())


def test_numpy_sequences_agree(sequence):
    benchmark, inputs, douts, (results, gradients) = sequence
    calls = benchmark.numpy_sequences(inputs, douts)
    assert_close(calls["forward"](), results, "forward")
    assert_close(calls["forward+backward"](), gradients, "backward")


@pytest.mark.wide
def test_torch_sequences_agree(sequence):
    torch = pytest.importorskip("torch")
    benchmark, inputs, douts, (results, gradients) = sequence
    tensors = [[torch.from_numpy(x) for x in arrays] for arrays in (inputs, douts)]
    for name, factor, calls in benchmark.torch_sequences(*tensors, named=True):
        got, (dx, *_) = calls["forward"](), calls["forward+backward"]()
        assert [x.shape for x in got] == [x.shape for x in results], name
        assert dx.shape == gradients[0].shape, name
        assert name.endswith("x 3/4") == (factor == 3 / 4), name


@pytest.mark.wide
def test_torch_lltm_agrees():
    """The LLTM that torch steps through agrees with ours; the benchmark times it only on the GPU, in a CUDA graph."""
    torch = pytest.importorskip("torch")
    from benchmarks.kernels import CpuArrays
    from benchmarks.operators.lltm import torch_stepped

    (case,) = sequence_cases("CPU", ["lltm"], quick=True)
    inputs, douts, ours = case.benchmark.sequence_calls(case.size, "float32", CpuArrays(), None)
    _, factor, calls = torch_stepped(*([torch.from_numpy(x) for x in arrays] for arrays in (inputs, douts)))
    dx, _, _, *dparameters = ours["forward+backward"]()
    assert factor == 1
    assert_close([x.numpy() for x in calls["forward"]()], ours["forward"](), "forward")
    assert_close([x.numpy() for x in calls["forward+backward"]()], [dx, *dparameters], "backward")


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.wide)])
def test_pictures_of_many_operators(count):
    from benchmarks import plots

    rows = [
        dict(part="device", op="copy", direction="", case="", dtype="", by="", us=1000, bytes=4e9, named=0, beside="")
    ]
    for op in (f"operator_{i}" for i in range(count)):
        for case, by in itertools.product(("2^20", "2^28"), ("msops", "torch", "naive CUDA")):
            row = dict(part="kernel", op=op, direction="forward", case=case, dtype="float32", by=by, us=1200)
            rows.append(dict(row, bytes=4e9, operations=0, named=1, beside=""))
    report.finish(rows)
    figure = plots.shares(rows[1:], "test")
    figure.draw_without_rendering()
    assert [axes.get_title() for axes in figure.axes] == sorted({row["op"] for row in rows[1:]})
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert len(legend.get_texts()) == 3
    figure = plots.speedups([row for row in rows if row["times_faster"]], "test")
    figure.draw_without_rendering()
    assert len(figure.axes) == count
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("device", ["GPU", "CPU"])
def test_targets_find_their_cases(op, device):
    rows = [
        dict(part="device", op="copy", direction="", case="", dtype="", by="", us=1, bytes=4e6, named=0, beside=""),
        dict(part="device", op="nothing", direction="", case="", dtype="", by="", us=1, bytes=0, named=0, beside=""),
        dict(
            part="device", op="multiply-add", direction="", case="", dtype="", by="", us=1, bytes=0, named=0, beside=""
        ),
    ]
    rows[-1]["operations"] = 1e7
    of_libraries = "Pointnet2_PyTorch", "torch-ngp", "ngp_pl", "torch._grouped_mm", "tinygemm", "torch._int_mm"
    peers = "msops", "torch", "NumPy", "MindSpore", "matmul + cross_entropy", "one matmul", "dense", *of_libraries
    for case, dtype, by in itertools.product(kernel_cases(device, [op]), ("float32", "float16"), peers):
        row = dict(part="kernel", op=op, direction=case.direction, case=case.name, dtype=dtype, by=by, us=1)
        rows.append(dict(row, bytes=1e6, operations=0, named=case.named, beside=case.beside))
    for case, dtype, by in itertools.product(cell_cases(device, [op]), ("float32", "float16"), peers):
        for part, direction in itertools.product(("graph", "pynative"), ("forward", "forward+backward")):
            row = dict(part=part, op=op, direction=direction, case=case.name, dtype=dtype, by=by, us=1)
            rows.append(dict(row, bytes=0, operations=0, named=1, beside=""))
    report.finish(rows)
    for target in BENCHMARKS[op].targets.get(device, ()):
        assert list(target.figures(rows)), f"{op}: no case is like {target.what}"


def test_pages_show_the_results():
    """`python -m benchmarks.pages` writes the tables of the READMEs."""
    every = pages.runs()
    names = [name for path in pages.PAGES for name in pages.TABLES if pages.BEGIN.format(name) in path.read_text()]
    assert sorted(names) == sorted(pages.TABLES)
    for path in pages.PAGES:
        assert path.read_text() == pages.written(path.read_text(), every), path


def test_headlines_are_cases():
    """A case that no operator has would be missing from the README without a word."""
    for each in BENCHMARKS.values():
        names = {each.describe(size) for sizes in each.sizes.get("GPU", ()) for size in sizes.named}
        assert {case for case, _ in each.headline} <= names
        assert all(each.flops(case, "forward") != 0 for case, _ in each.headline)
    attention = BENCHMARKS["flash_attention"]
    forward = attention.flops("B4 H16 T4096 D128 causal", "forward")
    assert forward == 4 * 4 * 16 * 4096**2 * 128 / 2
    assert attention.flops("B4 H16 T4096 D128 causal", "backward") == 2.5 * forward
    kinds = {(direction, f"{texts} x {length}") for direction, texts, length in llm.CASES["GPU"]}
    assert {(direction, case) for direction, case, _ in llm.HEADLINE} <= kinds


def test_tables_of_pages():
    """A loss is shown as one, and a case of two runs comes from that with more peers, or with CUDA graphs."""
    case, model = BENCHMARKS["rms_norm"].headline[0], llm.HEADLINE[0]

    def row(by, us, part="kernel", op="rms_norm", direction="forward", case=case, **more):
        numbers = dict.fromkeys(report.NUMBERS, None)
        numbers |= dict(us=us, share=0.5 if by == "msops" and part == "kernel" else None, tokens_s=1e6 / us, **more)
        return dict(
            numbers, part=part, op=op, direction=direction, case=case[0], dtype=case[1], by=by, named=True, beside=""
        )

    language = dict(part="model", op=llm.NAME, direction=model[0], case=model[1:])
    cells = [row("MindSpore", 50, part="graph", times_faster=factor) for factor in (0.5, 3.0, 4.0)]
    few = [row("msops", 100.0), row("torch", 150.0), *cells]
    more = [row("msops", 110.0), row("torch", 150.0), row("Liger", 99.0), row("msops", 8.0, **language)]
    every = {"few": (few, pages.GPU), "more": (more, pages.GPU), "other": ([*few, *more], "another GPU")}

    (line,) = pages.kernels(every)[2:]
    assert line.startswith(f"| `rms_norm` | {pages.plain(case[0])} | {case[1]} | 110 | 0.50 | Liger | 0.90 |")
    assert "(results/more)" in line
    first, last = pages.headline(every)[2:]
    assert first.endswith("| 110 | 0.50 | Liger **99**, PyTorch 150 |")
    assert last.endswith("| **125,000** |  |  |")
    every["graphs"] = [row(llm.GRAPH, 5.0, **language)], pages.GPU
    assert pages.headline(every)[-1].endswith("| **200,000** |  |  |")
    assert pages.cells(every)[2].startswith(f"| {pages.GPU} | 2 of 3 | 0.50 | 3.00 | 4.00 |")
    assert "|  | 200,000 |  |  |  |  | [graphs]" in pages.models(every)[2]
    assert [pages.plain(text) for text in ("2^10 x 2^17", "2^20", "k3 2^15 + 1")] == [
        "1024 x 131072",
        "2^20",
        "k3 32768 + 1",
    ]


def test_targets_and_picture_of_sequences(tmp_path):
    from benchmarks import plots

    rows = []
    for case in sequence_cases("GPU", ["lltm"]):
        for dtype in precisions("GPU", ["float32", "float16"]):
            for direction in ("forward", "forward+backward"):
                for by, us in (("msops", 128), ("cuDNN LSTM x 3/4", 192), ("stepped cell, CUDA graph", 640)):
                    row = dict(part="sequence", op="lltm", direction=direction, case=case.name, dtype=dtype)
                    row.update(by=by, us=us, us_step=us / 128, named=int(case.named), bytes=0, operations=0)
                    rows.append(row)
    report.finish(rows)
    report.write(tmp_path / report.FILE, rows, {"device": "NVIDIA test", "driver": "1"})
    rows, _ = report.read(tmp_path)
    lines = [line for line in targets.table(rows, "GPU") if line.startswith("| lltm |")]
    assert [line.split(" | ")[4:] for line in lines] == [["1.5", "yes |"], ["5", "no: 6 of 6 |"]]
    plots.draw(tmp_path)
    assert (tmp_path / "sequences.png").stat().st_size > 10_000


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", KERNELS)
def test_naive_kernels_agree(op, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not has_gpu_code("add") or not naive.available(op):
        pytest.skip("needs a GPU, libraries that nvcc built, and a naive version")
    from benchmarks.kernels import GpuArrays

    stream = torch.cuda.Stream()
    for case in kernel_cases("CPU", [op], quick=True):
        with torch.cuda.stream(stream):
            kind = dict(device="cuda", dtype=getattr(torch, dtype))
            inputs = [torch.randn(shape, **kind) for shape in case.inputs]
            want = results_of(case, inputs, GpuArrays().empty, stream.cuda_stream)
            got = [torch.empty_like(x) for x in want]
            launch = naive.prepare_case(case, inputs, got, stream.cuda_stream)
            if launch is None:
                continue
            assert launch() == 0
            stream.synchronize()
        tolerance = 1e-4 if dtype == "float32" else 5e-3
        for a, b in zip(got, want):
            scale = max(1, b.double().abs().max().item())
            assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance * scale), case


@pytest.mark.parametrize("op", NEURAL_FIELDS)
def test_kernels_of_neural_fields_agree(op):
    """Almost all that torch-ngp and ngp_pl compute is close to ours. The scales of torch-ngp's grids are of float32, it
    adds float16 in float16, and rays may graze a box or a cell."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not has_gpu_code("add"):
        pytest.skip("needs a GPU, and libraries that nvcc built")
    from benchmarks.kernels import GpuArrays, random_inputs

    compared, stream = 0, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for case, dtype in itertools.product(kernel_cases("GPU", [op], quick=True), ("float32", "float16")):
            inputs = random_inputs(case, dtype, GpuArrays())
            want = results_of(case, inputs, GpuArrays().empty, stream.cuda_stream)
            tolerance = 1e-2 if dtype == "float32" else 5e-2
            for peer, prepare in case.benchmark.their_peers(case, inputs[0]).items():
                call, in_our_order = prepare(*inputs)
                call()  # the second call must not add to what the first one gave
                for a, b in zip(in_our_order(call()), want, strict=True):
                    if a is not None:
                        assert a.shape == b.shape, (peer, case)
                        close = torch.isclose(a.double(), b.double(), tolerance, tolerance * b.abs().median().item())
                        assert close.double().mean() > 0.99, (peer, case)
                        compared += 1
    if not compared:
        pytest.skip("needs checkouts of torch-ngp or ngp_pl")


def test_parts_may_use_all_threads(tmp_path, monkeypatch):
    """MindSpore tells processes that start after its import to use one thread. The benchmark's must not hear it."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "{\\"step\\": \\"${OMP_NUM_THREADS-all}\\"}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (tmp_path / "log.txt").open("w") as log:
        messages = [*parts.messages("part", ["module"], log)]
    assert messages == [{"step": os.environ.get("OMP_NUM_THREADS", "all")}]
