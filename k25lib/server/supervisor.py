"""Keeps one server while its owner lives, ends it when told or when the owner dies, and cleans up behind it.

A program of its own (`python supervisor.py FOLDER COMMAND...`), standard library only, in a session of its own. It is
the only writer of FOLDER/state.json once it runs. A server that dies by itself is cleaned up behind as well. If this
process is killed, the kernel sends the server SIGTERM (PR_SET_PDEATHSIG), and the next start removes what stayed.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
SHM = Path("/dev/shm")


def start_time(pid):
    """The start of process `pid` in clock ticks since boot; with the pid it names one process. None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def session(sid):
    """The living processes of session `sid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == sid and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def shared_memory(pids):
    """The files of /dev/shm that these processes have mapped: name -> inode."""
    found = {}
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in maps.splitlines():
            if "/dev/shm/" in line and not line.endswith(" (deleted)"):
                fields = line.split(None, 5)
                found[fields[5].removeprefix("/dev/shm/")] = int(fields[4])
    return found


def remove_shared_memory(files):
    """Remove these files (name -> inode) of /dev/shm, unless another file has that name now or somebody maps it."""
    present = {}
    for name, inode in files.items():
        path = SHM / name
        if path.exists() and path.stat().st_ino == inode:
            present[name] = path
    if present:
        in_use = shared_memory(int(p.name) for p in Path("/proc").glob("[0-9]*"))
        for name, path in present.items():
            if name not in in_use:
                path.unlink(missing_ok=True)


class State:
    """FOLDER/state.json, written whole at each change."""

    def __init__(self, folder):
        self.path = folder / "state.json"
        self.values = json.loads(self.path.read_text(encoding="utf-8"))

    def update(self, **values):
        self.values.update(values)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def launch(command, log, temporary):
    """Start the server in a session of its own, all output to `log`, told by the kernel when this process dies."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def in_child():
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=in_child, env={**os.environ, "TMPDIR": temporary},
    )  # fmt: skip


def keep(server, owner, state):
    """Wait for a reason to end, and return it; remember the server's shared memory meanwhile."""
    started = looked = time.monotonic()
    while True:
        got = signal.sigtimedwait(WATCHED, 0.5)
        if got and got.si_signo != signal.SIGCHLD:
            return "it was told to"
        if server.poll() is not None:
            return f"the server ended by itself (exit status {server.returncode})"
        if os.getppid() != owner:
            return f"its owner, process {owner}, has ended"
        now = time.monotonic()
        if now - looked > min(30.0, max(1.0, (now - started) / 10)):  # rarer with age: a look costs some 10 ms
            looked = now
            remember(server, state)


def remember(server, state):
    """Add the server's shared memory to the state."""
    known = state.values["shared_memory"]
    seen = {**known, **shared_memory(session(server.pid))}
    if seen != known:
        state.update(shared_memory=seen)


def end(server, grace_s):
    """End the server: SIGTERM to its leader, SIGKILL to it after `grace_s`, and to what else is left soon after."""
    server.terminate()
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
    deadline = time.monotonic() + min(3.0, grace_s)
    while left := session(server.pid):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    server.wait()


def main(folder, command):
    """Run `command` until something ends it; returns when nothing of it is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    state = State(folder)
    temporary = tempfile.mkdtemp(prefix="k25-vllm-")
    with Path(state.values["log"]).open("ab", buffering=0) as log:
        server = launch(command, log, temporary)
        me = os.getpid()
        state.update(pid=server.pid, supervisor=me, supervisor_start=start_time(me), temporary=temporary)
        why = keep(server, state.values["owner"], state)
        remember(server, state)
        end(server, state.values["grace_s"])
        log.write(f"k25: the server has ended: {why}\n".encode())
    remove_shared_memory(state.values["shared_memory"])
    shutil.rmtree(temporary, ignore_errors=True)
    state.update(ended=why)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
