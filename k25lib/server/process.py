"""A server found on this machine by its port: its process, what started it, and its signs of life, from /proc."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from k25lib.environment import gpus


def find(port):
    """The process that listens at `port` here: dict of pid, argv, cwd, log (if its output is a file), unit (systemd),
    container; None if there is none, or none that this user may look into."""
    inodes = _listening(port)
    holders = {}
    for folder in Path("/proc").glob("[0-9]*/fd") if inodes else ():
        try:
            links = {str(link.readlink()) for link in folder.iterdir()}
        except OSError:  # gone, or another user's
            continue
        if links & inodes:
            holders[int(folder.parent.name)] = folder.parent
    for pid, folder in sorted(holders.items()):
        if _parent(folder) not in holders:  # children may have inherited the socket: the eldest is the server
            return _describe(pid, folder)
    return None


def environment(pid):
    """The environment that process `pid` was started with. It holds secrets: never write it down."""
    data = Path(f"/proc/{pid}/environ").read_bytes()
    pairs = (part.partition(b"=") for part in data.split(b"\0") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def activity(pid=None):
    """Signs of life for Startup.activity: `cpu_s` of process `pid` and all below it, `memory_bytes` on the GPUs (of all
    their processes), or in RAM where there is no GPU. What can't be found out is left out."""
    found = {}
    if pid is not None:
        ticks, resident = 0, 0
        for member in _family(pid):
            try:
                fields = _stat(Path(f"/proc/{member}"))
                resident += int(Path(f"/proc/{member}/statm").read_text(encoding="ascii").split()[1])
            except OSError:
                continue
            ticks += sum(int(field) for field in fields[11:15])
        found["cpu_s"] = ticks / os.sysconf("SC_CLK_TCK")
        found["memory_bytes"] = resident * os.sysconf("SC_PAGE_SIZE")
    if held := [gpu["memory_used_bytes"] for gpu in gpus() if gpu["memory_used_bytes"]]:
        found["memory_bytes"] = sum(held)
    return found


def port_of(url):
    """The TCP port of a URL."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _describe(pid, folder):
    argv = [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0")[:-1]]
    output = str((folder / "fd" / "1").readlink())
    groups = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
    unit = re.findall(r"/([^/\s]+\.service)(?=/|$)", groups, re.M)
    container = re.search(r"(?:docker|libpod|cri-containerd)[-/]([0-9a-f]{12,64})", groups)
    mine = [name for name in unit if not name.startswith(("user@", "docker", "containerd", "session-"))]
    return {
        "pid": pid,
        "argv": argv,
        "cwd": str((folder / "cwd").readlink()),
        "log": output if Path(output).is_file() and output.startswith("/") else "",
        "unit": mine[-1] if mine else "",
        "container": container[1][:12] if container else "",
    }


def _listening(port):
    """The sockets that listen at a TCP port, as /proc/<pid>/fd names them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _stat(folder):
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _parent(folder):
    try:
        return int(_stat(folder)[1])
    except OSError:
        return None


def _family(pid):
    """`pid` and all processes below it."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        children.setdefault(_parent(folder), []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found
