"""A run: one directory with a manifest, tables, captures and logs. Nothing in it is overwritten by another run."""

import fcntl
import json
import os
import re
import subprocess
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from k25lib.errors import K25Error, UsageError
from k25lib.file import whole, write_text
from k25lib.redaction import redact_tree

PROJECT = Path(__file__).resolve().parents[1]
SCHEMA = "k25.run/1"
SECTIONS = ("settings", "environment", "server", "git", "method", "phases", "macro", "captures")
NESTED = (("captures", None), ("environment", "flags"), ("macro", "settings"), ("macro", "plateau"))


def runs_root():
    """Where the runs live: $K25_RUNS, or data/runs of the project."""
    return Path(os.environ.get("K25_RUNS") or PROJECT / "data" / "runs")


def reports_root():
    """Where the reports live: $K25_REPORTS, or reports of the project."""
    return Path(os.environ.get("K25_REPORTS") or PROJECT / "reports")


class Run:
    """One run's directory. `manifest` is read anew at each access: a notebook and the campaign both write it."""

    def __init__(self, path):
        self.path = Path(path).resolve()
        if not (self.path / "manifest.json").is_file():
            raise UsageError(f"{path} is no run: it has no manifest.json; runs are in {runs_root()}")

    @classmethod
    def create(cls, name, root=None, **manifest):
        """Make a new directory `<date>T<time>-<name>` below `root` and return its Run; never touches another."""
        root = Path(root or runs_root())
        root.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        stem = f"{now:%Y-%m-%dT%H%M%S}-{_as_file(name)}"
        for suffix in ["", *(f".{n}" for n in range(2, 1000))]:
            path = root / (stem + suffix)
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        (path / "logs").mkdir()
        first = {
            "schema": SCHEMA,
            "name": name,
            "created": now.isoformat(timespec="seconds"),
            "git": _git(),
            **manifest,
        }
        _write_json(path / "manifest.json", first)
        return cls(path)

    @classmethod
    def all(cls, root=None):
        """Every run below `root`, oldest first."""
        root = Path(root or runs_root())
        return [cls(p.parent) for p in sorted(root.glob("*/manifest.json"))]

    @classmethod
    def find(cls, text, root=None, kind=None):
        """The run that `text` names: a path, a directory name below the root, or `newest` (of this `kind`, if given).

        Raises UsageError where there is none, or it is of another kind.
        """
        root = Path(root or runs_root())
        if text == "newest":
            runs = [run for run in cls.all(root) if run.is_readable() and kind in (None, run.kind)]
            if not runs:
                raise UsageError(f"there is no {kind or 'run'} in {root} yet: `k25 run` makes one")
            return runs[-1]
        for path in (Path(text), root / text):
            if (path / "manifest.json").is_file():
                run = cls(path)
                if kind and run.manifest.get("kind") != kind:
                    raise UsageError(f"{path.name} is no {kind}: it is of the kind {run.kind!r}")
                return run
        known = ", ".join(r.path.name for r in cls.all(root)[-5:]) or "none yet"
        raise UsageError(f"no run {text!r}: the newest runs are {known} (in {root})")

    @classmethod
    def open_or_new(cls, text="", root=None, reading=False):
        """The run for a notebook: `text` names it; empty is the newest run of all for one that only reads
        (`reading`), and the newest interactive run, or a new one, for one that measures."""
        if text:
            return cls.find(text, root)
        runs = [run for run in cls.all(root) if run.is_readable()]
        if not reading:
            runs = [r for r in runs if r.kind == "interactive"]
        return runs[-1] if runs else cls.create("interactive", root, kind="interactive")

    @property
    def manifest(self):
        """The manifest as it is on disk now, a dict of dicts. Raises K25Error where the file is damaged."""
        file = self.path / "manifest.json"
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise K25Error(f"{file} cannot be read ({error}): restore it, or move the run away") from None
        if why := _strange(manifest):
            raise K25Error(f"{file} is no run's manifest ({why}): restore it, or move the run away")
        return manifest

    def is_readable(self):
        """Whether the manifest can be read: a damaged run is no reason to leave the others alone."""
        try:
            return bool(self.manifest)
        except K25Error:
            return False

    @property
    def kind(self):
        """`interactive` for a notebook's run, `campaign` for `k25 run`'s; empty where the manifest is damaged."""
        try:
            return self.manifest.get("kind") or ""
        except K25Error:
            return ""

    @property
    def file_name(self):
        """The run's name, as the name of a file."""
        return _as_file(self.manifest.get("name"))

    @contextmanager
    def changing(self):
        """The manifest as a dict to change; written back whole, with a lock against other writers."""
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            manifest = self.manifest
            yield manifest
            _write_json(self.path / "manifest.json", manifest)

    def update(self, **sections):
        """Set top-level keys of the manifest; a dict is merged into the dict that is there."""
        with self.changing() as manifest:
            for key, value in sections.items():
                old = manifest.get(key)
                manifest[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value

    def save(self, table, rows):
        """Write `<table>.parquet` from a list of dicts or a DataFrame, whole or not at all."""
        frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame.from_records(list(rows))
        with whole(self.path / f"{table}.parquet") as part:
            pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), part, compression="zstd")

    def table(self, table):
        """The table as a DataFrame; empty if this run has none. Raises K25Error where the file is damaged."""
        path = self.path / f"{table}.parquet"
        try:
            return pd.read_parquet(path) if path.is_file() else pd.DataFrame()
        except (OSError, ValueError, pa.ArrowException) as error:
            why = str(error).splitlines()[0]
            raise K25Error(f"{path} cannot be read ({why}): restore it, or remove it and run its phase again") from None

    def tables(self):
        """The names of the tables of this run."""
        return sorted(p.stem for p in self.path.glob("*.parquet"))

    def captures(self):
        """The captures of this run: name -> directory."""
        return {p.name: p for p in sorted((self.path / "captures").glob("*")) if p.is_dir()}

    def log(self, name):
        """The path of a log file of this run."""
        (self.path / "logs").mkdir(exist_ok=True)
        return self.path / "logs" / f"{name}.log"

    @property
    def report_dir(self):
        """Where this run's report goes: `reports/<run>`."""
        return reports_root() / self.path.name


def _as_file(name):
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(name or "")) or "run"


def _strange(manifest):
    """Why a manifest's parts are not what every reader of it takes them for; empty if they are."""
    if not isinstance(manifest, dict):
        return "it holds no JSON object"
    parts = [(name, manifest.get(name)) for name in SECTIONS]
    for section, key in NESTED:
        inside = manifest.get(section) or {}
        if isinstance(inside, dict):
            parts += [(f"{section}.{k}", v) for k, v in inside.items() if key in (None, k)]
    wrong = [name for name, part in parts if part is not None and not isinstance(part, dict)]
    if not wrong:
        lists = {
            "command": manifest.get("command"),
            "environment.gpus": (manifest.get("environment") or {}).get("gpus"),
        }
        wrong = [name for name, value in lists.items() if not isinstance(value or [], list)]
    return f"{wrong[0]} is not what it should be" if wrong else ""


def _write_json(path, value):
    write_text(path, json.dumps(redact_tree(value), indent=1, ensure_ascii=False, default=str) + "\n")


def _git():
    """The project's commit and whether the tree differs from it; empty outside a checkout."""

    def git(*words):
        return subprocess.run(["git", "-C", PROJECT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {}
