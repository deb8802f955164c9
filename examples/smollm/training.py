"""Trains a language model: gradients of several batches are added up, clipped, and given to AdamW. A step reads nothing
of the GPU, so that it can be recorded as a CUDA graph."""

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

import msops
from weights import FileError

_GROWTH = 1000  # the loss scale doubles after so many steps without an overflow
_multiply = ops.MulNoNan()  # a factor of 0 gives 0, also of infinity and NaN

# HyperMap calls these for each of some 300 Parameters. A loop over them would compile for a minute.
_square, _scaled, _stored, _added, _moved = (
    ops.MultitypeFuncGraph(name) for name in ("square", "scaled", "stored", "added", "moved")
)


@_square.register("Tensor")
def _(x):
    return ops.expand_dims(ops.square(x).sum(), 0)


@_scaled.register("Tensor", "Tensor")
def _(factor, x):
    return _multiply(x, factor)


@_stored.register("Tensor", "Tensor")
def _(x, new):
    return ops.assign(x, new.astype(mindspore.float32))


@_added.register("Tensor", "Tensor")
def _(x, more):
    return ops.assign_add(x, more.astype(mindspore.float32))


@_moved.register("Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _(move, rate, beta1, beta2, eps, decay, parameter, mean, square, gradient):
    return move(parameter, mean, square, rate, beta1, beta2, eps, decay, gradient)


class Accumulate(nn.Cell):
    """Hands `sums` and the gradients of a batch's loss times `scale` to `take`, which stores or adds them, and returns
    the loss."""

    def __init__(self, net, loss, sums, take):
        super().__init__()
        self.sums, self.take, self.each = sums, take, ops.HyperMap()
        self.gradient = ops.value_and_grad(_Loss(net, loss), None, net.trainable_params(), has_aux=True)

    def construct(self, tokens, following, scale):
        (_, loss), gradients = self.gradient(tokens, following, scale)
        return ops.depend(loss, self.each(self.take, self.sums, gradients))


class _Loss(nn.Cell):
    """Returns the loss times `scale`, and the loss."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def construct(self, tokens, following, scale):
        loss = self.loss(self.net(tokens), following)
        return loss * scale.astype(loss.dtype), loss


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


class AdamW(nn.AdamWeightDecay):
    """Moves the Parameters, or changes nothing if `finite`, a bool on the device, is False."""

    def construct(self, gradients, finite):
        # Gradients of 0 move nothing if the rate is 0, and keep the moments if they decay by a factor of 1.
        rate = ops.where(finite, self.get_lr(), 0.0)
        beta1, beta2 = ops.where(finite, self.beta1, 1.0), ops.where(finite, self.beta2, 1.0)
        move = ops.partial(_moved, self.fused_opt, rate, beta1, beta2, self.eps)
        done = self.hyper_map(move, self.get_weight_decay(), self._parameters, self.moments1, self.moments2, gradients)
        return ops.depend(self.assignadd(self.global_step, finite.astype(mindspore.int32).reshape(1)), done)


class Update(nn.Cell):
    """Clips the mean of `sums`, which are those of `batches` losses times `scale`, and hands it to the optimizer.
    Returns the norm before that. If it is not finite, nothing changes but the scale."""

    def __init__(self, optimizer, sums, scale, good, clip):
        super().__init__()
        self.optimizer, self.sums, self.scale, self.good, self.clip = optimizer, sums, scale, good, clip
        self.each = ops.HyperMap()

    def construct(self, batches):
        whole = self.scale * batches
        norm = ops.sqrt(ops.addn(self.each(_square, self.sums)).sum()) / whole
        finite = ops.isfinite(norm)
        factor = ops.minimum(self.clip / ops.maximum(norm, 1e-12), 1.0) / whole
        gradients = self.each(ops.partial(_scaled, ops.where(finite, factor, 0.0)), self.sums)
        moved = self.optimizer(gradients, finite)
        good = ops.where(finite, self.good + 1, 0)
        grown = ops.where(ops.logical_and(self.scale > 1, good % _GROWTH == 0), 2 * self.scale, self.scale)
        scale = ops.where(finite, grown, ops.maximum(self.scale / 2, 1.0))
        return ops.depend(norm, (moved, ops.assign(self.good, good), ops.assign(self.scale, scale)))


class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
    """Rises along a line for some steps, then falls along a cosine to a tenth."""

    def __init__(self, highest, warmup, steps):
        super().__init__()
        self.highest, self.warmup, self.steps = highest, max(warmup, 1), max(steps - warmup, 1)

    def construct(self, step):
        step = step.astype(mindspore.float32)
        share = ops.minimum(ops.maximum((step - self.warmup) / self.steps, 0.0), 1.0)
        falling = 0.55 + 0.45 * ops.cos(share * float(np.pi))
        return self.highest * ops.minimum((step + 1) / self.warmup, falling)


class Trainer:
    """Trains `net` by AdamW; matrices decay, weights of norms do not. With `record`, a GPU replays a CUDA graph.

    A checkpoint keeps the Parameters, `step`, `good` and `scale`, so that training goes on as if it had not been
    interrupted. `good` counts the steps since a gradient overflowed. `scale` keeps gradients of float16 above the
    smallest numbers; it halves when a gradient overflows. Both are Parameters, since the device decides that.
    """

    def __init__(self, net, loss, highest, warmup, steps, clip=1.0, decay=0.1, processes=1, record=False):
        parameters = net.trainable_params()
        zeros = [initializer(Zero(), p.shape, mindspore.float32) for p in parameters]
        sums = ParameterTuple(
            Parameter(zero, name=f"sum.{p.name}", requires_grad=False) for p, zero in zip(parameters, zeros)
        )
        matrices, vectors = ([p for p in parameters if (len(p.shape) > 1) == is_matrix] for is_matrix in (True, False))
        groups = [{"params": ps, "weight_decay": rate} for ps, rate in ((matrices, decay), (vectors, 0.0)) if ps]
        groups += [{"order_params": parameters}]
        schedule = Schedule(highest, warmup, steps)
        self._optimizer = AdamW(groups, schedule, beta1=0.9, beta2=0.95, eps=1e-8)
        scale = 2.0**15 if net.dtype == mindspore.float16 else 1.0
        self.good, self.scale = (
            Parameter(Tensor(value, dtype), name=name, requires_grad=False)
            for name, value, dtype in (("good", 0, mindspore.int32), ("scale", scale, mindspore.float32))
        )
        # MindSpore compiles the second one when a step has more than one batch.
        self._store, self._add = (Accumulate(net, loss, sums, take) for take in (_stored, _added))
        self._share = Share(sums, processes) if processes > 1 else None
        self._update = Update(self._optimizer, sums, self.scale, self.good, clip)
        self._net, self.step = net, 0
        self._run = msops.cuda_graph(self._step) if record else self._step

    @property
    def _parameters(self):
        own = [*self._net.get_parameters(), *self._optimizer.get_parameters(), self.good, self.scale]
        return {p.name: p for p in own}

    def train(self, batches):
        """Trains one step on a list of (tokens, following tokens), and returns their losses and the gradients' norm, as
        Tensors. If the norm is not finite, the step changes nothing but the scale."""
        if not self._net.training:  # to tell all Cells takes as long as to replay a graph
            self._net.set_train(True)
        found = self._run([tuple(map(Tensor, batch)) for batch in batches])
        self.step += 1
        return found

    def _step(self, batches):
        losses = [(self._add if i else self._store)(*batch, self.scale) for i, batch in enumerate(batches)]
        if self._share is not None:
            self._share()
        return losses, self._update(len(batches))

    def save(self, path):
        """Writes a checkpoint; the file is whole or is not there."""
        items = [{"name": name, "data": parameter} for name, parameter in self._parameters.items()]
        new = path.with_name(f"new_{path.name}")
        mindspore.save_checkpoint(items, str(new), append_dict={"step": self.step})
        new.replace(path)

    def restore(self, path):
        """Continues from a checkpoint. An error leaves everything as it was."""
        try:
            found = mindspore.load_checkpoint(str(path))
        except ValueError as error:
            raise FileError(f"{path} cannot be read as a checkpoint: it may be damaged") from error
        parameters = self._parameters
        shapes = {**{name: (p.shape, p.dtype) for name, p in parameters.items()}, "step": ((), mindspore.int64)}
        for name, (shape, dtype) in shapes.items():
            if name not in found:
                raise FileError(f"{path} is no checkpoint of this model: it lacks {name}")
            if (found[name].shape, found[name].dtype) != (shape, dtype):
                raise FileError(
                    f"{path}: {name} must be {dtype} of shape {shape}, got {found[name].dtype} of {found[name].shape}"
                )
        for name, parameter in parameters.items():
            parameter.set_data(Tensor(found[name].asnumpy()))
        self.step = found["step"].asnumpy().item()


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
