"""What the document and the page say of a run first: what it is, how far it came, what it found, what changed."""

import json

import pandas as pd

from k25lib.errors import K25Error
from k25lib.findings import compare
from k25lib.findings.summary import summarise
from k25lib.report import tables
from k25lib.report.escape import plain
from k25lib.run import Run

_UNFINISHED = {"pending": "has not run yet", "running": "is running", "failed": "failed", "skipped": "was skipped"}


class Sound(Run):
    """A run whose damaged tables are as if they were not there; the overview tells of them."""

    def table(self, table):
        try:
            return super().table(table)
        except K25Error:
            return pd.DataFrame()


def overview(run):
    """The run's facts as a dict for the templates; complete for a run that has nothing but a manifest."""
    manifest = run.manifest
    found = _summary(run)
    before = previous(run, found.get("previous"))
    environment = manifest.get("environment") or {}
    server = manifest.get("server") or {}
    return {
        "run": run.path.name,
        "name": plain(manifest.get("name") or run.path.name),
        "title": plain(manifest.get("title") or manifest.get("name") or run.path.name),
        "created": str(manifest.get("created") or ""),
        "date": str(manifest.get("created") or "").replace("T", " ")[:16],
        "model": plain(environment.get("model") or server.get("model") or "not known yet"),
        "hardware": plain(hardware(environment) or "not known yet"),
        "engine": plain(engine(environment, server) or "not known yet"),
        "command": plain(" ".join(map(str, manifest.get("command") or []))),
        "git": plain(_git(manifest.get("git") or {})),
        "previous": before.path.name if before else "",
        "environment": differences(_facts(manifest), _facts(before.manifest) if before else {}),
        "settings": {
            name: value
            for name, value in (
                rows(manifest.get("settings") or {}) | rows(manifest.get("method") or {}, "method")
            ).items()
            if value not in ("", "–")
        },
        "phases": [
            {"name": name, **phase, "question": plain(phase.get("question") or "").strip("*_# ")}
            for name, phase in _phases(manifest)
        ],
        "summary": found,
        "missing": [*_unfinished(manifest), *_damaged(run), *found.get("missing", [])],
    }


def previous(run, named=""):
    """The run that `run` is compared with: the one `named` in its findings, else the newest earlier one of its name."""
    older = compare.earlier(run, compare.readable(Run.all(run.path.parent)))
    return next((other for other in older if other.path.name == named), older[0] if older else None)


def rows(value, prefix=""):
    """Nested facts as {dotted name: text}. A list of dicts, such as one of GPUs, is a name for each of their keys, with
    equal values counted (`2 × 700`)."""
    if isinstance(value, dict):
        found = {}
        for key, part in value.items():
            secret = str(key).lower().endswith(("api_key", "password", "secret")) and part
            found |= rows("(not shown)" if secret else part, f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        keys = dict.fromkeys(key for part in value for key in part)
        return {f"{prefix}.{key}": counted([part.get(key) for part in value], key == "name") for key in keys}
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e6
    return {prefix: str(value) if whole else tables.cell(value)}  # a port or a length is no quantity: 43315, not 43,315


def listed(facts, title="what"):
    """Facts (nested ones too) as a notebook shows them: a table of name and value, `title` over the names."""
    return tables.shown([{title: name, "value": value} for name, value in rows(facts).items()])


def hardware(environment):
    """The GPUs in words (`2 × NVIDIA H200`), else the CPU."""
    gpus = environment.get("gpus") or []
    names = [gpu.get("name", "GPU") if isinstance(gpu, dict) else gpu for gpu in gpus]
    return counted(names) or environment.get("cpu") or ""


def engine(environment, server):
    """The engine in words: name, version, and parallelism where it is known."""
    version = environment.get("vllm_version") or ""
    tp = server.get("tp") or ""
    return ", ".join(filter(None, (version and f"vLLM {version}", tp and f"tensor parallel {tp}")))


def differences(now, before):
    """Facts as rows {"name", "value", "before"}; `before` is None where nothing changed or there was no run before."""
    found = [{"name": key, "value": value, "before": None} for key, value in now.items()]
    if before:
        for row in found:
            old = before.get(row["name"], "–")
            if old != row["value"] and not compare.is_passing(row["name"]):
                row["before"] = old
        gone = [key for key in before if key not in now and not compare.is_passing(key)]
        found += [{"name": key, "value": "–", "before": before[key]} for key in gone]
    return found


def _facts(manifest):
    return {
        **rows(manifest.get("environment") or {}),
        **rows(manifest.get("server") or {}, "server"),
        **({"git": _git(manifest["git"])} if manifest.get("git") else {}),
    }


def _git(git):
    return f"{str(git.get('commit', ''))[:12]}{' with changes' if git.get('dirty') else ''}"


def counted(values, always=True):
    """Values in words, equal ones counted: `8 × NVIDIA H200`. Without `always`, a value that all share stands without
    its count."""
    texts = [tables.cell(value) for value in values]
    if len(set(texts)) == 1 and not always:
        return texts[0]
    return ", ".join(f"{n} × {text}" if (n := texts.count(text)) > 1 else text for text in dict.fromkeys(texts))


def _phases(manifest):
    """(name, what is known of it) of every phase, in order."""
    phases = (manifest.get("phases") or {}).items()
    return [(name, phase if isinstance(phase, dict) else {}) for name, phase in sorted(phases)]


def _unfinished(manifest):
    """What did not happen, a sentence each: the server as it was found, and phases that have not ended well."""
    error = manifest.get("server_error")
    said = [f"the server could not be left as it was found: {error}"] if error else []
    for name, phase in _phases(manifest):
        if phase.get("state") in _UNFINISHED:
            said.append(f"{name} {_UNFINISHED[phase['state']]}" + (f": {phase['why']}" if phase.get("why") else ""))
    return said


def _damaged(run):
    found = []
    for name in run.tables():
        try:
            Run(run.path).table(name)
        except K25Error as error:
            found.append(plain(error))
    return found


def _summary(run):
    """The findings of the run; a half run whose findings cannot be computed says so instead."""
    try:
        return json.loads(json.dumps(summarise(run), default=str))
    except Exception as error:  # the document of a half run must be written whatever the tables hold
        return {"missing": [f"the findings could not be computed: {type(error).__name__}: {plain(error)}"]}
