"""The control channel between the parent and a worker: lines of JSON over the worker's standard input and output.

The channel does not use the network under test. All processes share the machine's monotonic clock, so the parent can
name the moment at which all hosts begin a step.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

QUIT = "quit"
Handler = Callable[..., Any]


def open_channel() -> TextIO:
    """Open the stream for answers. From here on, output that libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Make a new process die with its parent, even while it waits. Call this before its program starts."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def give_back_memory() -> None:
    """Return free memory to the system: all hosts share one machine's memory."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)


def serve(answers: TextIO, handlers: Mapping[str, Handler]) -> None:
    """Answer the parent's lines until it says quit or is gone, and end the process.

    Args:
      answers: from `open_channel`.
      handlers: by the name that stands under "do"; the line's other entries are the arguments.
    """
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        if name == QUIT:
            break
        try:
            answer = {"ok": handlers[name](**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of libraries would wait for other processes


def timed(work: Callable[[], None], at: float) -> dict[str, float]:
    """Do a piece of work at a given moment; return when it ended and its processor seconds.

    Args:
      work: returns when all of it is done.
      at: seconds of `time.monotonic`.
    """
    time.sleep(max(0.0, at - time.monotonic()))
    used = time.process_time()
    work()
    return {"seconds": time.monotonic() - at, "cpu": time.process_time() - used}


def counters(interface: str) -> dict[str, int]:
    """Bytes and packets that this host's interface has sent and received."""
    folder = Path("/sys/class/net") / interface / "statistics"
    return {name: int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")}
