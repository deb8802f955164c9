"""Programs that take rows of a table."""

import numpy as np
from mindspore import mint

from . import case

F = mint.nn.functional
TABLE = np.random.default_rng(0).standard_normal((6, 3))
IDS = np.array([[1, 5, 1], [0, 2, 1]])


@case(TABLE, IDS, reference=lambda table, ids: table[ids], dtypes=("float16", "float32"))
def rows(table, ids):
    return F.embedding(ids, table)


def without_gradient(table, ids):
    """Copies rows 1 from a table that does not vary."""
    return np.where((ids == 1)[..., None], np.float32(TABLE)[1], table[ids])


@case(TABLE, IDS, reference=lambda table, ids: (without_gradient(table, ids), without_gradient(table, ids)))
def rows_with_padding(table, ids):
    return F.embedding(ids, table, 1), F.embedding(ids, table, -5)


def by_frequency(table, ids):
    kept = np.float64(np.float32(TABLE))
    counts = np.bincount(ids.ravel(), minlength=6)[ids][..., None]
    return kept[ids] + (table - kept)[ids] / counts


@case(TABLE, IDS, reference=by_frequency)
def rows_by_frequency(table, ids):
    return F.embedding(ids, table, scale_grad_by_freq=True)
