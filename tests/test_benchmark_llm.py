"""Tests the benchmark of a language model on a tiny one: its rows, what becomes of peers that fail, and that torch's
network computes what MindSpore's does."""

import argparse
import json
import os

import numpy as np
import pytest

from benchmarks import __main__ as benchmark, llm, report, targets
from benchmarks.llm import run, shares
from child import environment, run_python
from msops.compat import VERSION

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore"),
]
OPTIONS = argparse.Namespace(device_target="CPU", op=(llm.NAME,), dtype=("float32",), quick=True, jobs="")


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Returns a function that lets `import torch` run a statement."""

    def make(statement):
        for package in ("torch", "transformers"):
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text(f"import os, sys\n{statement}\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]))
        monkeypatch.syspath_prepend(tmp_path)

    return make


def job(kind, by):
    return next(job for job in llm.jobs("CPU", ["float32"], quick=True) if (job.kind, job.by) == (kind, by))


def messages_of(job, folder):
    with (folder / "log.txt").open("w+") as log:
        log.write("an earlier job ran out of memory\n")
        return [message for message in run.run(job, log) if "step" not in message]


def test_run(tmp_path, monkeypatch, fake_torch):
    """A peer that dies is reported, the others are measured."""
    fake_torch("os._exit(7)")
    measured = [("training", "msops"), ("prefill", "msops"), ("prefill", llm.STACK), ("prefill", "MindSpore")]
    measured += [("decoding", "msops"), ("decoding", llm.STACK)]
    monkeypatch.setattr(OPTIONS, "jobs", "msops|MindSpore: llm prefill|torch: llm training")
    with (tmp_path / "log.txt").open("w+") as log:
        rows, troubles, whole = benchmark.measure(OPTIONS, log)
    assert not whole
    assert troubles == ["torch: llm training 2 x 16 float32 ended with status 7 at its start"]

    report.finish(rows)
    report.write(tmp_path / report.FILE, rows, {"device": "test"})
    rows, _ = report.read(tmp_path)
    assert [(row["direction"], row["by"]) for row in rows] == measured
    for row in rows:
        of_row = job(row["direction"], row["by"])
        assert (row["part"], row["op"], row["case"]) == ("model", "llm", of_row.case)
        assert 0 < row["us_25"] <= row["us"] <= row["us_75"] < 1e6 * row["first_s"]
        assert row["tokens_s"] == pytest.approx(1e6 * of_row.tokens / row["us"], rel=1e-3)
        assert row["peak_gb"] is None
    assert rows[3]["times_faster"] == pytest.approx(rows[3]["us"] / rows[1]["us"], rel=1e-3)
    lines = [line.split()[:7] for line in report.table(rows).splitlines() if line.startswith("llm prefill")]
    assert [line[5:] for line in lines] == [["float32", "msops"], ["float32", "msops,"], ["float32", "MindSpore"]]

    from benchmarks import plots

    plots.draw(tmp_path)
    assert (tmp_path / "models.png").stat().st_size > 10_000


def test_choice():
    """Without --op, the model is left out."""
    assert llm.NAME not in benchmark.parse([]).op
    assert not run.chosen(benchmark.parse([]))
    on_gpu = ["--op", "llm,sigmoid", "--device-target", "GPU"]
    assert len(run.chosen(benchmark.parse(on_gpu))) == 33
    assert len(run.chosen(benchmark.parse([*on_gpu, "--jobs", "^torch: .*training"]))) == 3


def test_without_torch(monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda package: None if package == "transformers" else package)
    monkeypatch.setattr(OPTIONS, "jobs", "torch: llm prefill")
    (message,) = run.messages(OPTIONS, None)
    assert message["failed"] == "torch: llm prefill 1 x 16 float32: transformers not installed"


@pytest.mark.parametrize(
    "statement", ["raise RuntimeError('CUDA out of memory')", "print(MemoryError(), file=sys.stderr); os.abort()"]
)
def test_out_of_memory(tmp_path, fake_torch, statement):
    fake_torch(statement.replace("MemoryError()", "'Device(id:0) memory isn\\'t enough and alloc failed'"))
    assert messages_of(job("prefill", "torch"), tmp_path) == [
        {"failed": "torch: llm prefill 1 x 16 float32: out of memory"}
    ]


def test_a_failed_job_may_end_badly(tmp_path, monkeypatch):
    found = [dict(failed="why"), dict(crashed="job ended with status -11 at its start")]
    monkeypatch.setattr(run.parts, "messages", lambda *_: iter(found))
    assert messages_of(job("prefill", "torch"), tmp_path) == found[:1]


def test_targets_and_picture(tmp_path):
    from benchmarks import plots

    speeds = {"msops": 100, llm.GRAPH: 85, llm.STACK: 80, "MindSpore": 900, "torch": 90, "torch.compile": 50}
    rows = []
    for each in llm.jobs("GPU", ["float16"]):
        if each.by != "MindSpore" or each.length < 8192:
            row = dict(part="model", op=llm.NAME, direction=each.kind, case=each.case, dtype=each.dtype, by=each.by)
            row.update(us=speeds[each.by], tokens_s=1e6 * each.tokens / speeds[each.by], bytes=0, named=1)
            rows.append(row)
    report.finish(rows)
    report.write(tmp_path / report.FILE, rows, {"device": "NVIDIA test", "driver": "1"})
    rows, about = report.read(tmp_path)
    lines = [line.split(" | ")[1:] for line in targets.table(rows, "GPU") if line.startswith("| llm |")]
    reached = [(what, wanted, *rest) for what, wanted, _, *rest in lines]
    assert reached == [
        ("training", "8 times MindSpore's own", "9", "yes |"),
        ("training", "not slower than PyTorch eager", "0.9", "no: 3 of 3 |"),
        ("all", "faster than MindSpore's own", "9", "yes |"),
    ]
    figure = plots.models(rows, about["device"])
    figure.draw_without_rendering()
    assert [axes.get_title() for axes in figure.axes] == ["training", "prefill", "decoding", "decoding"]
    assert [text.get_text() for text in figure.axes[0].texts].count("x") == 1  # 4 x 8192 by MindSpore alone
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_shares_are_of_the_step():
    each = job("training", "msops")
    assert sum(count for _, _, count in shares.matmuls(each)) == 7 * each.sizes["layers"] + 1
    rows = [
        dict(what="matmul a", us=20, count=2),
        dict(what="kernel b", us=10, count=3),
        dict(what="kernel c", us=5, count=1),
    ]
    lines = [line.split() for line in shares.report(200, rows)]
    assert [line[1] for line in lines if "all" in line] == ["20.0%", "17.5%"]
    assert lines[-1][:2] == ["0.125", "62.5%"]


TORCH = """
import json, sys
import numpy as np
import torch
from benchmarks.llm import Job, of_torch

values, job = dict(np.load(sys.argv[2])), Job(**json.loads(sys.argv[1]))
names = {"embedding": "model.embed_tokens.weight", "norm.weight": "model.layers.0.input_layernorm.weight"}
for i in range(job.sizes["layers"]):
    here, last = f"model.layers.{i}", i + 1 == job.sizes["layers"]
    parts = {f"attention.{name}": f"{here}.self_attn.{name[0]}_proj" for name in ("query", "key", "value", "output")}
    parts.update({f"feed_forward.{name}": f"{here}.mlp.{name}_proj" for name in ("gate", "up", "down")})
    parts["norm1"] = f"{here}.post_attention_layernorm"
    parts["norm2"] = "model.norm" if last else f"model.layers.{i + 1}.input_layernorm"
    names.update({f"layers.{i}.{ours}.weight": f"{theirs}.weight" for ours, theirs in parts.items()})
tokens = torch.from_numpy(values.pop("tokens"))
assert values.keys() == names.keys()
model = of_torch.network(job)
found = model.load_state_dict({names[name]: torch.from_numpy(x) for name, x in values.items()}, strict=False)
assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}, found

of_torch.network = lambda job: model
reader = of_torch.Reader(job, compiled=False)
with torch.no_grad():
    reader.go_to(0)
    whole = reader.read(tokens[:, :-1], 0)
    reader.go_to(job.length - 3)
    for place in range(job.length - 3, job.length):
        scores = reader.read(tokens[:, place : place + 1], place)
assert torch.allclose(scores, whole, atol=1e-5), (scores, whole)
loss, norm = of_torch.Trainer(model.train(), torch.float32, compiled=False).train(tokens[:, :-1], tokens[:, 1:])
print("found", json.dumps([loss, norm, scores.tolist()]))
"""


def test_torch_computes_the_same(tmp_path):
    """In torch and in MindSpore the scores, the loss and the gradients' norm are equal, with the same weights."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import mindspore
    from mindspore import Tensor

    from benchmarks.llm import of_mindspore

    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    each, rng = job("training", "msops"), np.random.default_rng(0)
    net = of_mindspore.network(each)
    for parameter in net.get_parameters():
        around = 1 if len(parameter.shape) == 1 else 0
        parameter.set_data(Tensor(rng.normal(around, 0.3, parameter.shape).astype(np.float32)))
    values = {parameter.name: parameter.asnumpy() for parameter in net.get_parameters()}
    tokens = rng.integers(0, each.sizes["vocabulary"], (each.texts, each.length + 1))
    np.savez(tmp_path / "values.npz", tokens=tokens, **values)
    done = run_python("-c", TORCH, json.dumps(each._asdict()), tmp_path / "values.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    loss, norm, scores = json.loads(done.stdout.partition("found ")[2])

    tokens = tokens.astype(np.int32)
    got = net(Tensor(tokens[:, :-1])).asnumpy()[:, -1]
    np.testing.assert_allclose(got, scores, rtol=1e-4, atol=1e-4)
    trainer = of_mindspore.Trainer(net, of_mindspore.NextTokenLoss(of_mindspore.OPERATORS["msops"]), 1e-4, 1, 1)
    (got,), of_gradients = trainer.train([(tokens[:, :-1], tokens[:, 1:])])
    np.testing.assert_allclose((got.asnumpy(), of_gradients.asnumpy()), (loss, norm), rtol=1e-4)
