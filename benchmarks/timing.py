"""Times kernels.

On the GPU, the calls over all buffers are captured into one CUDA graph on a side stream, so that no launch gaps lie
between them. A time is that of a replay, between CUDA events, divided by its number of launches. What cannot be
captured is launched directly, and marked "events" in place of "graph". All buffers together are several times the size
of the L2 cache; small kernels take turns on MOST_BUFFERS, and a sweep over other memory empties the cache before each
replay. Untimed replays run for WARM_UP seconds first, since the first launches after a pause are slow.

On the CPU, each call over rotating inputs is timed by itself; those of small kernels stay in the cache. All calls write
the same outputs, as libraries do that return new memory: they get what they have just freed.
"""

import concurrent.futures
import contextlib
import os
import statistics
import time
from typing import NamedTuple

import numpy as np

COLD = {"GPU": 256 * 2**20, "CPU": 128 * 2**20}  # bytes between two uses of a buffer, several times the last cache
MOST_BUFFERS = 64
WARM_UP = 0.1  # s
LONG = 1e5  # us that all calls may take once; slower ones use fewer buffers


class Times(NamedTuple):
    us: float  # median
    us_25: float  # quartiles
    us_75: float
    how: str

    @classmethod
    def of(cls, samples, how):
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, low, high, how)

    def scaled(self, factor):
        return Times(*(factor * us for us in self[:3]), self.how)


def buffers(device, size, most=MOST_BUFFERS):
    """Returns how many sets of buffers of `size` bytes keep the caches cold."""
    return min(most, COLD[device] // max(1, size) + 2)


class GpuTimer:
    """Times calls that launch on `stream`, a side stream of torch. In `with timer.current():`, torch launches there."""

    name = "GPU"

    def __init__(self, warm_up=WARM_UP):
        import torch

        self.torch = torch
        self.warm_up = warm_up
        self.stream = torch.cuda.Stream()
        self.handle = self.stream.cuda_stream
        self.other_memory = torch.zeros(COLD["GPU"] // 4, device="cuda")

    def current(self):
        return self.torch.cuda.stream(self.stream)

    def __call__(self, calls, graph=True):
        """Returns the Times of a call, where `calls` take turns."""
        launches = self._launches(calls)
        replay = self._captured(launches) if graph else None
        how = "graph" if replay else "events"
        samples = self._samples(replay or (lambda: [call() for call in launches]))
        return Times.of([us / len(launches) for us in samples], how)

    def _launches(self, calls):
        """Returns the calls, repeated to take some milliseconds, so that the start of a graph hardly counts."""
        calls[0]()
        calls = calls[: max(1, round(LONG / self._once(calls[:1])))]
        for call in calls:
            call()
        us = self._once(calls) / len(calls)
        count = max(len(calls), min(MOST_BUFFERS, round(3000 / us)))
        return [calls[i % len(calls)] for i in range(count)]

    def _once(self, calls):
        """Returns the time in which all calls run once."""
        start, end = self._events()
        self.stream.synchronize()
        start.record()
        for call in calls:
            call()
        end.record()
        self.stream.synchronize()
        return 1e3 * start.elapsed_time(end)

    def _captured(self, launches):
        """Returns a function that replays the launches, or None if they cannot be captured."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                # Results live until all calls are captured, so that no launch finds its result's memory in the cache.
                results = [call() for call in launches]
            finally:
                graph.capture_end()
            del results
        except RuntimeError:
            self.torch.cuda.synchronize()
            return None
        return graph.replay

    def _samples(self, replay):
        start = time.perf_counter()
        rounds = 0
        while time.perf_counter() - start < self.warm_up:
            self._sweep()
            replay()
            self.stream.synchronize()
            rounds += 1
        count = max(3, min(30, round(rounds * 0.4)))
        events = [self._events() for _ in range(count)]
        for begin, end in events:
            self._sweep()
            begin.record()
            replay()
            end.record()
        self.stream.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in events]

    def _sweep(self):
        self.other_memory.sum()  # only reads, since written lines would leave the cache during the timing

    def _events(self):
        return [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def roof(self):
        """Returns the bytes that a copy of 4 GiB moves, and its Times."""
        source = self.torch.randint(256, (2**32,), dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        return 2 * source.numel(), self([lambda: target.copy_(source)], graph=False)


class CpuTimer:
    """Times calls on the CPU."""

    name = "CPU"
    handle = None

    def current(self):
        return contextlib.nullcontext()

    def __call__(self, calls):
        start = time.perf_counter()
        count = 0
        while count < 2 or time.perf_counter() - start < WARM_UP:
            calls[count % len(calls)]()
            count += 1
        samples = []
        for i in range(max(5, min(200, 2 * count))):
            begin = time.perf_counter_ns()
            calls[i % len(calls)]()
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        return Times.of(samples, "calls")

    def roof(self):
        """Returns the bytes that a copy of 256 MiB by all cores moves, and its Times."""
        source = np.random.default_rng(0).bytes(2**28)
        source = np.frombuffer(source, np.uint8)
        target = np.empty_like(source)
        cores = len(os.sched_getaffinity(0))
        parts = list(zip(np.array_split(target, cores), np.array_split(source, cores)))
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            times = self([lambda: list(pool.map(lambda part: np.copyto(*part), parts))])
        return 2 * source.size, times
