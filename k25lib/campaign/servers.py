"""The server of a campaign: one that runs already, one that may be restarted, or our own embedded one.

The runner asks the same four things of each: `up` (facts for the manifest), `free` (the machine, for microbenchmarks),
`died` (why, if it is known) and `close` (leave it as it was found).
"""

import fcntl
import math
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from k25lib.client import Client, ProfilerMissing
from k25lib.environment import gpus
from k25lib.errors import K25Error, UsageError
from k25lib.redaction import HIDDEN, redact
from k25lib.run import PROJECT, runs_root
from k25lib.server import process
from k25lib.server.control import Control
from k25lib.server.embedded import Embedded
from k25lib.server.identity import discover, is_here
from k25lib.server.vllm_cpu import cache_dir
from k25lib.server.watch import LogFile, wait_until_ready
from k25lib.settings import from_tree, load_settings
from k25lib.signals import held


class Unavailable(K25Error):
    """What a phase needs can't be had; the message is the reason that the phase is skipped."""


def say(text):
    """A line about the server, on stderr; a terminal that has gone is no reason to leave the server down."""
    with suppress(OSError):
        print(f"  server: {text}", file=sys.stderr, flush=True)


class External:
    """A server that runs already: it is measured, never started, stopped or changed."""

    def __init__(self, settings, gpus_are_free=False):
        self.settings = settings
        self.gpus_are_free = gpus_are_free
        self.client = Client(settings.url)

    def wait(self, limit_s, control=None):
        """Wait until the server is ready, its stages told from its log, if that is known or `control` can follow it."""
        log = self._facts().get("log")
        log = LogFile(log) if log else Control(control).follow() if control else None
        try:
            seen = {"log": log, "probe": process.activity if is_here(self.settings.url) else None}
            more = {"say": say, "starts": _starts(), "stuck_after_s": math.inf}  # nobody sees its CPUs here
            wait_until_ready(self.settings.url, model=self.settings.model, limit_s=limit_s, **seen, **more)
        finally:
            if log:
                log.close()

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
        """Raises Unavailable where the server holds the GPUs, or may (they can't be seen from here), and where there is
        no way to them."""
        self._check_place(self.settings.python)
        elsewhere = not is_here(self.client.url) or " " in self.settings.python.strip()  # such as "ssh host python3"
        if not self.gpus_are_free and (elsewhere or gpus()):
            raise Unavailable(
                f"the server at {self.client.shown_url} holds the GPUs: with --allow-restart it is stopped for this, "
                "with --gpus-are-free it runs all the same"
            )

    def _check_place(self, python):
        if not python and not is_here(self.client.url):
            raise Unavailable(
                f"the server at {self.client.shown_url} is on another machine: set server.python to what Python is "
                'called with there, such as "ssh -o BatchMode=yes host /venv/bin/python"'
            )

    def flush(self):
        """Nothing to do: what its profiler holds back until it ends is written when its owner ends it."""

    def died(self):
        """What is known of a server that stopped answering: nothing, it is not ours."""
        return ""

    def close(self):
        """Nothing to do: the server was there before."""


class Controlled(External):
    """A server that may be restarted: stopped for the microbenchmarks, started with a profiler for the captures, and
    put back to its normal configuration at the end, also after a failure."""

    def __init__(self, settings, control, profiler="torch", allowed=True, dry=False):
        super().__init__(settings)
        if HIDDEN in str(control):
            raise UsageError(
                "this run's [control] held a secret, which a run never keeps: name an environment variable in its "
                "place, or start a new run"
            )
        self.traces, self.profiler = settings.traces or str(cache_dir(PROJECT) / "traces"), profiler
        more = {"allowed": allowed, "dry": dry, "say": say}
        self.normal = Control(control, **more) if control else Control.of_url(settings.url, settings.log, **more)
        self.profiling = self.normal.profiled(self.traces, profiler)  # looked up before anything is stopped
        self.control = self.normal  # the one that runs or was stopped last
        self.mode = "normal"  # as it was found; then stopped, profiling, or normal again
        self.python = ""

    def plan(self):
        """The commands of the whole campaign, in order, secrets redacted."""
        commands = [(self.normal, "stop"), (self.profiling, "start"), (self.profiling, "stop"), (self.normal, "start")]
        return [redact(control.command(action)) for control, action in commands]

    def up(self, profiler=False):
        """As it is, or started again: if it has died, or with its profiler if that is needed and missing."""
        if self.mode != "stopped" and not self.control.running():
            say("its process has gone")
            self.mode = "stopped"
        found = self.mode == "normal" and self.profiler == "torch" and profiler and self.client.has_profiler()
        if self.mode == "stopped" or (profiler and self.mode == "normal" and not found):
            self._switch("profiling" if profiler else "normal")
        own = {"traces": self.traces, "stacks": False} if self.mode == "profiling" else {}
        self.python = self.settings.python or self.control.python()
        told = {**own, **super().up()}  # the server's own word on its folder, where it can be heard, wins
        if self.profiler == "nsys":
            told |= own  # it knows nothing of nsys
        return {**told, "python": self.python} if self.python else told

    def free(self):
        """Stop it, if it has not stopped; it is started again for the next phase that needs it."""
        if self.mode != "stopped":
            self.python = self.python or self.settings.python or self.control.python()
            self._check_place(self.python)
        self._stop()

    def flush(self):
        """Have what the profiler holds back written: nsys writes its reports when the server ends."""
        if self.mode == "profiling" and self.profiler == "nsys":
            self._stop()

    def died(self):
        """Whether its process has gone; its log says more."""
        return "" if self.mode == "stopped" or self.control.running() else "its process has gone; look at its log"

    def close(self):
        """Back to the normal configuration, if it is not in that; signals wait for it."""
        if self.mode != "normal":
            with _uninterrupted():
                try:
                    self._switch("normal")
                except BaseException:
                    say(f"not put back; by hand: {redact(self.normal.command('start'))}")
                    raise

    def _stop(self):
        self.mode = "stopped"  # before it is: a stop that is cut off must be made good too
        self.control.stop()

    def _switch(self, mode):
        say(f"restarting in the {'profiling' if mode == 'profiling' else 'normal'} configuration")
        self._stop()
        self.control = self.profiling if mode == "profiling" else self.normal
        if not self.control.via:
            Path(self.traces).mkdir(parents=True, exist_ok=True)  # vLLM makes it only when it writes
        self.control.bring_up(self.settings.url, starts=_starts())
        self.mode = mode


def _uninterrupted():
    """Signals that end the process are told, and wait for the block's end; a second Ctrl-C goes through."""

    def told(number, before):
        if number == signal.SIGINT and number in before:
            raise KeyboardInterrupt
        with suppress(RuntimeError):  # it came amid another line
            say(f"{signal.Signals(number).name} waits until the server is put back; Ctrl-C twice leaves it as it is")

    return held((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), told)


@contextmanager
def with_profiler(run, url, profiler="torch", allow_restart=False):
    """Inside the block the server at `url` has its profiler; yields what is known of the server, a dict.

    For a notebook: a server without one is restarted if `allow_restart`, by the run's (or campaign.toml's) [control],
    and put back afterwards, also after a failure; else what a restart would run is said, and ProfilerMissing raised.
    """
    tree = run.manifest.get("settings")
    settings = from_tree(tree) if tree else load_settings(PROJECT / "campaign.toml")
    of_it = replace(settings.server, url=url), settings.control, profiler
    known = run.manifest.get("server", {})
    if not allow_restart:
        try:
            Client(url).require_profiler()
        except ProfilerMissing:
            with suppress(K25Error):
                for command in Controlled(*of_it, allowed=False, dry=True).plan():
                    say(f"with allow_restart = True this would run: {command}")
            raise
        yield known
        return
    server = Controlled(*of_it)
    try:
        yield {**known, **server.up(profiler=True)}
    finally:
        server.close()


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

    def flush(self):
        """Nothing to do: vLLM's own profiler has written everything when it is stopped."""

    def died(self):
        """The last error of its log in one line, if it died."""
        return self.server.why_died() if self.server and not self.server.is_alive() else ""

    def close(self):
        """Stop it if it runs."""
        if self.server:
            self.server.stop()


def _starts():
    return cache_dir(PROJECT) / "starts.json"


def alone(url):
    """One campaign at a time on one server (`url`; "" is the embedded one): a second waits, and says so."""
    shown = Client(url).shown_url.replace("localhost", "127.0.0.1") if url else "embedded"
    folder = runs_root() / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return _locked(folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', shown)}.lock", "measures it")


def alone_in(run):
    """One campaign at a time in one run: a second waits, and says so."""
    return _locked(run.path / ".campaign.lock", f"works on {run.path.name}")


@contextmanager
def _locked(path, what):
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"another campaign {what} ({lock.read().strip()}): waiting for its end; Ctrl-C leaves it alone")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        yield
