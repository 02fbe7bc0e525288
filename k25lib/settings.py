"""campaign.toml and overrides -> one checked Settings. Unknown keys and wrong types are errors that list what is."""

import difflib
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from k25lib.errors import UsageError

# Table of campaign.toml -> the notebook whose parameters it sets, in the order of the campaign.
PROFILERS = ("torch", "nsys")
NOTEBOOKS = {
    "check": "01_service_check",
    "macro": "02_macro",
    "gemm": "03_micro_gemm",
    "collectives": "04_nccl",
    "capture": "05_profiler_capture",
    "breakdown": "06_breakdown",
}


@dataclass(frozen=True)
class Campaign:
    """The campaign as a whole."""

    name: str = "k25b6000bench1"
    title: str = ""
    keep_captures: bool = True
    cell_timeout_s: int = 3600


@dataclass(frozen=True)
class Server:
    """The server under test; empty values are asked of the server itself."""

    url: str = ""
    model: str = ""
    tp: int = 0
    python: str = ""
    config: str = ""
    traces: str = ""
    log: str = ""
    busy_wait_s: int = 300


@dataclass(frozen=True)
class Settings:
    """Everything that a campaign is told: `notebooks` maps a table's name to its notebook's parameters, `control` holds
    what server.control.Control takes (and checks)."""

    campaign: Campaign = field(default_factory=Campaign)
    server: Server = field(default_factory=Server)
    control: dict = field(default_factory=dict)
    notebooks: dict = field(default_factory=dict)
    embedded: dict = field(default_factory=dict)

    @property
    def profiler(self):
        """The profiler that captures are taken with: torch or nsys."""
        return self.notebooks.get("capture", {}).get("profiler", "torch")

    def parameters(self, table, embedded=False):
        """The parameters set for one notebook; with the embedded server its own values win."""
        own = self.embedded.get(table, {}) if embedded else {}
        return {**self.notebooks.get(table, {}), **own}


def load_settings(path, overrides=()):
    """Read campaign.toml at `path` and apply overrides `table.key=value` (value in TOML, or a bare string)."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no campaign file {path}: give one with --campaign") from None
    except OSError as error:
        raise UsageError(f"cannot read the campaign file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    for text in overrides:
        table, key, value = _override(text)
        _table(tree.setdefault(table, {}), table)[key] = value
        embedded = _table(tree.get("embedded", {}), "embedded").get(table)
        if isinstance(embedded, dict):  # what the user says by hand wins over the embedded values too
            embedded.pop(key, None)
    return from_tree(tree)


def from_tree(tree):
    """Settings from a parsed tree (campaign.toml's, or the one that a manifest keeps)."""
    tables = {"campaign": Campaign, "server": Server}
    _known(tree, [*tables, "control", *NOTEBOOKS, "embedded"], "table")
    embedded = tree.get("embedded", {})
    _known(embedded, list(NOTEBOOKS), "table [embedded.…]")
    made = {name: _record(kind, tree.get(name, {}), name) for name, kind in tables.items()}
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", made["campaign"].name):
        raise UsageError("campaign.name names files: letters, digits, dots, dashes and underscores only")
    if made["campaign"].cell_timeout_s < 1 or min(made["server"].tp, made["server"].busy_wait_s) < 0:
        raise UsageError("campaign.cell_timeout_s is at least 1; server.tp and server.busy_wait_s are not negative")
    notebooks = {name: _table(tree.get(name, {}), name) for name in NOTEBOOKS}
    control = _table(tree.get("control", {}), "control")
    embedded = {n: _table(v, f"embedded.{n}") for n, v in embedded.items()}
    if any("run" in table for table in (*notebooks.values(), *embedded.values())):
        raise UsageError("a notebook's parameter run is not to be set: a campaign gives all of them its own run")
    settings = Settings(**made, control=control, notebooks=notebooks, embedded=embedded)
    if settings.profiler not in PROFILERS:
        raise UsageError(f"capture.profiler is {' or '.join(PROFILERS)}, not {settings.profiler!r}")
    return settings


def to_tree(settings):
    """The settings as plain tables: what the manifest keeps, and `from_tree` reads."""
    tree = {name: {f.name: getattr(part, f.name) for f in fields(part)} for name, part in _records(settings)}
    return {**tree, "control": settings.control, **settings.notebooks, "embedded": settings.embedded}


def with_server(settings, **values):
    """The settings with other values for the server."""
    return replace(settings, server=replace(settings.server, **values))


def check_parameters(declared, given, table):
    """Check `given` against a notebook's declared parameters (name -> type name, as papermill infers it)."""
    _known(given, list(declared), "parameter", where=table)
    for name, value in given.items():
        kind = declared[name].split("[")[0].strip()
        allowed = {"float": (int, float), "int": int, "bool": bool, "str": str, "list": list, "dict": dict}.get(kind)
        if allowed is None:
            continue
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind != "bool"):
            raise UsageError(f"{table}.{name} must be {kind}, not {value!r}")


def _records(settings):
    return (("campaign", settings.campaign), ("server", settings.server))


def _override(text):
    name, equals, raw = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"--set takes table.key=value (such as macro.output_tokens=32), not {text!r}")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a bare word is a string: a shell eats the quotes
    return table, key, value


def _known(given, known, what, where=""):
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            place = f" in {where}" if where else ""
            raise UsageError(f"unknown {what} {name!r}{place}{hint} There are: {', '.join(known) or 'none'}")


def _table(value, name):
    if not isinstance(value, dict):
        raise UsageError(f"[{name}] must be a table of campaign.toml, not {value!r}")
    return value


def _record(kind, given, name):
    _known(_table(given, name), [f.name for f in fields(kind)], "key", where=f"[{name}]")
    check_parameters({f.name: f.type.__name__ for f in fields(kind)}, given, name)
    return kind(**given)
