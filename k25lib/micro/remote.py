"""One worker process under any interpreter: here, in a container or on another host.

The workers' modules travel as a small zip on stdin, into a temporary folder that is removed after. The open stdin is a
lifeline: when it closes (time-out, Ctrl-C, death of this process, a lost connection), all that runs there is killed.
"""

import base64
import collections
import contextlib
import io
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

from k25lib.errors import UsageError

MODULES = ("timing.py", "kernels.py", "workloads.py", "gemm.py", "messages.py", "collectives.py")

# Runs on the other side with the standard library alone. `-m torch.distributed.run` starts each rank in a session of
# its own, so that the children must be found by parent, not by group.
BOOTSTRAP = """
import base64, io, json, os, shutil, signal, subprocess, sys, tempfile, threading, time, zipfile
job = json.loads(sys.stdin.readline())
folder = tempfile.mkdtemp(prefix="k25-")
zipfile.ZipFile(io.BytesIO(base64.b64decode(job["zip"]))).extractall(folder)
env = {**os.environ, **job["env"]}
env["PYTHONPATH"] = os.pathsep.join([folder] + [p for p in [env.get("PYTHONPATH")] if p])
settings = os.path.join(folder, "settings.json")
open(settings, "w").write(json.dumps(job["settings"]))
env["K25_SETTINGS"] = settings
child = subprocess.Popen([sys.executable] + job["arguments"], env=env, cwd=folder, stdin=open(settings))
def family():
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(pid)] = int(open("/proc/" + pid + "/stat").read().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found = [child.pid]
    for pid in found:
        found += [p for p, parent in parents.items() if parent == pid]
    return found
def end():
    for pid in reversed(family()):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
def lifeline():
    sys.stdin.read()
    end()
threading.Thread(target=lifeline, daemon=True).start()
code = child.wait()
shutil.rmtree(folder, ignore_errors=True)
os._exit(code if code >= 0 else 128 - code)
"""


def prefix_of(python):
    """What Python is called with, as a list of words: `python` is None (this interpreter), a string or a list.

    `docker exec` (podman's, kubectl's) is given the option that keeps stdin open: the worker's job comes there.
    """
    try:
        parts = shlex.split(python or "") if not isinstance(python, (list, tuple)) else list(python)
    except ValueError as error:
        raise UsageError(f"{python!r} is no command: {error}") from None
    parts = parts or [sys.executable]
    tool = next((at for at, part in enumerate(parts) if Path(part).name in ("docker", "podman", "kubectl")), None)
    if tool is not None and "exec" in parts[tool:]:
        options = parts.index("exec", tool) + 1
        if not {"-i", "-it", "-ti", "--interactive", "--stdin"} & set(parts[options:]):
            parts.insert(options, "-i")
    return parts


def command_of(python):
    """The whole command that runs the bootstrap; ssh gets its words quoted, for the shell at the other end."""
    parts, program = prefix_of(python), ["-u", "-c", BOOTSTRAP]
    return parts + ([shlex.quote(part) for part in program] if Path(parts[0]).name == "ssh" else program)


def worker_zip():
    """The workers and nothing else, as base64."""
    data = io.BytesIO()
    here = Path(__file__).parent
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("k25lib/__init__.py", "")
        archive.writestr("k25lib/micro/__init__.py", "")
        for name in MODULES:
            archive.write(here / name, f"k25lib/micro/{name}")
    return base64.b64encode(data.getvalue()).decode()


class Worker:
    """One process of the worker: its events in order, the last lines it said, and its end."""

    def __init__(self, python, arguments, settings, env):
        self.said = collections.deque(maxlen=100)
        self.by_rank = {}
        self._lines = queue.Queue()
        try:
            self.process = subprocess.Popen(
                command_of(python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"cannot run {prefix_of(python)[0]}: {error.strerror}") from error
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._hear)]
        for thread in self._threads:
            thread.start()
        job = {"zip": worker_zip(), "arguments": arguments, "settings": settings, "env": env}
        with contextlib.suppress(OSError):  # it ended at once: its last words say why
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _hear(self):
        for line in self.process.stderr:
            text = line.strip()
            found = re.match(r"\[rank (\d+)\] (.*)", text)
            if found:
                self.by_rank[int(found[1])] = found[2]
            elif text:
                self.said.append(text)

    def next(self, timeout_s):
        """The next event as a dict, None at the end of the output. Raises queue.Empty after the time-out."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if line is None:
                return None
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "event" in event:
                return event
            self.said.append(line.strip())

    def wait(self, seconds):
        """Give it this long to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def stop(self):
        """End it and all that it started; waits until it has gone. Returns the exit code."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for thread in self._threads:
            thread.join(timeout=2)
        return self.process.returncode

    def last_words(self):
        """What each rank did last and the last error that was printed, as one line."""
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.by_rank.items()))
        told = [line for line in self.said if re.search(r"exitcode: -?\d|in use", line)]  # torchrun of a rank; a port
        errors = [line for line in self.said if re.search(r"(error|exception)\b(?!_)|killed|refused", line, re.I)]
        said = (told[:1] or errors[-1:] or list(self.said)[-1:] or [""])[0]
        signals = [signal.Signals(int(n)).name for n in re.findall(r"exitcode: -(\d+)", said)]
        said = " ".join([re.sub(r"^[EW]\d{4} .*?\] ", "", said), *signals])
        return "; ".join(part for part in (ranks, f"it said: {said[:200]}" if said else "") if part)
