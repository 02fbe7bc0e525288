"""The team's list of runs: reports/index.html, from what lies beside it; works from a plain file share."""

import json
from pathlib import Path

from k25lib.file import write_text
from k25lib.findings.compare import readable
from k25lib.report.overview import overview
from k25lib.report.page import environment

ENTRY = "summary.json"


def write_index(reports_root, runs):
    """Write `<reports_root>/index.html`: `runs`, and all whose report lies there already; newest first.

    Each report's folder keeps its own entry (`write_entry`), so that the list stays whole where the runs are not.
    """
    root = Path(reports_root)
    for run in runs:
        if not (root / run.path.name / ENTRY).is_file() and readable([run]):  # a damaged neighbour has no line
            write_entry(overview(run), root / run.path.name)
    entries = [made for path in root.glob(f"*/{ENTRY}") if (made := _read(path))]
    entries.sort(key=lambda made: (made["created"], made["run"]), reverse=True)
    write_text(root / "index.html", environment().get_template("index.html.j2").render(entries=entries))


def write_entry(facts, folder):
    """Write a run's line of the list, from its overview, into its report's folder."""
    found = facts["summary"]
    made = {
        "schema": "k25.report/1",
        **{key: facts[key] for key in ("run", "title", "created", "date", "model", "hardware", "engine", "previous")},
        "headline": next(iter(found.get("headlines") or []), None),
        "verdict": found.get("verdict") or "",
        "meaning": found.get("meaning") or "",
        "states": {phase["name"]: phase.get("state", "") for phase in facts["phases"]},
    }
    write_text(folder / ENTRY, json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def _read(path):
    """A stored entry with what lies beside it; None for a file that is none."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
        made["created"], made["run"] = str(made["created"]), path.parent.name
        made["headline"], made["states"] = (dict(made[key] or {}) for key in ("headline", "states"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    made["files"] = [p.name for pattern in ("index.html", "*.md") for p in sorted(path.parent.glob(pattern))]
    return made
