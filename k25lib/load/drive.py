"""Start the load worker, feed it a plan, and bring home what it recorded, also after Ctrl-C."""

import contextlib
import os
import pickle
import queue
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

from k25lib.client import tls_reason
from k25lib.errors import K25Error, UsageError

SPARE_DESCRIPTORS = 64
LONGEST_S = 1e9  # more is for ever, and no number of ns that fits
PACKAGE_ROOT = str(Path(__file__).parents[2])


def resolve(target):
    """The socket address of the target (the tuple of getaddrinfo that accepts a connection)."""
    try:
        addresses = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label of no or too many characters is a UnicodeError
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise K25Error(f"cannot resolve {target.host}: {reason}; check the URL") from error
    for address in addresses:
        try:
            with socket.socket(*address[:3]) as sock:
                sock.settimeout(5)
                sock.connect(address[4])
            return address
        except OSError as error:
            failure = error
    reason = failure.strerror or str(failure) or "no answer"
    raise K25Error(f"cannot connect to {target.shown}: {reason}; is the server running?") from failure


def check_descriptors(concurrency):
    """Refuse a concurrency for which the system has too few file descriptors (the worker raises the soft limit)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return sys.maxsize
    if concurrency + SPARE_DESCRIPTORS > hard:
        raise UsageError(f"concurrency {concurrency} needs more than the {hard} file descriptors allowed (ulimit -n)")
    return hard


def start(module, *args):
    """Start one of our modules as a process with pipes, in a session of its own: Ctrl-C is not for it."""
    paths = [PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


class Driver:
    """Runs plans against one target; `interrupted` is set once Ctrl-C came."""

    def __init__(self, target, first_timeout_s=120, chunk_timeout_s=30):
        self.target, self.address = target, resolve(target)
        self.timeouts = {"first_timeout_s": first_timeout_s, "chunk_timeout_s": chunk_timeout_s}
        self.interrupted = False

    def hold(self, requests, concurrency, warmup=0, due_ns=None, max_seconds=None, on_tick=None):
        """Send `requests` (bytes) at this concurrency, or when due; returns the worker's result.

        The first `warmup` requests are no part of `max_seconds`. `on_tick(done, in_flight)` is called about four
        times a second.
        """
        plan = {
            "tls": self.target.tls,
            "host": self.target.host,
            "address": self.address,
            "requests": requests,
            "concurrency": concurrency,
            "max_connections": max(concurrency, min(check_descriptors(concurrency), 4096) - SPARE_DESCRIPTORS),
            "warmup": warmup,
            "due_ns": due_ns,
            "max_ns": max(1, int(min(max_seconds, LONGEST_S) * 1e9)) if max_seconds else None,
            "connect_timeout_s": 10,
            "parent": os.getpid(),
            **self.timeouts,
        }
        process = start("k25lib.load.worker")
        frames = queue.SimpleQueue()
        threading.Thread(target=_read_frames, args=(process.stdout, frames), daemon=True).start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it died at once: there will be no result
                pickle.dump(plan, process.stdin, protocol=5)
            while True:
                try:
                    kind, value = frames.get()
                    if kind == "progress" and on_tick:
                        on_tick(*value)
                except KeyboardInterrupt:
                    if self.interrupted:
                        raise
                    self.interrupted = True
                    process.terminate()
                    continue
                if kind == "result":
                    return value
                if kind == "error":
                    if self.interrupted:  # it had not begun
                        raise KeyboardInterrupt
                    value = tls_reason(value) if "SSL" in value or "TLS" in value else value
                    raise K25Error(f"cannot load {self.target.shown}: {value}")
        finally:
            process.kill()
            process.wait()


def _read_frames(stream, frames):
    try:
        while True:
            frames.put(pickle.load(stream))
    except (EOFError, pickle.UnpicklingError, ValueError, OSError):
        frames.put(("error", "the load worker ended without a result"))
