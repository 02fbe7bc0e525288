"""What a vLLM server's log says while it starts: the stage it is in, how long it will take, and why it died.

A pure machine: text and times go in (`feed`, `activity`), words come out (`line`, `stuck`, `explain`). It reads logs
of the versions 0.26 to 0.32, of which no two write the same lines; what a version does not write is skipped.
"""

import re
import statistics
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k25lib.server.chosen import flags

STUCK_AFTER_S = 1200.0  # a good load was once silent for ten minutes, at constant GPU memory
STAGES = {
    "start": "starting Python",
    "configure": "reading the configuration",
    "download": "downloading the model",
    "engine": "starting the engine and its workers",
    "weights": "loading weights",
    "memory": "weights loaded, preparing",
    "compile": "compiling",
    "graphs": "capturing CUDA graphs",
    "api": "starting the API",
    "ready": "start-up complete",
}
_ORDER = list(STAGES)
_MARKS = [
    ("configure", r"non-default args: |Resolved architecture"),
    ("download", r"Fetching \d+ files|Downloading (?:shards|weights|\S+\.safetensors)|Time spent downloading weights"),
    ("engine", r"Initializing a V\d LLM engine|world_size=\d+ rank="),
    ("weights", r"Starting to load model|checkpoint shards|Loading \S+ using [^\n]*% Completed"),
    ("memory", r"Model loading took|Loading weights took"),
    ("compile", r"Dynamo bytecode transform|torch_compile_cache|Compiling a graph|torch\.compile took"),
    ("graphs", r"Capturing CUDA graphs?|Graph capturing finished"),
    ("api", r"init engine \(|Starting vLLM (?:API )?server"),
    ("ready", r"Application startup complete"),
]
_BEGIN = re.compile(r"█ +version (?P<version>[\w.+-]+)\s*$|vLLM API server version (?P<old>\S+)", re.M)
_MARK = re.compile("|".join(f"(?P<{stage}>{pattern})" for stage, pattern in _MARKS))
_SHARDS = re.compile(r"% Completed \| (\d+)/(\d+) \[((?:\d+:)+\d+)<")
_BAR = re.compile(r"(?:Capturing CUDA graphs?|Fetching \d+ files)[^|\r\n]*?(\d+)%\|")
_PREFIX = re.compile(
    r"^(?:\([\w-]+ pid=\d+\)\s*)*(?:(?:ERROR|CRITICAL|WARNING|INFO) \d\S* \S+ (?:\[[^\]]*\] ?)?)?(?:\[rank\d+\]: ?)?"
)
_ERROR = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?!s\b).*|[^'\"]*\berror: .*|\[Errno \d+\].*|Killed\b.*|Aborted\b.*"
    r"|[\w.-]*Segmentation fault.*|ERROR: .*)"
)
_FOLLOWS = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|See (?:root cause|stack trace)"
    r"|Engine process failed to start|ChildFailedError|died unexpectedly|cancelled|CancelledError|KeyboardInterrupt"
)


@dataclass(frozen=True)
class Death:
    """Why a server died: its last error as the log has it, and, for known causes, what that means and what to do."""

    error: str
    means: str = ""
    advice: str = ""

    def __str__(self):
        known = f"; {self.means}: {self.advice}" if self.means else ""
        return f"{self.error or 'no error in its log'}{known}"


class Startup:
    """The state of one start. Times (`now`) are any clock's seconds, growing; `earlier` are `durations` of earlier
    starts of the same model, for the estimate."""

    def __init__(self, now, earlier=(), stuck_after_s=STUCK_AFTER_S):
        self.stage, self.version, self.shards, self.percent = "start", "", None, None
        self.began, self.earlier, self.stuck_after_s = now, list(earlier), stuck_after_s
        self.entered = {"start": now}
        self.memory_bytes, self.restarts = None, 0
        self._tail, self._moved, self._shard_since, self._shard_s, self._cpu = "", now, now, None, None

    def feed(self, text, now):
        """Take new text of the log, cut anywhere."""
        if not text:
            return
        self._moved = now
        text = self._tail + text
        for part in re.split(r"[\r\n]", text):
            self._read(part, now)
        self._tail = re.split(r"[\r\n]", text)[-1][-4096:]

    def activity(self, now, cpu_s=None, memory_bytes=None):
        """Take what else shows life: CPU seconds that the server's processes have used, memory that they hold."""
        if cpu_s is not None:
            then, before = self._cpu or (now, None)
            # more than the idle wake-ups of a stuck server's threads: 1 s, and 2 % of a core
            if before is None or abs(cpu_s - before) >= max(1.0, 0.02 * (now - then)):
                self._cpu, self._moved = (now, cpu_s), now
        before = self.memory_bytes
        if memory_bytes is not None and (before is None or abs(memory_bytes - before) >= 1 << 24):
            self.memory_bytes, self._moved = memory_bytes, now

    def stuck(self, now):
        """True if neither log nor memory nor CPU has moved for `stuck_after_s`, before the start was complete."""
        return self.stage != "ready" and now - self._moved >= self.stuck_after_s

    def left_s(self, now):
        """Seconds to the end of the start, as (estimate, basis); (None, "") if nothing tells.

        The rate is that of the shards so far; stages are as long as the median of earlier starts.
        """
        if self.stage == "ready":
            return 0.0, ""
        past = {stage: statistics.median(values) for stage in _ORDER if (values := self._earlier(stage))}
        here = _ORDER.index(self.stage)
        later = sum(past.get(stage, 0.0) for stage in _ORDER[here + 1 :])
        if self.stage == "weights" and self._shard_s is not None and self.shards[0] > 0:
            done, total = self.shards
            quiet = min(now - self._shard_since, self._shard_s)
            left = max(0.0, (total - done) * self._shard_s - quiet)
            return (left + later, "at this rate") if past else (left, "for the weights at this rate")
        if self.stage in past:
            return max(0.0, past[self.stage] - (now - self.entered[self.stage])) + later, "as in earlier starts"
        return None, ""

    def line(self, now):
        """Where the start stands, in one line."""
        words = STAGES[self.stage]
        if self.stage == "weights" and self.shards:
            done, total = self.shards
            words += f": {done} of {total} shards ({100 * done // max(total, 1)} %)"
        elif self.percent is not None and self.stage in ("graphs", "download"):
            words += f": {self.percent} %"
        left, basis = self.left_s(now)
        if left is not None and self.stage != "ready":
            words += f", {span(left)} left {basis}"
        if (self.memory_bytes or 0) >= 50_000_000:
            words += f", {self.memory_bytes / 1e9:.1f} GB held"
        quiet = now - self._moved
        if self.stage != "ready" and quiet >= 120:
            words += f" (quiet for {span(quiet)})"
        return words

    def durations(self, now):
        """Seconds that each stage took so far: what `earlier` of a later start is made of."""
        entered = [(s, self.entered[s]) for s in _ORDER if s in self.entered]
        ends = [t for _, t in entered[1:]] + [now]
        return {stage: max(0.0, end - begin) for (stage, begin), end in zip(entered, ends, strict=True)}

    def _earlier(self, stage):
        return [start[stage] for start in self.earlier if stage in start]

    def _read(self, line, now):
        if begin := _BEGIN.search(line):
            self.version = begin["version"] or begin["old"]
            if self.stage != "start":  # the server was started again
                self.restarts += 1
                self.stage, self.shards, self.percent, self.entered = "start", None, None, {"start": now}
        for mark in _MARK.finditer(line):
            if _ORDER.index(mark.lastgroup) > _ORDER.index(self.stage):
                self.stage, self.percent = mark.lastgroup, None
                self.entered[self.stage] = now
                self._shard_since = now
        for shards in _SHARDS.finditer(line):
            done, total, elapsed = int(shards[1]), int(shards[2]), _seconds(shards[3])
            if (done, total) != self.shards:
                self.shards, self._shard_since = (done, total), now
                taken = elapsed or now - self.entered.get("weights", now)  # the bar's own clock: we may have come late
                self._shard_s = taken / done if done else None
        if bars := _BAR.findall(line):
            self.percent = int(bars[-1])


def last_line(text):
    """The last line of what a program said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def last_error(text):
    """The last error that a log quotes, in one line; '' if there is none."""
    return (_errors(text) or [""])[-1]


def explain(text, back=0):
    """Why the server died that wrote this log, in its last start, or `back` starts before it: a Death."""
    bounds = [0, *(begin.start() for begin in _BEGIN.finditer(text)), len(text)]
    errors = _errors(text[bounds[-2 - back] : bounds[-1 - back]])
    for line in reversed(errors[-5:]):  # an earlier one may have been survived
        for pattern, means, advice in _causes():
            if pattern.search(line):
                return Death(line, means, advice)
    return Death(errors[-1] if errors else "")


def key(text):
    """What makes two starts comparable, from the log: model and tensor parallel size; '' if the log does not tell."""
    told = flags(text)
    return f"{told['model']} tp={told.get('tensor_parallel_size', 1)}" if "model" in told else ""


def span(seconds):
    """A time as people say it: 45 s, 41 min, 1.6 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _errors(text):
    """The errors that a log quotes. One that only says that another process failed first gives way to that one's; how
    our supervisor saw the server end, to any other."""
    lines = [_PREFIX.sub("", line).strip()[:300] for line in re.split(r"[\r\n]+", text)]
    errors = [line for line in lines if _ERROR.match(line)]
    ended = re.findall(r"^k25: the server has ended: (.* \(exit status -\d+\))$", "\n".join(lines), re.M)
    return [line for line in errors if not _FOLLOWS.search(line)] or errors or ended


@cache
def _causes():
    table = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
    return [(re.compile(c["pattern"], re.I), c["means"], c["advice"]) for c in table["cause"]]


def _seconds(clock):
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds
