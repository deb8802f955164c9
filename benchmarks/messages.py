"""What a part of the benchmark sends to the process that started it: one JSON object a line."""

import json
import re
import traceback

_NO_MEMORY = re.compile(r"out of memory|memory isn't enough|bad_alloc|OutOfMemory|MemoryError", re.IGNORECASE)


def say(**message):
    print(json.dumps(message), flush=True)


def is_out_of_memory(text):
    """Tells whether MindSpore, torch or C++ says so in this text."""
    return bool(_NO_MEMORY.search(text))


class Step:
    """Names the step in its block, and reports a failure there instead of ending the part."""

    def __init__(self, step, silent=False):
        self.step = step
        if not silent:
            say(step=step)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None or not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        lines = str(error).strip().splitlines()
        why = f"{kind.__name__}: {lines[0] if lines else ''}"
        say(failed=f"{self.step}: {'out of memory' if is_out_of_memory(f'{kind.__name__}: {error}') else why}")
        return True
