"""Holds what the examples share as programs: checks of the command line, the device, and what Ctrl-C does."""

import argparse
import contextlib
import signal
import sys

import mindspore

_WORDS = {int: "a whole number", float: "a number"}


def number(kind, low, high):
    """Returns what reads an option for argparse: an int or a float from `low` to `high`."""

    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"must be {_WORDS[kind]} from {low} to {high}, got {text!r}")
        return value

    return read


COUNT, SEED = number(int, 1, 10**9), number(int, 0, 2**32 - 1)


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output must be a folder: {error}")


def use(device_target):
    """Lets MindSpore compute on this device, in graph mode."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        mindspore.set_device(device_target)
    except RuntimeError as error:
        reason = str(error).partition(".")[0]
        sys.exit(f"MindSpore cannot use the {device_target}: {reason}. `python -m msops doctor` tells more.")


# When MindSpore runs a graph, it sets a handler of its own for SIGINT, which sends SIGTERM.
_INTERRUPTS = signal.SIGINT, signal.SIGTERM


def run(main, hint=""):
    """Calls `main`, in which Ctrl-C and requests to terminate raise KeyboardInterrupt, and says if one ended it."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\nInterrupted.{hint}")


@contextlib.contextmanager
def finished():
    """Lets the block finish before Ctrl-C raises KeyboardInterrupt; a second Ctrl-C raises it at once. Yields a list
    that is not empty after Ctrl-C. MindSpore would print pages about a graph whose compilation is interrupted."""
    interrupts = []

    def note(number, frame):
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    before = {number: signal.signal(number, note) for number in _INTERRUPTS}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupts:
        raise KeyboardInterrupt
