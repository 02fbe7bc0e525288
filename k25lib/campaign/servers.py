"""The server of a campaign: one that runs already, one that may be restarted, or our own embedded one.

The runner asks the same four things of each: `up` (facts for the manifest), `free` (the machine, for microbenchmarks),
`died` (why, if it is known) and `close` (leave it as it was found).
"""

import fcntl
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from k25lib.client import Client
from k25lib.environment import gpus
from k25lib.errors import K25Error
from k25lib.run import PROJECT, runs_root
from k25lib.server import process
from k25lib.server.control import Control
from k25lib.server.embedded import Embedded
from k25lib.server.identity import discover
from k25lib.server.vllm_cpu import cache_dir
from k25lib.server.watch import LogFile, wait_until_ready


class Unavailable(K25Error):
    """What a phase needs can't be had; the message is the reason that the phase is skipped."""


def say(text):
    """A line about the server, on stderr."""
    print(f"  server: {text}", file=sys.stderr, flush=True)


class External:
    """A server that runs already: it is measured, never started, stopped or changed."""

    def __init__(self, settings, gpus_are_free=False):
        self.settings = settings
        self.gpus_are_free = gpus_are_free
        self.client = Client(settings.url)

    def wait(self, limit_s):
        """Wait until the server is ready, its stages told from its log if that is known."""
        log = self._facts().get("log")
        starts = cache_dir(PROJECT) / "starts.json"
        log = LogFile(log) if log else None
        wait_until_ready(self.settings.url, model=self.settings.model, log=log, say=say, limit_s=limit_s, starts=starts)

    def up(self, profiler=False):
        """Facts for the manifest once something answers at the URL and nobody else uses it; else a K25Error."""
        self.client.health()
        self._wait_until_idle()
        return self._facts()

    def _facts(self):
        told = {k: v for k in ("model", "tp", "python", "config", "traces", "log") if (v := getattr(self.settings, k))}
        return {"kind": "external", "url": self.client.shown_url, **discover(self.client.url), **told}

    def _wait_until_idle(self):
        """A benchmark on a server in use measures the others too: wait for them, for a while."""
        deadline = time.monotonic() + self.settings.busy_wait_s
        while any(in_use := [n or 0 for n in self.client.running()]):
            if time.monotonic() > deadline:
                raise K25Error(
                    f"the server is in use ({in_use[0]:.0f} requests running, {in_use[1]:.0f} waiting) and was for "
                    f"{self.settings.busy_wait_s} s: try later, or raise server.busy_wait_s"
                )
            say(f"in use: {in_use[0]:.0f} requests running, {in_use[1]:.0f} waiting; waiting for them to end")
            time.sleep(5)

    def free(self):
        """Raises Unavailable on a GPU machine, where the server holds the GPUs."""
        if gpus()["gpus"] and not self.gpus_are_free:
            raise Unavailable(
                f"the server at {self.client.shown_url} holds the GPUs: with --allow-restart it is stopped for this, "
                "with --gpus-are-free it runs all the same"
            )

    def died(self):
        """What is known of a server that stopped answering: nothing, it is not ours."""
        return ""

    def close(self):
        """Nothing to do: the server was there before."""


class Controlled(External):
    """A server that may be restarted: stopped for the microbenchmarks, started with a profiler for the captures, and
    put back to its normal configuration at the end, also after a failure."""

    def __init__(self, settings, control, allowed=True, dry=False):
        super().__init__(settings)
        self.traces = settings.traces or str(cache_dir(PROJECT) / "traces")
        more = {"allowed": allowed, "dry": dry, "say": say}
        self.control = Control(control, **more) if control else Control.of_url(settings.url, **more)
        self.with_profiler = self.control.profiled(self.traces)  # looked up before anything is stopped
        self.mode = "normal"  # as it was found; then stopped, profiling, or normal again

    def plan(self):
        """The commands of the whole campaign, in order, secrets redacted."""
        stop, start = self.control.plan()
        return [stop, self.control.plan(self.with_profiler)[1], stop, start]

    def up(self, profiler=False):
        """As it is, or started again: with its profiler if that is needed and missing."""
        if self.mode == "stopped" or (profiler and not self.client.has_profiler()):
            self._switch("profiling" if profiler else "normal")
        own = {"traces": self.traces} if self.mode == "profiling" else {}
        return {**own, **super().up()}  # the server's own word on its folder, where it can be heard, wins

    def free(self):
        """Stop it; it is started again for the next phase that needs it."""
        if self.mode != "stopped":
            self.control.stop()
            self.mode = "stopped"

    def died(self):
        """Whether its process has gone; its log says more."""
        return "" if self.mode == "stopped" or self.control.running() else "its process has gone; look at its log"

    def close(self):
        """Back to the normal configuration, if it is not in that."""
        if self.mode != "normal":
            self._switch("normal")

    def _switch(self, mode):
        say(f"restarting in the {'profiling' if mode == 'profiling' else 'normal'} configuration")
        self.control.stop()
        self.mode = "stopped"
        command = self.with_profiler if mode == "profiling" else None
        if not self.control.via:
            Path(self.traces).mkdir(parents=True, exist_ok=True)  # vLLM makes it only when it writes
        probe = None if self.control.via else process.activity
        starts = cache_dir(PROJECT) / "starts.json"
        self.control.bring_up(self.settings.url, command, say=say, probe=probe, starts=starts)
        self.mode = mode


class Own:
    """Our embedded server: started when a phase needs it, stopped when one needs the machine to itself."""

    def __init__(self):
        self.server = None

    def up(self, profiler=False):
        """Start it unless it runs; facts for the manifest."""
        if not (self.server and self.server.is_alive()):
            self.close()
            self.server = self.server or Embedded(PROJECT)  # a second start keeps its folder and its log
            self.server.start(on_stage=say)
        s = self.server
        facts = {"url": s.url, "model": s.model, "tp": s.tp, "python": s.python}
        paths = {"config": s.config, "traces": s.traces, "log": s.log}
        return {"kind": "embedded", **facts, **{name: str(path) for name, path in paths.items()}}

    def free(self):
        """Stop it: two cores are few."""
        self.close()

    def died(self):
        """The last error of its log in one line, if it died."""
        return self.server.why_died() if self.server and not self.server.is_alive() else ""

    def close(self):
        """Stop it if it runs."""
        if self.server:
            self.server.stop()


@contextmanager
def alone(name):
    """One campaign at a time on one server (`name`: host and port, or `embedded`): a second waits, and says so."""
    folder = runs_root() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"another campaign measures it ({lock.read().strip()}): waiting for its end; Ctrl-C leaves it alone")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        yield
