"""Tests the recorder of CUDA graphs, without a GPU: with a driver, a pool and a plugin that do on the CPU what CUDA and
MindSpore do on a GPU. A process opens one driver, so that each case has a process."""

import ctypes
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "fake_gpu"


class Device:
    """The library of the recorder and the plugin."""

    def __init__(self, folder, recorder):
        ctypes.CDLL(f"{folder}/libfakecuda.so", ctypes.RTLD_GLOBAL)
        self.plugin = ctypes.CDLL(f"{folder}/libmindspore_gpu_fake.so")
        self.cuda = ctypes.CDLL(f"{folder}/libfakecuda.so")
        self.graphs = ctypes.CDLL(recorder)
        for name in ("allocate", "allocate_by_class", "allocate_on_host", "scale", "scale_by_own_memory"):
            getattr(self.plugin, f"op_{name}").restype = ctypes.c_void_p
        names = "new_memory", "begin", "end", "abandon", "destroy", "release", "held", "open", "copy", "end_notes"
        for name in names:
            getattr(self.graphs, f"graphs_{name}").restype = ctypes.c_int64
        for name in ("error", "failure"):
            getattr(self.graphs, f"graphs_{name}").restype = ctypes.c_char_p
        self.cuda.fake_stream.restype = ctypes.c_void_p
        self.cuda.fake_memory.restype = ctypes.c_size_t
        opened = self.graphs.graphs_open(f"{folder}/libfakecuda.so".encode(), b"libmindspore_gpu_fake")
        assert opened == 0, self.graphs.graphs_error()
        a, b = self.tensor([1.0]), self.tensor([0.0])
        self.entry("CopyTensor", [a, b], [1, 1])  # tells the stream
        assert self.read(b, 1) == [1.0]
        self.memory = self.graphs.graphs_new_memory()

    def tensor(self, values):
        x = self.plugin.op_allocate(len(values))
        assert self.write(x, values) == 0
        return x

    def write(self, x, values):
        return self.plugin.op_write(ctypes.c_void_p(x), (ctypes.c_float * len(values))(*values), len(values))

    def read(self, x, n):
        found = (ctypes.c_float * n)()
        assert self.plugin.op_read(found, ctypes.c_void_p(x), n) == 0
        return list(found)

    def scale(self, x, number, n):
        return self.plugin.op_scale(ctypes.c_void_p(x), ctypes.c_float(number), n)

    def free(self, x):
        self.plugin.op_free(ctypes.c_void_p(x))

    def entry(self, name, addresses, sizes, extra=None):
        count = len(addresses)
        params = (ctypes.c_void_p * count)(*addresses)
        ranks = (ctypes.c_int * count)(*[1] * count)
        rows = [(ctypes.c_int64 * 1)(size) for size in sizes]
        pointer = ctypes.POINTER(ctypes.c_int64)
        shapes = (pointer * count)(*(ctypes.cast(row, pointer) for row in rows))
        dtypes = (ctypes.c_char_p * count)(*[b"float32"] * count)
        stream = ctypes.c_void_p(self.cuda.fake_stream())
        return getattr(self.graphs, name)(count, params, ranks, shapes, dtypes, stream, extra)

    def begin(self, *variables, notes=0):
        numbers = ctypes.c_int64(self.memory), ctypes.c_int64(notes)
        begun = self.graphs.graphs_begin(*numbers, *self._places(variables, 4))
        assert begun == 0, self.graphs.graphs_error()

    def end(self, inputs, outputs, n):
        return self.graphs.graphs_end(*self._places(inputs, n), *self._places(outputs, n))

    def _places(self, xs, n):
        sizes = (ctypes.c_size_t * len(xs))(*[4 * n] * len(xs))
        return ctypes.c_int64(len(xs)), (ctypes.c_uint64 * len(xs))(*xs), sizes

    def replay(self, graph, inputs, n):
        """Returns the only output for these inputs."""
        xs = [self.tensor(values) for values in inputs]
        y = self.tensor([0.0] * n)
        status = self.graphs.graphs_replay(ctypes.c_int64(graph), *self._params([*xs, None, None, y]))
        assert status == 0, self.graphs.graphs_error()
        return self.read(y, n)

    def _params(self, addresses):
        stream = ctypes.c_void_p(self.cuda.fake_stream())
        return len(addresses), (ctypes.c_void_p * len(addresses))(*addresses), stream

    def held(self):
        return self.graphs.graphs_held(ctypes.c_int64(self.memory))


def record(device, n=300):
    """Records y = x * 2 * 3 * 5, whose blocks and constants are freed as MindSpore does."""
    x = device.tensor([0.0] * n)
    device.begin()
    a = device.scale(x, 2.0, n)
    b = device.scale(a, 3.0, n)
    device.free(a)
    y = device.scale(b, 5.0, n)
    device.free(b)
    graph = device.end([x], [y], n)
    assert graph > 0, device.graphs.graphs_error()
    device.free(y)
    return graph, (a, b, y)


def case_replays(device):
    graph, (a, _, y) = record(device)
    assert y == a  # the memory of a serves again
    for i in range(1, 5):
        assert device.replay(graph, [[float(i)] * 300], 300) == [30.0 * i] * 300
    other, _ = record(device)  # it shares the pool's memory
    for i in range(1, 5):
        assert device.replay(other, [[float(-i)] * 300], 300) == [-30.0 * i] * 300
        assert device.replay(graph, [[float(i)] * 300], 300) == [30.0 * i] * 300
    for each in (graph, other):
        assert device.graphs.graphs_destroy(ctypes.c_int64(each)) == 0
    assert device.cuda.fake_live_graphs() == 0
    device.graphs.graphs_release(ctypes.c_int64(device.memory))
    assert device.held() == 0


def case_constants_are_restored(device):
    x = device.tensor([0.0] * 4)
    device.begin()
    y = device.scale(x, 1.0, 4)
    device.plugin.op_scale_by_changed_constant(ctypes.c_void_p(y), ctypes.c_float(3.0), 4)
    graph = device.end([x], [y], 4)
    for _ in range(3):
        assert device.replay(graph, [[1.0] * 4], 4) == [9.0] * 4


def case_results_as_inputs(device):
    """A result of the graph's own memory may be an input of the next replay: a small one lies beside constants."""
    x = device.tensor([0.0] * 4)
    device.begin()
    y = device.scale(x, 2.0, 4)
    graph = device.end([x], [], 4)
    for given, want in ((device.tensor([1.0] * 4), 2.0), (y, 4.0), (y, 8.0)):
        assert device.graphs.graphs_replay(ctypes.c_int64(graph), *device._params([given, None, None])) == 0
        assert device.read(y, 4) == [want] * 4


def case_large_constants(device):
    """More bytes than a number has, which the recorded work overwrites."""
    n = 1000
    x = device.tensor([0.0] * n)
    device.begin()
    table = device.plugin.op_allocate(n)
    assert device.write(table, [float(i) for i in range(n)]) == 0
    y = device.scale(table, 2.0, n)
    device.free(table)
    z = device.scale(y, 1.0, n)  # it takes the table's memory
    assert z == table
    graph = device.end([x], [y], n)
    for _ in range(3):
        assert device.replay(graph, [[0.0] * n], n) == [2.0 * i for i in range(n)]


def case_constants_after_work(device):
    """Nothing that was recorded before may write where a constant is kept."""
    n = 1000
    x = device.tensor([0.0] * n)
    device.begin()
    a = device.scale(x, 2.0, n)
    b = device.scale(a, 2.0, n)
    device.free(a)
    device.free(b)  # the table takes the memory of one, and what keeps the table must not take that of the other
    table = device.plugin.op_allocate(n)
    assert device.write(table, [float(i) for i in range(n)]) == 0
    y = device.scale(table, 2.0, n)
    graph = device.end([x], [y], n)
    for i in range(3):
        assert device.replay(graph, [[float(i)] * n], n) == [2.0 * i for i in range(n)]


def case_reads(device):
    """A constant may be read, and what was there before, but no variable and nothing that is recorded."""
    x, before = device.tensor([3.0] * 4), device.tensor([8.0])
    device.begin(x)
    assert device.read(before, 1) == [8.0]
    constant = device.plugin.op_allocate(1)
    assert device.write(constant, [7.0]) == 0
    assert device.read(constant, 1) == [7.0]
    y = device.scale(x, 2.0, 4)
    assert device.plugin.op_read((ctypes.c_float * 4)(), ctypes.c_void_p(y), 4) != 0
    assert b"is read" in device.graphs.graphs_failure()
    assert device.end([x], [y], 4) < 0
    assert b"is read" in device.graphs.graphs_error()
    assert device.read(x, 4) == [3.0] * 4  # outside of the recording
    assert device.cuda.fake_live_graphs() == 0
    record(device)


def case_reads_of_variables(device):
    x = device.tensor([3.0] * 4)
    device.begin(x)
    assert device.plugin.op_read((ctypes.c_float * 1)(), ctypes.c_void_p(x + 8), 1) != 0
    assert device.end([x], [x], 4) < 0
    assert b"is read" in device.graphs.graphs_error()


def case_reads_of_the_call_before(device):
    """An operator reads its setting, which the device computes: the value of the call before is handed out, and each
    replay is compared with it."""
    one = ctypes.c_float * 1
    x = device.tensor([3.0] * 4)

    def work():
        setting = device.scale(x, 2.0, 1)
        found = one()
        assert device.plugin.op_read(found, ctypes.c_void_p(setting), 1) == 0
        y = device.scale(x, found[0], 4)
        device.free(setting)
        return y

    device.graphs.graphs_begin_notes()
    device.free(work())
    notes = device.graphs.graphs_end_notes()
    device.graphs.graphs_begin_notes()  # of other work, which may come between
    device.read(device.tensor([5.0]), 1)
    device.graphs.graphs_end_notes()
    device.begin(x, notes=notes)
    y = work()
    graph = device.end([x], [y], 4)
    number = ctypes.c_int64(graph)
    for _ in range(3):
        assert device.replay(graph, [[3.0] * 4], 4) == [18.0] * 4
    assert device.graphs.graphs_differs(number, 1) == 0
    device.replay(graph, [[1.0] * 4], 4)
    assert device.graphs.graphs_differs(number, 0) == 0  # not yet
    device.replay(graph, [[3.0] * 4], 4)
    device.replay(graph, [[3.0] * 4], 4)
    assert device.graphs.graphs_differs(number, 0) == 1
    assert device.graphs.graphs_destroy(number) == 0


def case_memory_from_cuda(device):
    """What an operator takes from CUDA itself is the graph's, also where it gives it back later, or had it before."""
    n = 300
    x, kept, before = device.tensor([0.0] * n), ctypes.c_void_p(), ctypes.c_void_p()
    assert device.plugin.op_take(ctypes.byref(before), 4096) == 0
    assert device.write(before.value, [3.0] * n) == 0
    device.begin()
    first = device.scale(x, 2.0, n)
    held = device.cuda.fake_memory()
    assert device.plugin.op_take(ctypes.byref(kept), 4096) == 0
    assert device.cuda.fake_memory() == held
    a = device.plugin.op_scale_by_own_memory(ctypes.c_void_p(x), ctypes.c_float(2.0), n)
    y = device.scale(before.value, 2.0, n)
    assert device.plugin.op_give(before) == 0
    graph = device.end([x], [a], n)
    for i in range(3):
        assert device.replay(graph, [[float(i)] * n], n) == [2.0 * i] * n
    assert device.read(y, n) == [6.0] * n
    for each in (first, a, y):
        device.free(each)
    assert device.plugin.op_give(kept) == 0
    assert device.graphs.graphs_destroy(ctypes.c_int64(graph)) == 0
    device.graphs.graphs_release(ctypes.c_int64(device.memory))
    assert device.held() == 0


def case_random_numbers(device):
    x = device.tensor([3.0] * 4)
    device.begin()
    assert device.plugin.op_random(ctypes.c_void_p(x), 4) != 0
    assert device.end([x], [x], 4) < 0
    assert b"random numbers" in device.graphs.graphs_error()
    assert device.plugin.op_random(ctypes.c_void_p(x), 4) == 0


def case_host_functions(device):
    x = device.tensor([3.0] * 4)
    device.begin()
    device.cuda.fake_launch_host_function()
    assert device.end([x], [x], 4) < 0
    assert b"function of the host" in device.graphs.graphs_error()
    record(device)


def case_parameters_get_new_memory(device):
    """A copy at the end writes a new value where the next replay reads it."""
    x, state = device.tensor([0.0] * 4), device.tensor([1.0] * 4)
    device.begin(x, state)
    new = device.scale(state, 2.0, 4)
    copied = device.graphs.graphs_copy(*map(ctypes.c_uint64, (state, new, 16)))
    assert copied == 0
    graph = device.end([x], [new], 4)
    for i in range(1, 4):
        assert device.replay(graph, [[0.0] * 4], 4) == [2.0**i] * 4


def case_copies_from_the_host(device):
    x = device.tensor([3.0] * 4)
    device.begin()
    device.cuda.fake_copy_from_host(ctypes.c_void_p(x))
    assert device.end([x], [x], 4) < 0
    assert b"frees at once" in device.graphs.graphs_error()


def case_abandoned(device):
    before = device.cuda.fake_memory()
    x = device.tensor([3.0] * 4)
    device.begin()
    y = device.scale(x, 2.0, 4)
    assert device.graphs.graphs_abandon() == 0
    assert device.graphs.graphs_recording() == 0
    assert device.cuda.fake_live_graphs() == 0
    device.free(y)
    device.free(x)
    device.graphs.graphs_release(ctypes.c_int64(device.memory))
    assert device.held() == 0
    assert device.cuda.fake_memory() == before


def case_freed_while_recording(device):
    """Memory that is not the graph's, and that the recorded work has read, is freed with the graph."""
    x, other = device.tensor([1.0] * 4), device.tensor([5.0] * 4)
    device.begin()
    y = device.scale(other, 2.0, 4)
    device.free(other)
    graph = device.end([x], [y], 4)
    before = device.cuda.fake_memory()
    assert device.replay(graph, [[0.0] * 4], 4) == [10.0] * 4
    taken = device.cuda.fake_memory() - before
    device.graphs.graphs_destroy(ctypes.c_int64(graph))
    assert device.cuda.fake_memory() - before == taken - 512


def case_survivors(device):
    """What MindSpore still uses when its graph is gone stays: a result, and a number."""
    x = device.tensor([2.0] * 300)
    device.begin()
    y, number = device.scale(x, 2.0, 300), device.plugin.op_allocate(1)
    graph = device.end([x], [y], 300)
    device.replay(graph, [[2.0] * 300], 300)
    device.graphs.graphs_destroy(ctypes.c_int64(graph))
    device.graphs.graphs_release(ctypes.c_int64(device.memory))
    assert device.read(y, 300) == [4.0] * 300
    assert device.held() > 0
    again, places = record(device)
    assert y not in places
    device.graphs.graphs_destroy(ctypes.c_int64(again))
    device.free(y)
    device.free(number)
    device.graphs.graphs_release(ctypes.c_int64(device.memory))
    assert device.held() == 0


def case_several_and_parts(device):
    """Memory that is allocated together lies together, and parts of a block may stay."""
    x = device.tensor([0.0] * 1024)
    device.begin()
    found = (ctypes.c_void_p * 3)()
    device.plugin.op_allocate_several(found, 3, 1024)
    assert [each - found[0] for each in found] == [0, 4096, 8192]
    device.free(found[0])
    assert device.plugin.op_allocate(1024) == found[0]
    big = device.plugin.op_allocate(4096)
    device.plugin.op_free_except(ctypes.c_void_p(big), ctypes.c_void_p(big + 4096), 1024)
    assert device.plugin.op_allocate(1024) == big
    next_one = device.plugin.op_allocate(2048)
    assert next_one == big + 8192  # big + 4096 is kept
    device.free(big + 4096)
    assert device.plugin.op_allocate(1024) == big + 4096
    assert device.end([x], [x], 1024) > 0


def case_shared_with_another_stream(device):
    """A block that another stream uses does not serve again in this recording."""
    x = device.tensor([0.0] * 1024)
    device.begin()
    a = device.plugin.op_allocate(1024)
    device.plugin.op_share(ctypes.c_void_p(a))
    device.free(a)
    assert device.plugin.op_allocate(1024) != a
    assert device.end([x], [x], 1024) > 0
    device.begin()
    assert device.plugin.op_allocate(1024) == a
    assert device.end([x], [x], 1024) > 0


def case_pools_of_the_host(device):
    """Pinned memory is none of the graph's."""
    x = device.tensor([0.0] * 1024)
    device.begin()
    before = device.held()
    page = device.plugin.op_allocate_on_host(1 << 20)
    device.plugin.op_free_on_host(ctypes.c_void_p(page))
    assert device.held() == before
    assert device.plugin.op_allocate_by_class(1 << 10) > 0
    assert device.held() > before
    assert device.end([x], [x], 1024) > 0


def case_clears(device):
    """A synchronous fill is recorded as one on the stream."""
    x = device.tensor([0.0] * 1024)
    device.begin()
    y = device.scale(x, 2.0, 1024)
    assert device.plugin.op_clear(ctypes.c_void_p(y), 128) == 0
    graph = device.end([x], [y], 1024)
    assert device.replay(graph, [[4.0] * 1024], 1024) == [0.0] * 128 + [8.0] * 896


def run_cases(folder, recorder):
    """Runs each case in a process of its own, and prints what failed as JSON."""
    failed = {}
    for name in CASES:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                globals()[name](Device(folder, recorder))
                os._exit(0)
            except BaseException:  # noqa: BLE001 (the parent shows it)
                os.write(write, traceback.format_exc().encode())
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as words:
            said = words.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            failed[name] = said or f"exit status {status}"
    print(json.dumps(failed))


CASES = [name for name in dict(globals()) if name.startswith("case_")]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What failed, by the names of cases. MindSpore and its threads are not in the process that forks."""
    from msops.graphs.recorder import build

    folder = tmp_path_factory.mktemp("fake_gpu")
    compiler = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN", f"-L{folder}"]
    for source, name, needed in (
        ("cuda.cc", "fakecuda", []),
        ("pool.cc", "fakepool", []),
        ("plugin.cc", "mindspore_gpu_fake", ["-lfakepool", "-lfakecuda"]),
    ):
        target = f"lib{name}.so"
        options = [*needed, f"-Wl,-soname,{target}", "-o", f"{folder}/{target}"]
        subprocess.run([*compiler, str(HERE / source), *options], check=True)
    command = [sys.executable, __file__, str(folder), str(build().path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_recorder(failed, case):
    assert case not in failed, failed[case]


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
