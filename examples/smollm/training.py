"""Trains a language model: gradients of several batches are added up, clipped, and given to AdamW."""

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from weights import FileError

# A checkpoint keeps these attributes of Trainer, under these shapes and dtypes.
_STATE = {"step": ((), mindspore.int64), "good": ((), mindspore.int64), "scale": ((), mindspore.float32)}
_GROWTH = 1000  # the loss scale doubles after so many steps without an overflow

# HyperMap calls these for each of some 300 Parameters. A loop over them would compile for a minute.
_square, _scaled, _stored, _added = (ops.MultitypeFuncGraph(name) for name in ("square", "scaled", "stored", "added"))


@_square.register("Tensor")
def _(x):
    return ops.expand_dims(ops.square(x).sum(), 0)


@_scaled.register("Tensor", "Tensor")
def _(factor, x):
    return x * factor


@_stored.register("Tensor", "Tensor")
def _(x, new):
    return ops.assign(x, new.astype(mindspore.float32))


@_added.register("Tensor", "Tensor")
def _(x, more):
    return ops.assign_add(x, more.astype(mindspore.float32))


class Accumulate(nn.Cell):
    """Hands `sums` and the gradients of a batch's loss times `scale` to `take`, which stores or adds them, and returns
    the loss."""

    def __init__(self, net, loss, sums, take):
        super().__init__()
        self.net, self.loss, self.sums, self.take = net, loss, sums, take
        self.parameters = ParameterTuple(net.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True, sens_param=True)
        self.both, self.each = _Loss(net, loss), ops.HyperMap()

    def construct(self, tokens, following, scale):
        loss = self.both(tokens, following)
        gradients = self.gradient(self.both, self.parameters)(tokens, following, scale.astype(loss.dtype))
        return ops.depend(loss, self.each(self.take, self.sums, gradients))


class _Loss(nn.Cell):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def construct(self, tokens, following):
        return self.loss(self.net(tokens), following)


class Share(nn.Cell):
    """Replaces `sums` by their mean over all processes."""

    def __init__(self, sums, processes):
        super().__init__()
        self.sums, self.processes, self.all_reduce = sums, processes, ops.AllReduce()

    def construct(self):
        done = True
        for i in range(len(self.sums)):
            done = ops.depend(done, ops.assign(self.sums[i], self.all_reduce(self.sums[i]) / self.processes))
        return done


class Norm(nn.Cell):
    """Returns the norm of all `sums` together."""

    def __init__(self, sums):
        super().__init__()
        self.sums, self.each = sums, ops.HyperMap()

    def construct(self):
        return ops.sqrt(ops.addn(self.each(_square, self.sums)).sum())


class Update(nn.Cell):
    """Hands `sums` times `factor` to the optimizer."""

    def __init__(self, optimizer, sums):
        super().__init__()
        self.optimizer, self.sums, self.each = optimizer, sums, ops.HyperMap()

    def construct(self, factor):
        return self.optimizer(self.each(ops.partial(_scaled, factor), self.sums))


class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
    """Rises along a line for some steps, then falls along a cosine to a tenth."""

    def __init__(self, highest, warmup, steps):
        super().__init__()
        self.highest, self.warmup, self.steps = highest, max(warmup, 1), max(steps - warmup, 1)

    def construct(self, step):
        step = step.astype(mindspore.float32)
        share = ops.clamp((step - self.warmup) / self.steps, 0.0, 1.0)
        falling = 0.55 + 0.45 * ops.cos(share * float(np.pi))
        return self.highest * ops.minimum((step + 1) / self.warmup, falling)


class Trainer:
    """Trains `net` by AdamW; matrices decay, weights of norms do not.

    A checkpoint keeps the Parameters, `step`, `good` and `scale`, so that training goes on as if it had not been
    interrupted. `good` counts the steps since a gradient overflowed. `scale` keeps gradients of float16 above the
    smallest numbers; it halves when a gradient overflows.
    """

    def __init__(self, net, loss, highest, warmup, steps, clip=1.0, decay=0.1, processes=1):
        parameters = net.trainable_params()
        zeros = [initializer(Zero(), p.shape, mindspore.float32) for p in parameters]
        sums = ParameterTuple(
            Parameter(zero, name=f"sum.{p.name}", requires_grad=False) for p, zero in zip(parameters, zeros)
        )
        matrices = [p for p in parameters if len(p.shape) > 1]
        groups = [{"params": matrices, "weight_decay": decay}]
        groups += [{"params": [p for p in parameters if len(p.shape) == 1], "weight_decay": 0.0}]
        groups += [{"order_params": parameters}]
        schedule = Schedule(highest, warmup, steps)
        self._optimizer = nn.AdamWeightDecay(groups, schedule, beta1=0.9, beta2=0.95, eps=1e-8)
        # MindSpore compiles the second one when a step has more than one batch.
        self._store, self._add = (Accumulate(net, loss, sums, take) for take in (_stored, _added))
        self._share = Share(sums, processes) if processes > 1 else None
        self._norm, self._update = Norm(sums), Update(self._optimizer, sums)
        self._net, self._clip = net, clip
        self.step, self.good = 0, 0
        self.scale = 2.0**15 if net.dtype == mindspore.float16 else 1.0

    @property
    def _parameters(self):
        return {p.name: p for p in [*self._net.get_parameters(), *self._optimizer.get_parameters()]}

    def train(self, batches):
        """Trains one step on a list of (tokens, following tokens), and returns their mean loss and the gradients' norm.
        If the norm is not finite, the step changes nothing but the scale."""
        self._net.set_train(True)
        scale = Tensor(self.scale, mindspore.float32)
        losses = [
            (self._add if i else self._store)(*map(Tensor, batch), scale).asnumpy() for i, batch in enumerate(batches)
        ]
        if self._share is not None:
            self._share()
        whole = self.scale * len(batches)
        norm = float(self._norm().asnumpy()) / whole
        if np.isfinite(norm):
            self._update(Tensor(min(1.0, self._clip / max(norm, 1e-12)) / whole, mindspore.float32))
            self.good += 1
            if self.scale > 1 and self.good % _GROWTH == 0:
                self.scale *= 2
        else:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
        self.step += 1
        self._net.set_train(False)
        return float(np.mean(losses)), norm

    def save(self, path):
        """Writes a checkpoint; the file is whole or is not there."""
        items = [{"name": name, "data": parameter} for name, parameter in self._parameters.items()]
        new = path.with_name(f"new_{path.name}")
        mindspore.save_checkpoint(items, str(new), append_dict={name: getattr(self, name) for name in _STATE})
        new.replace(path)

    def restore(self, path):
        """Continues from a checkpoint. An error leaves everything as it was."""
        try:
            found = mindspore.load_checkpoint(str(path))
        except ValueError as error:
            raise FileError(f"{path} cannot be read as a checkpoint: it may be damaged") from error
        parameters = self._parameters
        shapes = {**{name: (p.shape, p.dtype) for name, p in parameters.items()}, **_STATE}
        for name, (shape, dtype) in shapes.items():
            if name not in found:
                raise FileError(f"{path} is no checkpoint of this model: it lacks {name}")
            if (found[name].shape, found[name].dtype) != (shape, dtype):
                raise FileError(
                    f"{path}: {name} must be {dtype} of shape {shape}, got {found[name].dtype} of {found[name].shape}"
                )
        for name, parameter in parameters.items():
            parameter.set_data(Tensor(found[name].asnumpy()))
        for name in _STATE:
            setattr(self, name, found[name].asnumpy().item())


class Text:
    """Tokens of a text. The last tenth is for validation. Batches depend on the seed and the step alone, so that
    training that goes on from a checkpoint sees what it would have seen."""

    def __init__(self, tokens, length, seed=0):
        tokens = np.asarray(tokens, np.int32)
        self.train, self.validation = np.split(tokens, [len(tokens) - len(tokens) // 10])
        self.length, self.seed = length, seed
        if len(self.validation) <= length:
            raise FileError(f"A tenth of the text must have more than {length} tokens, got {len(self.validation)}")

    def batches(self, step, amount, size, rank=0, processes=1):
        """Returns the `amount` batches of a step, each of which has `size` pieces, shared among the processes."""
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.train) - self.length, (amount, size))
        return [_pairs(self.train, row, self.length) for row in starts[:, rank::processes]]

    def validation_batches(self, size):
        starts = np.arange(0, len(self.validation) - self.length, self.length)
        size = min(size, len(starts))
        return [
            _pairs(self.validation, starts[i : i + size], self.length) for i in range(0, len(starts) - size + 1, size)
        ]


def _pairs(tokens, starts, length):
    pieces = tokens[starts[:, None] + np.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]
