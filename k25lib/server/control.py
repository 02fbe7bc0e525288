"""Starts, stops, follows and enters a server, whatever runs it: command strings from settings, presets as data."""

import json
import re
import shlex
import shutil
import subprocess
import time
import tomllib
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from k25lib.client import Client, ServerDown, profiler_config
from k25lib.errors import K25Error, UsageError
from k25lib.redaction import redact
from k25lib.server import process
from k25lib.server.startup import last_line
from k25lib.server.supervisor import start_time
from k25lib.server.watch import LogCommand, wait_until_ready

STRINGS = ("start", "stop", "running", "mark", "logs", "exec", "python")
VALUES = ("command", "log", "unit", "container", "cwd", "pid_file")
STOP_LIMIT_S = 900.0  # a profiler writes for minutes: Python stacks, the reports of nsys
SILENT_LIMIT_S = 60.0
CHANGE_LIMIT_S = 7200.0  # some starts return only when the server is ready
NSYS = (  # neither CPU samples nor the OS's calls: nobody reads them, and they slow the server
    "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none "
    "--capture-range=cudaProfilerApi --capture-range-end=repeat --cuda-graph-trace=node -o"
)
_CONFIG = re.compile(r"\s--profiler-config(?:\.\w+)?(?:=|\s+)(?:'[^']*'|\"(?:\\.|[^\"])*\"|\S+)")


class Control:
    """One server's controls. `settings`: preset, the values that it needs, strings that replace its own, `via`, and
    `profiling`, a table of those that differ where the server runs with its profiler.

    Nothing that changes the server runs unless `allowed`; with `dry`, nothing runs at all and all is said. Every
    command is said (secrets redacted) before it runs. Bad settings raise UsageError, failing commands K25Error.
    """

    def __init__(self, settings, *, allowed=False, dry=False, say=print, environment=None):
        name = settings.get("preset") or "process"
        if name not in presets():
            raise UsageError(f"control.preset {name!r} is unknown: there are {', '.join(presets())}")
        known = ("preset", "via", "profiling", *VALUES, *STRINGS)
        unknown = [key for key in (*settings, *settings.get("profiling", {})) if key not in known]
        if unknown:
            raise UsageError(f"[control] has no key {unknown[0]!r}: there are {', '.join(known)}")
        preset = presets()[name]
        self.settings, self.via, self.environment, self.pid = settings, settings.get("via", ""), environment, None
        self.allowed, self.dry, self.say = allowed, dry, say
        self.strings = {key: settings.get(key, preset.get(key, "")) for key in STRINGS}
        log = settings.get("log", "")
        self.values = {"cwd": ".", "pid_file": log and f"{log}.pid"}
        self.values = {key: settings.get(key) or self.values.get(key, "") for key in VALUES}
        used = {key for text in self.strings.values() for key in re.findall(r"\{([a-z_]+)\}", text)}
        if lacking := [key for key in VALUES if key in used and not self.values[key]]:
            raise UsageError(f"control.{lacking[0]} is not set: preset {name} ({preset['about']}) needs it")

    @classmethod
    def of_url(cls, url, log="", **more):
        """The control of the process that listens at the port of `url` on this machine; it is restarted as it was
        started, with its environment. Raises K25Error, with the right preset, where something else keeps it."""
        port = process.port_of(url)
        found = process.find(port)
        if not found:
            raise K25Error(
                f"no process of this machine that may be looked into listens at port {port}: say in [control] how the "
                "server is run (preset process, systemd or docker; via for another host)"
            )
        for key, preset in (("container", "docker"), ("unit", "systemd")):
            if found[key]:
                raise K25Error(
                    f"the server at port {port} is kept by {preset} ({found[key]}): "
                    f'set control.preset = "{preset}" and control.{key} = "{found[key]}"'
                )
        log = found["log"] or log
        if not log:
            raise K25Error("the server's output goes to no file: set control.log to a file for the restarted one's")
        folder = mkdtemp(prefix="k25-control-")
        pid_file = Path(folder) / "pid"
        pid_file.write_text(f"{found['pid']} {start_time(found['pid'])}\n", encoding="ascii")
        values = {"command": shlex.join(found["argv"]), "log": str(log), "cwd": found["cwd"], "pid_file": str(pid_file)}
        control = cls(values, environment=process.environment(found["pid"]), **more)
        weakref.finalize(control, shutil.rmtree, folder, ignore_errors=True)
        return control

    def command(self, action, mark=""):
        """The whole command of an action, as given to `sh -c`."""
        return self._through(self._filled(action, mark))

    def _filled(self, action, mark=""):
        values = {**self.values, "mark": mark}
        quoted = {name: value if name == "command" else shlex.quote(str(value)) for name, value in values.items()}
        return re.sub(r"\{([a-z_]+)\}", lambda match: quoted.get(match[1], match[0]), self.strings[action])

    def _through(self, command):
        return f"{self.via} {shlex.quote(command)}" if self.via else command

    def profiled(self, traces, profiler="torch"):
        """The control of the server with `profiler` (torch or nsys), writing to the folder `traces` (as the server sees
        it). Raises K25Error if that can't be: the flag is looked up in the help of the installed version, nsys where
        the server runs, so that no restart is wasted on a wrong one.
        """
        if self.settings.get("profiling"):
            return self._with(**self.settings["profiling"])
        config = profiler_config(traces) if profiler == "torch" else {"profiler": "cuda"}
        flag = f"--profiler-config {shlex.quote(json.dumps(config))}"
        if "{command}" not in self.strings["start"]:
            under = f"under `{NSYS} {traces}/k25` and " if profiler == "nsys" else ""
            raise UsageError(f"set control.profiling: what differs where the server is started {under}with {flag}?")
        normal = self.values["command"]
        if profiler == "torch" and any("torch" in found for found in _CONFIG.findall(normal)):
            return self
        command = f"{_CONFIG.sub('', normal)} {flag}"
        self._look_up_flag(shlex.split(normal), traces)
        if profiler == "nsys":
            reports = f"{traces}/k25-{datetime.now(UTC):%Y%m%dT%H%M%S}"  # nsys overwrites none
            command = f"{NSYS} {shlex.quote(reports)} {command}"
            self._look_for_nsys(command)
        return self._with(command=command)

    def _with(self, **settings):
        more = {"allowed": self.allowed, "dry": self.dry, "say": self.say, "environment": self.environment}
        return Control({**self.settings, **settings}, **more)

    def _look_for_nsys(self, command):
        if not self.dry and self.run(["nsys", "--version"]).returncode:
            raise K25Error(
                "nsys is not where the server runs: install Nsight Systems there, or start it where there is one by "
                f"`{redact(command)}`, capture with `k25 run --url URL --only 01,05 --set capture.profiler=nsys`, and "
                "read what comes back with `k25 breakdown FILE.sqlite`"
            )

    def _look_up_flag(self, words, traces):
        ends = [n for n, word in enumerate(words) if word == "serve" or word.endswith("api_server")]
        if not ends:
            raise UsageError("control.command is no `vllm serve ...`: set control.profiling")
        ask = [*words[: ends[0] + 1], "--help=all"]
        if self.dry:
            self.say(f"would look --profiler-config up: {redact(shlex.join(ask))}")
            return
        told = self.run(ask, timeout_s=300)
        if "--profiler-config" in told.stdout:
            return
        if told.returncode:
            raise K25Error(f"vLLM's help can't be read ({last_line(told.stderr)}): is control.command right?")
        raise K25Error(
            "this vLLM has no --profiler-config: set control.profiling to a command with the environment variable "
            f"VLLM_TORCH_PROFILER_DIR={traces}"
        )

    def running(self):
        """True while the server's process lives; `pid` is its process then. Raises K25Error if its host can't be
        reached."""
        done = self._sh(self.command("running"), 60)
        if done.returncode == 255 and self.via:  # ssh's own failure
            raise K25Error(f"the server's host can't be reached: {redact(last_line(done.stderr))}")
        told = done.stdout.strip()
        self.pid = int(told) if told.isdigit() and not self.via else None
        return done.returncode == 0

    def python(self):
        """The words before a Python program's arguments where the server's GPUs are, also once it is stopped; '' if
        that can't be told. Ask while the server runs."""
        done = self._sh(self.command("python"), 60)
        words = done.stdout.strip()
        if "python" not in words or (self.via and Path(shlex.split(self.via)[0]).name != "ssh"):
            return ""  # other ways in than ssh take one word, not a program's arguments
        return f"{self.via} {words}".strip()

    def run(self, words, timeout_s=60.0):
        """Run a command where the server runs (in its container, on its host); a CompletedProcess with text output."""
        return self._sh(self._through(f"{self._filled('exec')} {shlex.join(words)}".strip()), timeout_s)

    def stop(self):
        """Stop the server and wait until its process has gone."""
        if not self.dry and not self.running():
            return
        self._change(self.command("stop"))
        deadline = time.monotonic() + STOP_LIMIT_S
        while not self.dry and self.running():
            if time.monotonic() > deadline:
                raise K25Error(f"the server was told to stop, and still runs after {STOP_LIMIT_S:.0f} s")
            time.sleep(0.2)

    def start(self):
        """Start the server; returns its log from here on, which has `read()` and `close()`; None in a dry run."""
        command = self.command("start")
        if self.dry:
            return self._change(command)
        self._check_allowed(command)
        if self.running():
            raise K25Error("the server runs already: stop it first")
        log_from_here = self._log_from_here()
        self._change(command)
        return LogCommand(log_from_here)

    def follow(self):
        """The server's log from here on, as `start` returns it, of a server that something else starts."""
        return LogCommand(self._log_from_here())

    def _log_from_here(self):
        return self.command("logs", mark=self._sh(self.command("mark"), 60).stdout.strip() or "0")

    def bring_up(self, url, tries=2, **waiting):
        """Start the server and wait until it is ready (`waiting`: arguments of wait_until_ready); returns the model's
        id, '' in a dry run. A start that fails is told, and tried again."""
        if not self.dry and self.running():
            raise K25Error("the server runs already: stop it first")
        waiting = {"alive": self._lives, "probe": self._signs, "say": self.say, **waiting}
        for left in reversed(range(tries)):
            log = None
            try:
                if not self.dry:
                    _wait_until_silent(url)
                log = self.start()
                return wait_until_ready(url, log=log, **waiting) if log else ""
            except K25Error as error:
                if not left or not self.allowed:
                    raise
                self.say(f"{error}; trying again")
                self.stop()
            finally:
                if log:
                    log.close()
        return ""

    def _lives(self):
        try:
            return self.running()
        except K25Error:
            return None  # the way to its host is broken: that says nothing of the server

    def _signs(self):
        return {} if self.via else process.activity(self.pid)

    def _change(self, command):
        self._check_allowed(command)
        self.say(f"{'would run' if self.dry else 'running'}: {redact(command)}")
        if self.dry:
            return
        done = self._sh(command, CHANGE_LIMIT_S)
        if done.returncode:
            raise K25Error(f"failed (exit status {done.returncode}): {redact(last_line(done.stderr or done.stdout))}")

    def _check_allowed(self, command):
        if not self.allowed and not self.dry:
            raise K25Error(f"the server is not restarted without --allow-restart; it would run: {redact(command)}")

    def _sh(self, command, timeout_s):
        with TemporaryFile() as out, TemporaryFile() as err:  # not pipes: a server left behind would hold them open
            try:
                done = subprocess.run(
                    ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s,
                    env=self.environment, process_group=0,  # a Ctrl-C of the terminal is not for what it runs
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise K25Error(f"no end after {timeout_s:.0f} s: {redact(command)}") from None
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                setattr(done, name, file.read().decode("utf-8", errors="replace"))
        return done


def _wait_until_silent(url):
    """What the server has left behind (workers, a launcher's child) must not be taken for the one that is started."""
    client, deadline = Client(url), time.monotonic() + SILENT_LIMIT_S
    with suppress(ServerDown):
        while client.health():
            if time.monotonic() > deadline:
                raise K25Error(f"a server still answers at {client.shown_url}, and it is not the one of [control]")
            time.sleep(0.5)


@cache
def presets():
    """The presets: name -> strings and `about`."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
