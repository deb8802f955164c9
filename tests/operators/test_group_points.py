import numpy as np
import pytest

import msops
from card import zeros
from msops.compat import VERSION
from msops.operators.group_points import forward
from test_gather_points import GatherTest, check_far, sizes

pytestmark = pytest.mark.skipif(VERSION < (2, 0), reason="not yet tested with MindSpore 1.10")


class TestGroupPoints(GatherTest):
    function, cell, operator = msops.group_points, msops.GroupPoints, forward
    cases = {
        "small": sizes(2, 3, 5, 7, 4),
        "one": sizes(1, 1, 1, 1, 1),
        "no groups": sizes(2, 3, 5, 0, 4),
        "empty groups": sizes(2, 3, 5, 4, 0),
        "no points": sizes(1, 2, 0, 0, 3),
        "large": sizes(2, 9, 1500, 200, 17),
    }
    further = {
        f"{shape}": sizes(*shape)
        for shape in ((2, 16, 1024, 256, 32), (1, 5, 40_000, 700, 3), (1, 64, 100, 1, 100), (2, 7, 513, 129, 31))
    }
    huge = ((5, 64, 4096, 2**15, 211),)
    wrong = (
        ([*zeros((2, 3, 4), dtype=np.int32), np.zeros((2, 5, 1), np.int32)], {}, TypeError,
         "group_points: features must be float16, float32 or float64, got int32"),
        (zeros((2, 3, 4), (2, 5, 1)), {}, TypeError, "group_points: idx must be int32 or int64, got float32"),
        ([*zeros((2, 3, 4)), np.zeros((3, 5, 1), np.int32)], {}, ValueError,
         "group_points: idx must have shape (B, M, S) = (2, 5, 1), got (3, 5, 1)"),
        ([*zeros((2, 3, 4)), np.zeros((2, 5), np.int32)], {}, ValueError, "idx must have shape (B, M, S), got (2, 5)"),
    )  # fmt: skip


def test_index_out_of_range(mode, capfd):
    idx = np.array([[[0, 1], [4, 4]], [[3, 2], [1, 0]]])
    check_far(capfd, TestGroupPoints(), "GroupPoints", idx, (1, 0, 1))
