"""The part that times the LLTM over whole sequences, through its C entries, and its peers.

Forward is one product for the inputs of all steps, and LLTMSequenceForward, the time loop; backward is the time loop of
LLTMSequenceBackward, and the products and the sum that make the other gradients of those of the gates. It is what
msops.lltm does, with products of torch's, which on the GPU calls the cuBLAS that MindSpore calls, or NumPy's.

There is one set of buffers: weights stay in the cache, as they do in training, and the activations of most cases do not
fit there. All samples have all steps.
"""

from msops.operators.lltm_sequence import _recurrence
from msops.testing.entry import outputs_of, prepare_operator

from .cases import precisions, sequence_cases
from .kernels import session
from .parts import Attempt, options_of_part, say

WARM_UP = 0.04  # s: less than kernels have, since there are many times, and some of long calls


def prepare(case, precision, arrays, stream):
    """(inputs, gradients of the results, a call for each direction)"""
    steps, batch, inputs, hidden = case.size
    dtype, bound = "float32" if precision == "tf32" else precision, hidden**-0.5
    x, doutput = (arrays.random((steps, batch, width), dtype) for width in (inputs, hidden))
    h, c, dlast_h, dlast_c = (arrays.random((batch, hidden), dtype) for _ in range(4))
    weight_ih, weight_hh = (arrays.uniform((3 * hidden, width), dtype, bound) for width in (inputs, hidden))
    bias = arrays.uniform((3 * hidden,), dtype, bound)
    lengths = arrays.empty((batch,), "int32")
    lengths[:] = steps
    product = arrays.empty((steps, batch, 3 * hidden), dtype)

    def loop(operator, *takes):
        gives = [arrays.empty(*output) for output in outputs_of(operator, takes)]
        run = prepare_operator(operator, [*takes, *gives], stream)

        def call():
            if status := run():
                raise RuntimeError(f"the entry returned {status}")

        return call, gives

    operator = _recurrence(reverse=False, allow_tf32=precision == "tf32")
    loop_forward, outputs = loop(operator, product, weight_hh, bias, h, c, lengths)
    output, _, _, gates, cells, _ = outputs
    loop_backward, gradients = loop(
        operator.gradient.__self__.backward, weight_hh, gates, cells, output, h, lengths, doutput, dlast_h, dlast_c
    )
    dgates, hidden_before, dh, dc, _ = gradients
    x_rows, product_rows, dgates_rows, hidden_rows = (
        array.reshape(steps * batch, array.shape[2]) for array in (x, product, dgates, hidden_before)
    )

    def forward():
        arrays.multiply(x_rows, weight_ih.T, out=product_rows)
        loop_forward()
        return outputs[:3]

    def both():
        forward()
        loop_backward()
        dx, dweight_ih = arrays.multiply(dgates_rows, weight_ih), arrays.multiply(dgates_rows.T, x_rows)
        dweight_hh = arrays.multiply(dgates_rows.T, hidden_rows)
        return dx.reshape(x.shape), dh, dc, dweight_ih, dweight_hh, dgates_rows.sum(0)

    calls = {
        "forward": forward,
        "forward+backward": both,
        "loop forward": loop_forward,
        "loop backward": loop_backward,
    }
    return (x, h, c, weight_ih, weight_hh, bias), (doutput, dlast_h, dlast_c), calls


def measure(case, precision, timer, arrays):
    """Times ours and each peer."""
    step = f"lltm_sequence {case.name} {precision}"
    row = dict(part="sequence", op="lltm_sequence", case=case.name, dtype=precision, bytes=0, beside="")
    row.update(named=int(case.named))

    def tell(by, direction, times):
        operations = case.operations(direction)
        times = dict(times._asdict(), us_step=times.us / case.size[0])
        say(row=dict(row, by=by, direction=direction, operations=operations, **times))

    with Attempt(step), arrays.tf32(precision == "tf32"):
        inputs, douts, calls = prepare(case, precision, arrays, timer.handle)
        for direction, call in calls.items():
            tell("msops", direction, timer([call]))
        for name, factor, peer_calls in arrays.sequence_peers(inputs, douts, case.named):
            for direction, call in peer_calls.items():
                with Attempt(f"{name}: {step} {direction}", silent=True):
                    times = timer([call])
                    if name.endswith("CUDA graph") and times.how != "graph":
                        raise RuntimeError("could not be captured")
                    tell(name, direction, times.scaled(factor))


def main():
    options = options_of_part()
    with session(options.device_target, WARM_UP) as (timer, arrays):
        for case in sequence_cases(options.device_target, options.op, options.quick):
            for precision in precisions(options.device_target, options.dtype):
                measure(case, precision, timer, arrays)
                arrays.free()


if __name__ == "__main__":
    main()
