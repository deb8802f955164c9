"""A Llama whose matrices stay as they lie in the GGUF file, in blocks of 4 to 8 bits."""

from functools import partial

import mindspore
from mindspore import Parameter, Tensor
from mindspore.nn.utils import no_init_parameters

import msops
from llama import Llama
from weights import FileError, names, settings_of

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class QuantizedLlama(Llama):
    """Its embedding is blocks of `kind`, and its layers' matrices are GGUFMatmul. It has so many `numbers`."""

    kind, numbers = "", 0

    def embed(self, tokens):
        return msops.gguf_embedding(tokens, self.embedding, self.kind, self.dtype)

    def score(self, x):
        if self.head is not None:
            return self.head(x)
        return msops.gguf_matmul(x, self.embedding, self.kind)


def load(file, length, dtype=mindspore.float32):
    """Returns a QuantizedLlama with the weights of the file, as `weights.load` does."""
    settings = settings_of(file, length)
    with no_init_parameters():
        net = QuantizedLlama(msops, **settings, dtype=dtype)
    parameters = net.parameters_dict()
    for name, theirs in names(file, settings["layers"]):
        wanted = parameters.pop(name)
        if wanted.shape != file.shape(theirs):
            raise FileError(f"{file.path}: {theirs} must have shape {wanted.shape}, got {file.shape(theirs)}")
        net.numbers += wanted.size
        if len(wanted.shape) == 1:  # norms and biases
            wanted.set_dtype(dtype)
            wanted.set_data(Tensor(file.tensor(theirs), dtype))
            continue
        kind = file.kind(theirs)
        if kind not in KINDS:
            raise FileError(f"{file.path}: {theirs} is of type {kind}; --bits 4 takes {', '.join(KINDS)}")
        blocks = Tensor(file.blocks(theirs))
        if name == "embedding":
            net.kind, net.embedding = kind, Parameter(blocks, name=name, requires_grad=False)
        else:
            replace(net, name, partial(of_blocks, blocks=blocks, kind=kind, dtype=dtype))
    if parameters:
        raise FileError(f"{file.path} lacks weights: {', '.join(parameters)}")
    return net


def matrices(net):
    """Returns the names of the layers' matrices."""
    return [name for name, p in net.parameters_and_names() if name.startswith("layers") and p.ndim == 2]


def replace(net, name, make):
    """Puts make(linear) in the place of the Linear whose weight has this name."""
    *path, last, _ = name.split(".")
    parent = net
    for part in path:
        parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
    setattr(parent, last, make(getattr(parent, last)))


def of_blocks(linear, blocks, kind, dtype):
    """Returns a GGUFMatmul of these blocks, with the bias of a Linear."""
    rows, columns = linear.weight.shape
    layer = msops.GGUFMatmul(columns, rows, kind, linear.bias is not None, dtype)
    layer.blocks.set_data(blocks)
    layer.bias = linear.bias  # which may be read later, since it is the same Parameter
    return layer
