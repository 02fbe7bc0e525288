"""The campaign document in Markdown: the plan with its states, and the results that exist; complete by itself."""

from pathlib import Path

from k25lib.errors import K25Error
from k25lib.report import index, notebook, tables
from k25lib.report.escape import markdown
from k25lib.report.file import write_text
from k25lib.report.overview import overview


def write_document(run, target):
    """Write the document of `run` as far as it has come; right for a run that has nothing but a manifest.

    The run's entry for the list of all runs is written beside it.
    """
    target = Path(target)
    facts = overview(run)
    shown = tables.of_run(run)
    blocks = [
        *_head(facts),
        *_findings(facts["summary"]),
        *_missing(facts["missing"]),
        *_plan(facts["phases"]),
        *(_heading("Results") + [block for t in shown for block in _result(t, run)] if shown else []),
        *_figures(facts["phases"], target.parent),
        *_environment(facts),
    ]
    write_text(target, "\n\n".join(blocks) + "\n")
    index.write_entry(facts, target.parent)


def _head(facts):
    rows = [(name.capitalize(), facts[name]) for name in ("model", "hardware", "engine")]
    rows = [("Date", f"{facts['date']} UTC"), *rows, ("Run", facts["run"])]
    rows += [(name.capitalize(), facts[name]) for name in ("command", "git") if facts[name]]
    rows += (
        [("Configuration", ", ".join(f"{k} = {v}" for k, v in facts["settings"].items()))] if facts["settings"] else []
    )
    return [f"# {markdown(facts['title'])}", _table(["", ""], rows)]


def _findings(found):
    sentences = [markdown(sentence) for sentence in found.get("sentences") or []]
    blocks = _heading("Summary") + (sentences or ["There are no findings yet."])
    headlines = [
        (
            row.get("name"),
            f"{tables.cell(row.get('value'))} {row.get('unit') or ''}",
            tables.interval(row) or "–",
            row.get("source"),
        )
        for row in found.get("headlines") or []
    ]
    if headlines:
        blocks.append(_table(["quantity", "value", "interval", "from"], headlines))
    for made in tables.of_findings(found):
        blocks += [f"### {made['title']}", _data(made)]
    return blocks


def _missing(missing):
    return [*_heading("Missing"), "\n".join(f"- {markdown(text)}" for text in missing)] if missing else []


def _plan(phases):
    if not phases:
        return [*_heading("Plan"), "No phase is planned for this run."]
    rows = [
        (p["name"], p.get("question"), p.get("state"), p.get("why"), tables.duration(p.get("seconds"))) for p in phases
    ]
    return [*_heading("Plan"), _table(["phase", "question", "state", "why", "time"], rows)]


def _result(made, run):
    note = f"All {len(made['rows']) + made['left_out']:,} rows are in" if made["left_out"] else "From"
    source = f"{note} `{made['name']}.parquet` of the run ({markdown(made['phase'])})."
    return [f"### {markdown(made['title'])}", _data(made), source]


def _figures(phases, folder):
    """Links to the figures of the page beside the document, by the notebooks that lie there."""
    links = []
    for phase in phases:
        for path in (folder / f"{phase['name']}.ipynb", folder / f"{phase['name']}.failed.ipynb"):
            try:
                links += [f"- [{markdown(title)}](index.html#{anchor})" for anchor, title in notebook.figures(path)]
            except K25Error:  # not there, or not whole: the plan says its state
                continue
    return [*_heading("Figures"), "\n".join(links)] if links else []


def _environment(facts):
    if not facts["environment"]:
        return [*_heading("Environment"), "Not known yet."]
    before = facts["previous"]
    head = ["what", "value", *([f"before ({before})"] if before else [])]
    rows = [
        (row["name"], row["value"], *([row["before"] if row["before"] is not None else "the same"] if before else []))
        for row in facts["environment"]
    ]
    return [*_heading("Environment"), _table(head, rows)]


def _heading(text):
    return [f"## {text}"]


def _data(made):
    return _table(made["head"], made["rows"], made["numeric"])


def _table(head, rows, numeric=()):
    """A pipe table; every cell escaped."""
    rule = ["---:" if number else "---" for number in numeric] or ["---"] * len(head)
    lines = [[markdown(name) for name in head], rule, *([markdown(tables.cell(v)) for v in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
