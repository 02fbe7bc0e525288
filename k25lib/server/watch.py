"""Waits until a server is ready: its log's stages and the time left told meanwhile, stuck and dead ones found out."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from k25lib.client import Client, NotReady, ServerDown
from k25lib.errors import K25Error
from k25lib.file import write_text
from k25lib.redaction import redact
from k25lib.server import startup

KEEP_STARTS = 5


class LogFile:
    """New text of a log file from `offset` on; a file that was replaced or cut short is read from its start."""

    def __init__(self, path, offset=0):
        self.path, self.offset, self._inode = Path(path), offset, None

    def read(self):
        """The bytes that came since the last call, as text; '' while there is no file."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                if stat.st_size < self.offset or self._inode not in (None, stat.st_ino):
                    self.offset = 0
                self._inode = stat.st_ino
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return ""
        self.offset += len(data)
        return data.decode("utf-8", errors="replace")

    def close(self):
        """Nothing is held."""


class LogCommand:
    """New text of a log that a command follows (`docker logs -f`, `journalctl -f`, `ssh host tail -F`)."""

    def __init__(self, command):
        self._parts, self._lock = [], threading.Lock()
        self._process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self):
        while data := self._process.stdout.read1(65536):
            with self._lock:
                self._parts.append(data)

    def read(self):
        """What came since the last call."""
        with self._lock:
            parts, self._parts = self._parts, []
        return b"".join(parts).decode("utf-8", errors="replace")

    def close(self):
        """End the command, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        self._reader.join(5.0)
        self._process.stdout.close()


def wait_until_ready(
    url, *, model="", log=None, alive=None, probe=None, say=None, limit_s=7200.0, every_s=2.0, starts=None,
    stuck_after_s=startup.STUCK_AFTER_S, clock=time.monotonic, sleep=time.sleep,
):  # fmt: skip
    """Wait until the server at `url` has made a token, and return the model's id.

    `log` has `read()` (LogFile, LogCommand); `alive()` is False once the server has died, None if nobody knows;
    `probe()` returns the arguments of Startup.activity: without any, a quiet server is never called stuck; `say` gets a
    line at each change of stage, and when it moves; `starts` is a file that keeps how long earlier starts took. Raises
    K25Error: died (why), stuck, or out of time.
    """
    client, began = Client(url, timeout_s=5.0), clock()
    state = startup.Startup(began, stuck_after_s=stuck_after_s)
    teller, text, from_begin = _Teller(say or (lambda line: None)), "", None
    living, ask_at = None, began
    while True:
        now = clock()
        if alive and now >= ask_at:
            living = alive()  # asked first: what a dead server wrote is in the log by now
            ask_at = now + 20 * (clock() - now)  # by ssh it takes half a second: then seldom
        new = log.read() if log else ""
        text = (text + new)[-(1 << 20) :]
        state.feed(new, now)
        if from_begin is None:  # what was there before we looked is of earlier starts
            from_begin, earlier_restarts = not new, state.restarts
        if starts and not state.earlier and (key := startup.key(text)):
            state.earlier = _read(starts).get(key, [])
        signs = probe() if probe else {}
        state.activity(now, **signs)
        try:
            served = client.ready(model)
        except (ServerDown, NotReady) as error:
            problem = str(error)
        else:
            state.feed(log.read() if log else "", clock())
            if starts and from_begin and state.stage == "ready" and (key := startup.key(text)):
                _keep(Path(starts), key, state.durations(clock()))
            return served
        if living is False:
            raise K25Error(f"the server died while starting: {redact(str(startup.explain(text)))}")
        if state.restarts - earlier_restarts >= 3:
            why = redact(str(startup.explain(text, back=1)))
            raise K25Error(f"the server dies and is started again and again: {why}")
        if log and signs and state.stuck(now):  # a silent log alone says nothing
            raise K25Error(
                f"the server is stuck ({state.line(now)}): neither its log nor its memory nor its CPUs moved for "
                f"{startup.span(stuck_after_s)}"
            )
        if now - began > limit_s:
            logged = startup.explain(text)
            hint = f"; its log says: {redact(str(logged))}" if logged.error else ""
            where = f" ({state.line(now)})" if text else ""
            raise K25Error(f"not ready after {startup.span(limit_s)}{where}: {problem}{hint}")
        waiting = f"waiting for {client.shown_url}, {startup.span(now - began)} so far"
        teller.tell(state.line(now) if text else waiting, state.stage, (state.shards, state.percent), now)
        sleep(every_s)


class _Teller:
    """Says a line when the stage changes, at most every 5 s when it moves, and once a minute in any case."""

    def __init__(self, say):
        self.say, self.stage, self.step, self.at = say, None, None, 0.0

    def tell(self, line, stage, step, now):
        due = 5.0 if step != self.step else 60.0
        if stage != self.stage or now - self.at >= due:
            self.stage, self.step, self.at = stage, step, now
            self.say(line)


def _read(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _keep(path, key, durations):
    known = _read(path)
    rounded = {stage: round(seconds, 1) for stage, seconds in durations.items() if stage != "ready"}
    known[key] = [*known.get(key, []), rounded][-KEEP_STARTS:]
    write_text(path, json.dumps(known, indent=1) + "\n")
