"""Tests that checkpoints of bfloat16 become what GPUs have kernels for."""

import json
import struct

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import msops
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 7), reason="older versions do not load bfloat16")
VALUES = {
    "small": np.array([1.5, -2, 0, 2.0**-17 * 1.9921875, 2.0**-40, np.inf, np.nan], np.float32),
    "largest": np.array([65280, -1], np.float32),
    "beyond": np.array([65536, 1], np.float32),
    "moments": np.array([2.0**-30, 2.0**-24], np.float32),
    "zeros": np.zeros((2, 3), np.float32),
}
WIDE = {"beyond", "moments"}


def write(path, arrays):
    """Writes a file of bfloat16 as PyTorch's users do, who have no NumPy for it."""
    header, parts, size = {}, [], 0
    for name, array in arrays.items():
        parts.append((array.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        header[name] = dict(dtype="BF16", shape=array.shape, data_offsets=[size, size := size + len(parts[-1])])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


@pytest.fixture(params=["safetensors", "ckpt"])
def parameters(request, tmp_path, device_target):
    """Loads the values by MindSpore."""
    if (request.param, device_target) == ("ckpt", "GPU"):
        pytest.skip("MindSpore makes no bfloat16 on a GPU, of which the test writes a file")
    path = tmp_path / f"x.{request.param}"
    if request.param == "safetensors":
        write(path, VALUES)
        return mindspore.load_checkpoint(str(path), format="safetensors")
    rows = [dict(name=name, data=Parameter(Tensor(x).astype(mindspore.bfloat16))) for name, x in VALUES.items()]
    mindspore.save_checkpoint(rows, str(path))
    return mindspore.load_checkpoint(str(path))


def test_dtypes(parameters):
    assert all(each.dtype == mindspore.bfloat16 for each in parameters.values())
    with pytest.warns(UserWarning, match="these do not fit into float16, and are float32: beyond, moments"):
        found = msops.convert_bfloat16(parameters)
    assert list(found) == list(parameters)
    for name, each in found.items():
        assert each.name == parameters[name].name
        assert each.dtype == (mindspore.float32 if name in WIDE else mindspore.float16)
        want = VALUES[name].astype(np.float32 if name in WIDE else np.float16)
        np.testing.assert_array_equal(each.asnumpy(), want)


class Scaled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.largest = Parameter(Tensor(np.zeros(2, np.float16)))
        self.beyond = Parameter(Tensor(np.zeros(2, np.float32)))


@pytest.mark.filterwarnings("ignore:convert_bfloat16")
def test_loading(parameters):
    network = Scaled()
    converted = msops.convert_bfloat16(parameters)
    missing, _ = mindspore.load_param_into_net(network, {name: converted[name] for name in ("largest", "beyond")})
    assert not missing
    np.testing.assert_array_equal(network.largest.asnumpy(), VALUES["largest"])
    np.testing.assert_array_equal(network.beyond.asnumpy(), VALUES["beyond"])


def test_others_stay(recwarn):
    whole = Parameter(Tensor(np.arange(3)), name="whole")
    assert msops.convert_bfloat16({"whole": whole})["whole"] is whole
    assert not recwarn
    with pytest.raises(TypeError, match="convert_bfloat16: parameters must be a dict, got list"):
        msops.convert_bfloat16([whole])
