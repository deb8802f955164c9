import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import length, lengths, random, zeros
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.operators.embedding import operators
from msops.testing.checks import Gradient, Net, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, wide_in_graph_mode
from test_gather_points import far_indices


def taken(rows, ids, padding):
    """Returns which places take a row."""
    return (ids >= 0) & (ids < rows) & (ids != padding)


def take(ids, weight, padding=-1, **_):
    out = np.zeros((*ids.shape, weight.shape[1]), weight.dtype)
    is_taken = taken(len(weight), ids, padding)
    out[is_taken] = weight[ids[is_taken]]
    return (out,)


def add_up(ids, dout, weight, padding_idx=None):
    dweight = np.zeros_like(weight)
    padding = -1 if padding_idx is None else padding_idx % max(1, len(weight))
    is_taken = taken(len(weight), ids, padding)
    np.add.at(dweight, ids[is_taken], dout[is_taken])
    return (dweight,)


def case(places, rows, columns, padding_idx=None):
    settings = {} if padding_idx is None else dict(padding_idx=padding_idx)
    return [(places,) if isinstance(places, int) else places, (rows, columns)], settings


class TestEmbedding(OperatorTest):
    function = msops.embedding
    formulas = (lambda ids, weight, padding_idx=None: take(ids, weight), add_up)
    second_order = True
    small = "small"
    right_numbers = {"padding": (-1,)}
    cases = {
        "small": case((2, 3), 4, 5),
        "padding": case(9, 3, 8, 1),
        "last row is padding": case(9, 3, 8, -1),
        "one": case(1, 1, 1),
        "a number": case((), 3, 4),
        "no places": case((2, 0), 3, 4),
        "no columns": case(3, 2, 0),
        "odd": case((3, 5, 7), 11, 67),
        "large": case((4, 1000), 300, 130),
    }
    further = {
        "no rows": case(0, 0, 3),
        "many places for each row": case(5000, 3, 24),
        "all places take one row": case(1025, 1, 16),
        "whole tiles": case(64, 4, 8),
        "a tile": case(16, 1, 40),
        "many rows": case(3000, 20_000, 8, 7),
        "columns of a run": case(40, 9, 64),
    }
    huge = ((2**17, 50_000, 17_001), (2**22, 30_000, 520))
    wrong = (
        ([*zeros((2,)), *zeros((3, 4))], {}, TypeError, "embedding: ids must be int32 or int64, got float32"),
        ([np.zeros(2, np.int32), 3], {}, TypeError, "embedding: weight must be a Tensor, got int"),
        ([np.zeros(2, np.int32), *zeros((3, 4))], dict(padding_idx=3), ValueError,
         "embedding: padding_idx must be from -3 to 3 - 1, got 3"),
        ([np.zeros(2, np.int32), *zeros((3, 4))], dict(padding_idx=1.0), TypeError,
         "embedding: padding_idx must be an int"),
    )  # fmt: skip

    def operators(self, shapes=(), padding_idx=None):
        forward = operators() if padding_idx is None else operators(padding_idx % shapes[1][0])
        return [forward, forward.gradient]

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Returns indices of all rows, half of which are often the same."""
        rng = np.random.default_rng(seed)
        ids = np.asarray(rng.integers(0, max(1, shapes[1][0]), shapes[0]))
        if ids.ndim and rng.random() < 0.5:
            ids[..., ids.shape[-1] // 2 :] = ids[..., :1]
        kind = np.int64 if shapes[1][0] % 2 else np.int32
        return [ids.astype(kind), np.asarray(rng.standard_normal(shapes[1]), dtype)]

    def douts(self, inputs, settings):
        ids, weight = inputs
        return [np.asarray(random(2, np.float64, (*ids.shape, weight.shape[1]))[0], weight.dtype)]

    def random_case(self, random):
        """Chooses no places if there are no rows, since no index would be right."""
        rows = length(random)
        return case(lengths(random) if rows else 0, rows, length(random))

    def check_huge(self, gpu, places, rows, columns):
        torch = gpu.torch
        forward, backward = self.operators()
        weight = gpu.random(rows, columns)
        ids = torch.randint(rows, (places,), device="cuda", dtype=torch.int32)
        ids[::2] = 3
        out = gpu.run(forward, ids, weight)[0]
        for part in (slice(0, 100), slice(places - 100, places)):
            gpu.assert_equal(out[part], weight[ids[part].long()])
        dweight = gpu.run(backward, ids, out, weight)[0]
        counts = torch.zeros(rows, device="cuda").scatter_add_(0, ids.long(), torch.ones(places, device="cuda"))
        for part in (slice(0, 100), slice(rows - 100, rows)):
            gpu.assert_sums(dweight[part], weight[part].double() * counts[part, None])


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_cell(mode, padding_idx):
    weight, dout = random(0, np.float32, (6, 4), (2, 3, 4))
    ids = np.array([[2, 0, 2], [5, 2, 0]])
    net = msops.Embedding(6, 4, padding_idx, weight_init=Tensor(weight))
    np.testing.assert_array_equal(run(net, ids)[0], weight[ids])
    gradient = mindspore.ops.GradOperation(get_by_list=True, sens_param=True)(net, [net.weight])
    got = gradient(Tensor(ids), Tensor(dout))[0].asnumpy()
    np.testing.assert_allclose(got, *add_up(ids, dout, weight, padding_idx), rtol=1e-6)
    assert f"num_embeddings=6, embedding_dim=4, padding_idx={padding_idx}" in str(net)


def test_wrong_settings_of_cell():
    for settings, error, words in (
        (dict(num_embeddings=0), ValueError, "Embedding: num_embeddings must be at least 1"),
        (dict(embedding_dim=2.0), TypeError, "Embedding: embedding_dim must be an int"),
        (dict(padding_idx=-7), ValueError, "Embedding: padding_idx must be from -6 to 6 - 1, got -7"),
    ):
        with pytest.raises(error, match=words):
            msops.Embedding(**{**dict(num_embeddings=6, embedding_dim=4), **settings})


@wide_in_graph_mode
def test_index_out_of_range(mode, capfd):
    """An index out of range is the entry's error on the CPU, and gives 0 and no gradient on a GPU."""
    weight, dout = random(0, np.float32, (5, 3), (2, 2, 3))
    for far in far_indices(mode):
        ids, net = np.array([[0, 4], [far, 1]]), Net(msops.embedding)
        if mindspore.get_context("device_target") == "GPU":
            np.testing.assert_array_equal(run(net, ids, weight)[0], *take(ids, weight))
            got = run_gradient(net, [ids, weight], [dout])[1]
            np.testing.assert_allclose(got, *add_up(ids, dout, weight), rtol=1e-6, atol=1e-6)
            continue
        with pytest.raises(RuntimeError, match=re.escape(f"embedding: ids[1, 0] is {far}, but weight has 5 rows")):
            run(net, ids, weight)
    card = TestEmbedding()
    call = card.entry_calls(*card.cases["small"], "float32")[1]
    call.inputs[0][1, 1] = 4
    assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


def test_third_order(mode):
    """The gradient of the gradient takes rows again, without the padding, and so on."""
    if mode == "pynative" and VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 has none, with a given gradient of the output, in PyNative mode")
    weight, dout, ddweight = random(0, np.float32, (5, 3), (4, 3), (5, 3))
    ids = np.array([4, 1, 1, 0])
    gradient = Gradient(Net(msops.embedding, padding_idx=1), 2)
    got = run_gradient(gradient, [ids, weight, dout], [np.zeros_like(ids), ddweight])[2]
    np.testing.assert_array_equal(got, *take(ids, ddweight, 1))


def test_many_places_of_a_row_keep_digits(mode):
    """Sums of many equal numbers in float16 are those of float32, rounded once."""
    ids, weight = np.zeros(40_000, np.int32), np.zeros((2, 8), np.float16)
    dout = np.full((40_000, 8), 0.25, np.float16)
    got = run_gradient(Net(msops.embedding), [ids, weight], [dout])[1]
    np.testing.assert_array_equal(got, [[10_000] * 8, [0] * 8])
