import gc
import itertools
import os
import re
import zlib

import mindspore
import pytest

from msops.compat import VERSION, set_device


def pytest_addoption(parser):
    parser.addoption("--device-target", choices=("CPU", "GPU"), default="CPU", help="where the operators run")
    parser.addoption("--turn", type=int, choices=range(1, 17), help="run of the tests marked `wide` those of this turn")
    parser.addoption(
        "--changed", action="append", default=[], help="a file of tests that runs in each turn, or a library"
    )
    parser.addoption("--expressions", type=int, default=300, help="how many random ones test_kernels_on_gpus.py runs")


def pytest_configure(config):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests share the cores, and what they start inherits this
    set_device(config.getoption("--device-target"))
    if config.getoption("--device-target") == "GPU":  # some tests compare with MindSpore's own convolution
        mindspore.device_context.gpu.op_precision.conv_allow_tf32(False)
    else:  # the tests' code runs on the CPU alone, and nvcc takes three times as long; test_load.py calls nvcc itself
        os.environ.setdefault("NVCC", "")


def is_due(item, turn, changed):
    """Tells whether a test runs in one of 16 turns. Each runs in two, except calls of emulated libraries: these take
    the longest, and run in one if the library did not change. The test's id chooses, as far as the first word of its
    parameters: what one library or one network serves stays together, and so does what runs alone in a file. Each half
    of a test in two modes is spread by itself. All tests of an emulated library are together, since most compile longer
    than they run; those of flash_attention, which compiles faster than they run, are spread."""
    test = re.match(r"[^\[]*(\[\w+)?", item.nodeid)[0]
    emulated = re.match(r".*test_emulated_entries\.py::\w+\[(\w+)", test)
    if item.get_closest_marker("alone"):
        test = item.nodeid.partition("::")[0]
    elif emulated:
        test = item.nodeid if emulated[1] == "flash_attention" else re.sub(r"::\w+", "::test_emulated_equals_cpu", test)
    turns = 16 if emulated and emulated[1] not in changed else 8
    return zlib.crc32(test.encode()) % turns == turn % turns


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config, items):
    """Marks as wide what graph mode runs of a test beyond its first case: it calls the entries that PyNative mode calls
    for all cases, and compiles for each. Then leaves out the wide tests of other turns."""
    modes = {item: item.callspec.params.get("mode") for item in items if hasattr(item, "callspec")}
    tests = {item: item.nodeid.partition("[")[0] for item in modes}
    in_both, seen = {tests[item] for item in modes if modes[item] == "pynative"}, set()
    for item in [item for item in modes if modes[item] == "graph" and tests[item] in in_both]:
        if tests[item] in seen:
            item.add_marker(pytest.mark.wide)
        seen.add(tests[item])
    turn, changed = config.getoption("--turn"), config.getoption("--changed")
    if turn:
        files = {config.rootpath / file for file in changed}
        others = {
            item
            for item in items
            if item.get_closest_marker("wide") and item.path not in files and not is_due(item, turn, changed)
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


finished = itertools.count(1)  # tests


def freeze():
    """Lets gc.collect pass over what is there now: MindSpore calls it before it compiles a graph."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    freeze()


def pytest_runtest_logfinish():
    # MindSpore does not end the recording of a function that raises, and would add what the next tests run to it.
    executor = mindspore.common.api._pynative_executor
    if getattr(executor, "grad_flag", bool)():  # old versions lack it
        executor.clear_res()
    if next(finished) % 10 == 0:  # it takes some milliseconds
        freeze()


@pytest.fixture(scope="session")
def device_target(request):
    return request.config.getoption("--device-target")


@pytest.fixture(params=("graph", "pynative"))
def mode(request):
    """Runs the test in each of MindSpore's modes."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE if request.param == "graph" else mindspore.PYNATIVE_MODE)
    return request.param


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call():
    """Skips tests that need empty tensors if MindSpore cannot make them, or has no memory for empty results."""
    outcome = yield
    words = ("can not contain zero dimension", "The device address is empty")
    if VERSION < (2, 7) and outcome.excinfo and any(word in str(outcome.excinfo[1]) for word in words):
        outcome.force_exception(pytest.skip.Exception("MindSpore before 2.7 has no empty tensors"))
