"""Programs that compute losses."""

import numpy as np
import scipy.special
from mindspore import Tensor, mint

from . import case

F = mint.nn.functional
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 6, 5))
PLANES = RNG.standard_normal((2, 5, 3, 2))
LABELS, OF_PLANES = np.array([0, 4, -100, 2, 2, 1]), RNG.integers(0, 5, (2, 3, 2))
WEIGHT = RNG.uniform(0.5, 2, 5)
SIGNS = np.array([1.0, -1, 1, 1, -1, -1])
P, Q = scipy.special.softmax(X, 1), scipy.special.softmax(Y, 1)
BOTH = ("float16", "float32")


def likelihood(logp, labels, weight=None, reduction="mean", smoothing=0.0):
    """Computes a loss from logarithms of probabilities, whose classes are on axis 1."""
    rows = np.moveaxis(logp, 1, -1).reshape(-1, logp.shape[1])
    flat, weight = labels.reshape(-1), np.ones(logp.shape[1]) if weight is None else weight
    counts = flat != -100
    taken = np.where(counts, flat, 0)
    own = -rows[np.arange(len(flat)), taken] * weight[taken]
    losses = counts * ((1 - smoothing) * own - smoothing * (rows * weight).mean(1))
    if reduction == "mean":
        return losses.sum() / (counts * weight[taken]).sum()
    return losses.sum() if reduction == "sum" else losses.reshape(labels.shape)


def entropy(x, *settings):
    return likelihood(scipy.special.log_softmax(x, 1), *settings)


@case(
    X,
    reference=lambda x: (
        entropy(x, LABELS),
        entropy(x, LABELS, WEIGHT, "sum"),
        entropy(x, LABELS, WEIGHT, "none", 0.1),
        entropy(x, LABELS, WEIGHT, "mean", 0.2),
        entropy(x[:1], LABELS[:1]),
    ),
)
def cross_entropy(x):
    labels, weight = Tensor(LABELS), Tensor(WEIGHT.astype(np.float32))
    none = F.cross_entropy(x, labels, weight, reduction="none", label_smoothing=0.1)
    mean = F.cross_entropy(x, labels, weight, label_smoothing=0.2)
    return (
        F.cross_entropy(x, labels),
        F.cross_entropy(x, labels, weight, -100, "sum"),
        none,
        mean,
        F.cross_entropy(x[0], labels[0]),
    )


@case(
    X,
    PLANES,
    reference=lambda x, y: (entropy(x, LABELS), entropy(y, OF_PLANES), entropy(y, OF_PLANES, None, "none")),
    dtypes=BOTH,
)
def cross_entropy_of_planes(x, y):
    labels, of_planes = Tensor(LABELS), Tensor(OF_PLANES)
    return F.cross_entropy(x, labels), F.cross_entropy(y, of_planes), F.cross_entropy(y, of_planes, reduction="none")


def of_probabilities(x, q):
    terms = -scipy.special.log_softmax(x, 1) * (0.9 * q + 0.1 / x.shape[1])
    return (-scipy.special.log_softmax(x, 1) * q).sum(1).mean(), (terms * WEIGHT).sum(), terms.sum(1)


@case(X, Q, reference=of_probabilities)
def cross_entropy_of_probabilities(x, q):
    weight = Tensor(WEIGHT.astype(np.float32))
    none = F.cross_entropy(x, q, reduction="none", label_smoothing=0.1)
    return F.cross_entropy(x, q), F.cross_entropy(x, q, weight, reduction="sum", label_smoothing=0.1), none


@case(
    *(X, PLANES),
    reference=lambda x, y: (
        likelihood(x, LABELS),
        likelihood(x, LABELS, WEIGHT, "sum"),
        likelihood(y, OF_PLANES, WEIGHT),
        likelihood(y, OF_PLANES, None, "none"),
        likelihood(y[..., 0], OF_PLANES[..., 0], WEIGHT, "none"),
    ),
)
def likelihoods(x, y):
    labels, planes, weight = Tensor(LABELS), Tensor(OF_PLANES), Tensor(WEIGHT.astype(np.float32))
    of_planes = F.nll_loss(y, planes, weight), F.nll_loss(y, planes, reduction="none")
    lines = F.nll_loss(y[..., 0], planes[..., 0], weight, reduction="none")
    return F.nll_loss(x, labels), F.nll_loss(x, labels, weight, reduction="sum"), *of_planes, lines


def reductions(losses):
    return losses.mean(), losses.sum(), losses


@case(X, Y, reference=lambda x, y: (*reductions((x - y) ** 2), *reductions(np.abs(x - y))), dtypes=BOTH)
def distances(x, y):
    kinds = ("mean", "sum", "none")
    return *[F.mse_loss(x, y, each) for each in kinds], *[F.l1_loss(x, y, each) for each in kinds]


def smooth(x, y, beta):
    d = np.abs(x - y)
    return np.where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta)


@case(X, Y, reference=lambda x, y: (smooth(x, y, 1).mean(), smooth(x, y, 0.5)))
def smooth_distances(x, y):
    return F.smooth_l1_loss(x, y), F.smooth_l1_loss(x, y, "none", 0.5)


def divergences_reference(x, q):
    log_q = np.log(q)
    return (q * (log_q - x)).mean(), (q * (log_q - x)).sum() / 6, np.exp(q) * (q - x)


@case(X, Q, reference=divergences_reference)
def divergences(x, q):
    return F.kl_div(x, q), F.kl_div(x, q, "batchmean"), F.kl_div(x, q, "none", True)


@case(X, reference=lambda x: (x * 0).mean() - (np.eye(6, 5) * x).sum() / 30)
def divergences_of_certainties(x):
    return F.kl_div(x, mint.eye(6, 5))


def binary(p, q):
    return -(q * np.log(p) + (1 - q) * np.log1p(-p))


@case(
    *(P, Q, X),
    reference=lambda p, q, x: (
        binary(p, q).mean(),
        (binary(p, q) * WEIGHT).sum(),
        (np.logaddexp(0, x) - x * q).mean(),
        np.logaddexp(0, x) - x * q,
    ),
)
def binary_entropies(p, q, x):
    weight = Tensor(np.float32(np.broadcast_to(WEIGHT, P.shape)))
    of_logits = [F.binary_cross_entropy_with_logits(x, q, reduction=each) for each in ("mean", "none")]
    return F.binary_cross_entropy(p, q), F.binary_cross_entropy(p, q, weight, "sum"), *of_logits


def margins_reference(x, y):
    soft = np.logaddexp(0, -SIGNS[:, None] * x)
    cosine = (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))
    angles = np.where(SIGNS == 1, 1 - cosine, np.maximum(cosine - 0.1, 0))
    return soft.mean(), soft, angles.mean(), angles


@case(X, Y, reference=margins_reference)
def margins(x, y):
    signs = Tensor(SIGNS.astype(np.float32))
    wide = signs.expand_dims(1).broadcast_to((6, 5))
    soft = F.soft_margin_loss(x, wide), F.soft_margin_loss(x, wide, "none")
    return *soft, *[F.cosine_embedding_loss(x, y, signs, 0.1, each) for each in ("mean", "none")]
