"""Starts, stops, follows and enters a server, whatever runs it: command strings from settings, presets as data."""

import json
import re
import shlex
import shutil
import subprocess
import time
import tomllib
import weakref
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from urllib.parse import urlsplit

from k25lib.errors import K25Error, UsageError
from k25lib.redaction import redact
from k25lib.server import process
from k25lib.server.supervisor import start_time
from k25lib.server.watch import LogCommand, wait_until_ready

STRINGS = ("start", "start_profiling", "stop", "running", "mark", "logs", "exec")
VALUES = ("command", "log", "unit", "container", "cwd", "pid_file")
STOP_LIMIT_S = 180.0
CHANGE_LIMIT_S = 7200.0  # some starts return only when the server is ready


class Control:
    """One server's controls. `settings`: preset, the values that it needs, strings that replace its own, `via`.

    Nothing that changes the server runs unless `allowed`; with `dry`, nothing runs at all and all is said. Every
    command is said (secrets redacted) before it runs. Bad settings raise UsageError, failing commands K25Error.
    """

    def __init__(self, settings, *, allowed=False, dry=False, say=print, environment=None):
        settings = dict(settings)
        name = settings.pop("preset", "") or "process"
        if name not in presets():
            raise UsageError(f"control.preset {name!r} is unknown: there are {', '.join(presets())}")
        unknown = [key for key in settings if key not in (*STRINGS, *VALUES, "via")]
        if unknown:
            known = ", ".join(("preset", "via", *VALUES, *STRINGS))
            raise UsageError(f"[control] has no key {unknown[0]!r}: there are {known}")
        preset = presets()[name]
        self.preset, self.via = name, settings.get("via", "")
        self.allowed, self.dry, self.say, self.environment = allowed, dry, say, environment
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
        parts = urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
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
        control = cls({"preset": "process", **values}, environment=process.environment(found["pid"]), **more)
        weakref.finalize(control, shutil.rmtree, folder, ignore_errors=True)
        return control

    def command(self, action, mark="", flags=()):
        """The whole command of an action, as given to `sh -c`."""
        values = {name: value if name == "command" else shlex.quote(str(value)) for name, value in self.values.items()}
        if flags:
            values["command"] += f" {shlex.join(flags)}"
        return self._through(_fill(self.strings[action], {**values, "mark": shlex.quote(mark)}))

    def plan(self, start=None):
        """What a restart runs, in order, secrets redacted; `start`: a command of `profiled` instead of the normal."""
        return [redact(self.command("stop")), redact(start or self.command("start"))]

    def profiled(self, traces):
        """The command that starts the server with its profiler, writing to the folder `traces` (as the server sees it).

        The flag is looked up in the help of the installed version, so that no restart is wasted on a wrong one.
        """
        config = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }
        if self.strings["start_profiling"]:
            return self.command("start_profiling")
        flags = ("--profiler-config", json.dumps(config))
        if "{command}" not in self.strings["start"]:
            raise UsageError(f"set control.start_profiling: how is the server started with {shlex.join(flags)}?")
        words = shlex.split(self.values["command"])
        if any(word.startswith("--profiler-config") for word in words):
            return self.command("start")
        ends = [n for n, word in enumerate(words) if word == "serve" or word.endswith("api_server")]
        if not ends:
            raise UsageError("control.command is no `vllm serve ...`: set control.start_profiling")
        ask = [*words[: ends[0] + 1], "--help=all"]
        if self.dry:
            self.say(f"would look --profiler-config up: {shlex.join(ask)}")
            return self.command("start", flags=flags)
        told = self.run(ask, timeout_s=300)
        if "--profiler-config" in told.stdout:
            return self.command("start", flags=flags)
        if told.returncode:
            raise K25Error(f"vLLM's help can't be read ({_last(told.stderr)}): is control.command right?")
        raise K25Error(
            "this vLLM has no --profiler-config: set control.start_profiling to a start with the environment variable "
            f"VLLM_TORCH_PROFILER_DIR={traces}"
        )

    def running(self):
        """True while the server's process lives. Raises K25Error if its host can't be reached."""
        done = self._sh(self.command("running"), 60)
        if done.returncode == 255 and self.via:  # ssh's own failure
            raise K25Error(f"the server's host can't be reached: {redact(_last(done.stderr))}")
        return done.returncode == 0

    def exec_prefix(self):
        """The words before a command that must run where the server runs (such as `docker exec NAME`)."""
        return [*shlex.split(self.via), *shlex.split(self._inner_prefix())]

    def run(self, words, timeout_s=60.0):
        """Run a command where the server runs; a CompletedProcess with text output."""
        return self._sh(self._through(f"{self._inner_prefix()} {shlex.join(words)}".strip()), timeout_s)

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

    def start(self, command=None):
        """Start the server, by `command` (of `profiled`) or as it normally is; returns its log from here on, which has
        `read()` and `close()`; None in a dry run."""
        command = command or self.command("start")
        if self.dry:
            return self._change(command)
        self._check_allowed(command)
        if self.running():
            raise K25Error("the server runs already: stop it first")
        mark = self._sh(self.command("mark"), 60).stdout.strip()
        self._change(command)
        return LogCommand(self.command("logs", mark=mark or "0"))

    def bring_up(self, url, command=None, tries=2, **waiting):
        """Start the server and wait until it is ready (`waiting`: arguments of wait_until_ready); returns the model's
        id, '' in a dry run. A start that fails is told, and tried again."""
        if not self.dry and self.running():
            raise K25Error("the server runs already: stop it first")
        for left in reversed(range(tries)):
            log = None
            try:
                log = self.start(command)
                return wait_until_ready(url, log=log, alive=self._lives, **waiting) if log else ""
            except K25Error as error:
                if not left or not self.allowed:
                    raise
                self.say(f"{error}; trying again")
                self.stop()
            finally:
                if log:
                    log.close()
        return ""

    @contextmanager
    def profiling(self, url, traces, **waiting):
        """Inside the block the server runs with its profiler; afterwards, also after a failure, as it normally does."""
        command = self.profiled(traces)
        self.stop()
        try:
            self.bring_up(url, command, **waiting)
            yield
        finally:
            self.stop()
            self.bring_up(url, **waiting)

    def _lives(self):
        try:
            return self.running()
        except K25Error:
            return None  # the way to its host is broken: that says nothing of the server

    def _change(self, command):
        self._check_allowed(command)
        self.say(f"{'would run' if self.dry else 'running'}: {redact(command)}")
        if self.dry:
            return
        done = self._sh(command, CHANGE_LIMIT_S)
        if done.returncode:
            raise K25Error(f"failed (exit status {done.returncode}): {redact(_last(done.stderr or done.stdout))}")

    def _check_allowed(self, command):
        if not self.allowed and not self.dry:
            raise K25Error(f"the server is not restarted without --allow-restart; it would run: {redact(command)}")

    def _inner_prefix(self):
        return _fill(self.strings["exec"], {name: shlex.quote(str(value)) for name, value in self.values.items()})

    def _through(self, command):
        return f"{self.via} {shlex.quote(command)}" if self.via else command

    def _sh(self, command, timeout_s):
        with TemporaryFile() as out, TemporaryFile() as err:  # not pipes: a server left behind would hold them open
            try:
                done = subprocess.run(
                    ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s,
                    env=self.environment,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise K25Error(f"no end after {timeout_s:.0f} s: {redact(command)}") from None
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                setattr(done, name, file.read().decode("utf-8", errors="replace"))
        return done


@cache
def presets():
    """The presets: name -> strings and `about`."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def _fill(text, values):
    return re.sub(r"\{([a-z_]+)\}", lambda match: str(values.get(match[1], match[0])), text)


def _last(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
