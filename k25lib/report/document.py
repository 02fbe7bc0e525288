"""The campaign document in Markdown: the plan with its states, and the results that exist; complete by itself."""

from pathlib import Path

from k25lib.errors import K25Error
from k25lib.file import write_text
from k25lib.report import first_page, index, notebook, tables
from k25lib.report.escape import markdown, markdown_cell
from k25lib.report.overview import overview

# The server's flags that say nothing of how it computes, or are said above.
_NO_CONFIGURATION = ("host", "port", "model", "model_tag", "served_model_name", "profiler_config")


def write_document(run, target, facts=None):
    """Write the document of `run`, as far as the run has come, to the file `target`; a manifest is enough.

    The run's entry in the list of all runs is written beside it. facts: the run's overview, if the caller has it.
    """
    target = Path(target)
    facts = facts or overview(run)
    shown = tables.of_run(run)
    blocks = [
        *_head(facts),
        *_findings(facts["summary"]),
        *_missing(facts["missing"]),
        *_plan(facts["phases"]),
        *(_heading("Results") + [block for t in shown for block in _result(t, run)] if shown else []),
        *_figures(run, facts, target.parent),
        *_environment(facts),
        *_settings(facts["settings"]),
    ]
    write_text(target, "\n\n".join(blocks) + "\n")
    index.write_entry(facts, target.parent)


def _head(facts):
    rows = [("Date", f"{facts['date']} UTC")]
    rows += [(name.capitalize(), facts[name]) for name in ("model", "hardware", "engine", "run")]
    rows += [(name.capitalize(), facts[name]) for name in ("command", "git") if facts[name]]
    values = {row["name"]: row["value"] for row in facts["environment"] if row["name"].startswith("flags.")}
    flags = {name.removeprefix("flags."): value for name, value in values.items()}
    if flags:
        told = (f"{name} = {value}" for name, value in flags.items() if name not in _NO_CONFIGURATION)
        rows.append(("Configuration", "; ".join(told)))
    return [f"# {markdown(facts['title'])}", _table(["", ""], rows)]


def _findings(found):
    sentences = [markdown(sentence) for sentence in found.get("sentences") or []]
    blocks = _heading("Summary") + (sentences or ["There are no findings yet."])
    blocks += [markdown(found["basis"])] if found.get("basis") else []
    headlines = [
        (
            row.get("name"),
            f"{tables.cell(row['value'])} {row.get('unit') or ''}",
            tables.interval(row),
            row.get("source"),
        )
        for row in found.get("headlines") or []
    ]
    if headlines:
        blocks.append(_table(["quantity", "value", "spread", "from"], headlines))
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
    note = f"All {made['whole']:,} rows are in" if made["left_out"] else "From"
    source = f"{note} `{made['name']}.parquet` of the run ({markdown(made['phase'])})."
    return [f"### {markdown(made['title'])}", _data(made), source]


def _figures(run, facts, folder):
    """Links to the page's figures: its first ones, and those of the notebooks that lie beside the document."""
    first = enumerate(first_page.figures(run, facts["summary"]), 1)
    links = [_link(notebook.place("summary", n, plot)) for n, plot in first]
    for phase in facts["phases"]:
        for path in (folder / f"{phase['name']}.ipynb", folder / f"{phase['name']}.failed.ipynb"):
            try:
                links += [_link(place) for place in notebook.figures(path)]
            except K25Error:  # not there, or not whole: the plan says its state
                continue
    words = "They are drawn in the page beside this document, which is made when the campaign ends."
    return [*_heading("Figures"), words, "\n".join(links)] if links else []


def _link(place):
    return f"- [{markdown(place['title'])}](index.html#{place['id']})"


def _settings(settings):
    return [*_heading("Settings"), _table(["setting", "value"], list(settings.items()))] if settings else []


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
    lines = [
        [markdown_cell(name) for name in head],
        rule,
        *([markdown_cell(tables.cell(v)) for v in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
