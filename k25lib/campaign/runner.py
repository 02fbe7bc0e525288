"""Runs a plan: one phase after another, each with a state and a reason, a report after every one."""

import signal
import sys
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import nbformat

from k25lib.campaign.execute import NotebookFailed, checked_parameters, execute
from k25lib.campaign.report import write_report
from k25lib.campaign.servers import Unavailable
from k25lib.client import Client
from k25lib.environment import machine
from k25lib.errors import K25Error
from k25lib.redaction import redact
from k25lib.run import Run, reports_root, runs_root
from k25lib.settings import from_tree, to_tree
from k25lib.signals import handled, unignored

SERVED = ("server", "profiler")
TRACES = ("*.trace.json*", "*.nsys-rep", "*.sqlite*")  # and SQLite's own -wal and -shm


class Runner:
    """Executes the phases of one run with one server (of campaign.servers)."""

    def __init__(self, run, phases, settings, server, embedded=False, say=None):
        self.run, self.phases, self.settings, self.server = run, phases, settings, server
        self.embedded = embedded
        self.chosen = phases
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))

    def check(self):
        """Check the parameters of every phase against its notebook before any kernel starts (UsageError)."""
        for phase in self.phases:
            checked_parameters(phase.notebook, self._parameters(phase), phase.table)

    def _parameters(self, phase):
        run = str(self.run.path) if self.run else ""
        return {"run": run, **self.settings.parameters(phase.table, self.embedded)}

    def go(self, chosen=None):
        """Run the chosen phases (default: all) in order. Returns the names of those that failed."""
        self.chosen = chosen = self.phases if chosen is None else chosen
        states = self.run.manifest.get("phases", {})
        for phase in self.phases:
            if phase in chosen or phase.name not in states:
                self._state(phase, "pending", question=_question(phase.notebook))
        self.run.update(server_error="")
        with _signals_as_exit():
            try:
                for phase in chosen:
                    self._phase(phase)
                    self._report()
            finally:
                self._leave()
        states = self.run.manifest["phases"]
        return [p.name for p in chosen if states[p.name]["state"] == "failed"]

    def _leave(self):
        """The server as it was found, and the last report, whatever has happened."""
        try:
            self.server.close()
        except K25Error as error:
            self.run.update(server_error=str(error))
            self.say(f"the server could not be left as it was found: {error}")
        finally:
            self._keep_server_log()
            if not self.settings.campaign.keep_captures:
                drop_traces(self.run)
            self._report(page=True)

    def _phase(self, phase):
        try:
            self._prepare(phase)
        except Unavailable as error:
            self._state(phase, "skipped", str(error))
            return
        except K25Error as error:
            self._state(phase, "failed", str(error))
            return
        target = self.run.report_dir / f"{phase.name}.ipynb"
        began = time.monotonic()
        self._state(phase, "running", started=datetime.now(UTC).isoformat(timespec="seconds"))
        state, why = "failed", "interrupted"
        try:
            parameters = self._parameters(phase)
            execute(phase.notebook, target, parameters, self.settings.campaign.cell_timeout_s, self.run.log(phase.name))
            state, why = "ok", ""
        except NotebookFailed as error:
            died = self.server.died() if phase.needs in SERVED else ""
            why = f"{error}; the server died: {died}" if died else str(error)
        finally:
            if state != "ok" and phase.needs == "profiler":
                self._end_profiler()
            self._state(phase, state, why, seconds=round(time.monotonic() - began, 1))

    def _end_profiler(self):
        """A kernel that was killed has left the profiler running, and the server slow."""
        with suppress(K25Error):
            Client(self.run.manifest["server"]["url"]).has_profiler(timeout_s=300.0)

    def _prepare(self, phase):
        """Have what the phase needs, or raise Unavailable (a reason to skip) or K25Error (a failure)."""
        states = self.run.manifest["phases"]
        for needed in (p.name for p in self.chosen if p.name in phase.after):
            if (state := states[needed]["state"]) in ("failed", "skipped"):
                raise Unavailable(f"needs {needed}, which {'failed' if state == 'failed' else 'was skipped'}")
        if phase.needs in SERVED:
            try:
                self.run.update(server=self.server.up(profiler=phase.needs == "profiler"))
            except K25Error as error:  # the first to need it tells the failure; for the others it is a reason to skip
                first = phase == next(p for p in self.chosen if p.needs in SERVED)
                raise (error if first else Unavailable(str(error))) from None
        elif phase.needs == "free":
            self.server.free()
        elif phase.table == "breakdown":
            self.server.flush()

    def _keep_server_log(self):
        """A copy of the server's log belongs to the run, where we can read it."""
        log = self.run.manifest.get("server", {}).get("log")
        if log and Path(log).is_file():
            text = Path(log).read_text(encoding="utf-8", errors="replace")
            self.run.log("server").write_text(redact(text), encoding="utf-8")

    def _state(self, phase, state, why="", **more):
        with self.run.changing() as manifest:
            record = manifest.setdefault("phases", {}).setdefault(phase.name, {})
            record.update(state=state, why=why, **more)
            seconds = record.get("seconds")
        if state != "pending":
            took = f" in {seconds:.0f} s" if seconds is not None and state in ("ok", "failed") else ""
            self.say(f"{phase.name}: {state}{took}{f': {why}' if why else ''}")

    def _report(self, page=False):
        """Write the document (and the page); a report that can't be written is said, and the campaign goes on."""
        try:
            write_report(self.run, page=page)
            self.run.update(report_error="")
        except Exception as error:  # a fault in a report must not cost the measurements
            self.run.update(report_error=f"{type(error).__name__}: {error}")
            self.say(f"the report could not be written: {type(error).__name__}: {error}")


def drop_traces(run):
    """Delete the traces of a run whose breakdown is done (hundreds of MB); its text tables and capture.json stay."""
    if run.manifest["phases"].get("06_breakdown", {}).get("state") != "ok":
        return
    for folder in run.captures().values():
        for pattern in TRACES:
            for trace in folder.glob(pattern):
                trace.unlink()
    with run.changing() as manifest:
        for record in manifest.get("captures", {}).values():
            record["dropped"] = True


def new_run(settings, command):
    """A new run directory with the settings and the environment in its manifest."""
    run = Run.create(
        settings.campaign.name,
        runs_root(),
        kind="campaign",
        title=settings.campaign.title,
        command=command,
        settings=to_tree(settings),
        environment=machine(),
    )
    reports_root().mkdir(parents=True, exist_ok=True)
    return run


def settings_of(run):
    """The settings that a run was started with."""
    return from_tree(run.manifest.get("settings", {}))


def _question(notebook):
    """The notebook's question: the first words after the title of its first Markdown cell."""
    first = next((c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "markdown"), "")
    lines = [line.strip(" *#") for line in first.splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else "".join(lines)


@contextmanager
def _signals_as_exit():
    """SIGTERM and SIGHUP (its terminal has gone) become SystemExit, so that papermill saves the notebook and ends its
    kernel, and the server is put back."""

    def leave(number, _):
        raise SystemExit(128 + number)

    with handled(unignored(signal.SIGTERM, signal.SIGHUP), leave):
        yield
