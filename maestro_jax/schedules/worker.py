"""Makes schedules in another process, so that the thread that issues tasks is not held up by Python's lock.

The process is this module run by the same interpreter, and not one of `multiprocessing`: those import the user's main module again, which
would run a script a second time. It loads no JAX, ends with the process that started it, and takes one request after the other: a pickled
(policy, workload) after its length in eight bytes, and back a pickled schedule or exception in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from typing import IO, Any

from .policies import Policy
from .tasks import Schedule
from .workload import Workload

logger = logging.getLogger(__name__)
_LENGTH = 8


class Worker:
    """Makes schedules in a process of its own, which is started by the first request."""

    def __init__(self) -> None:
        # An evaluation may ask in the main thread while the thread that prepares steps does.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    def schedule(self, policy: Policy, workload: Workload) -> Schedule:
        """Returns what `policy.schedule(workload)` returns, and raises what it raises.

        A policy that the other process cannot import (one of a script or a notebook), or a process that has died, does not end a run: then
        the schedule is made here.
        """
        if type(policy).__module__ == "__main__":
            return policy.schedule(workload)
        try:
            with self._lock:
                answer = self._ask(pickle.dumps((policy, workload)))
        except Exception as error:  # pickling and unpickling run the code of others, which may fail in any way
            logger.warning("a schedule is made in this process, because the other one failed: %s: %s", type(error).__name__, error)
            self.close()
            return policy.schedule(workload)
        except BaseException:
            # Ctrl-C between question and answer: the next question would get the answer to this one.
            self.close()
            raise
        if answer is None:
            return policy.schedule(workload)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process; a later request starts another one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _ask(self, request: bytes) -> Any:
        if self._process is None:
            self._process = _started()
            # Also when nobody calls close, and when this process ends.
            self._end = weakref.finalize(self, _ended, self._process)
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise OSError("the process has no pipes")
        _write(stdin, request)
        return pickle.loads(_read(stdout))


def _started() -> subprocess.Popen[bytes]:
    # Modules are found where this process finds them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _ended(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        # It ends by itself when its input ends; while it makes a schedule that nobody wants any more, it is made to.
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve() -> None:
    """Answers requests until the input ends; the other process's side of `Worker`."""
    # Ctrl-C in a terminal and SIGTERM of a batch system reach every process of a group; when to end is decided by the one that asked.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What issues tasks goes first where there are few cores.
    with contextlib.suppress(OSError):
        os.nice(5)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a policy prints must not get between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            request = _read(sys.stdin.buffer)
        except EOFError:
            return
        _write(answers, _answer(request))


def _answer(request: bytes) -> bytes:
    """A pickled schedule or error; None where the policy cannot be loaded or its answer cannot be sent, so that it is asked over there."""
    try:
        policy, workload = pickle.loads(request)
    except Exception:  # a policy that only the other process can import
        return pickle.dumps(None)
    try:
        answer: Any = policy.schedule(workload)
    except Exception as error:  # passed on to the process that asked
        answer = error
    try:
        pickle.loads(message := pickle.dumps(answer))
    except Exception:  # an error whose class takes other arguments, for example
        return pickle.dumps(None)
    return message


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH, "big") + message)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, int.from_bytes(_exactly(pipe, _LENGTH), "big"))


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    found = pipe.read(count)
    if len(found) < count:
        raise EOFError("the other process ended")
    return found
