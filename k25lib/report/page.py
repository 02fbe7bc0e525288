"""One offline HTML page of a run: what it found, then its notebooks; plotly.js once, and no request."""

import base64
import gzip
import hashlib
import json
import sys
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from pygments.formatters import HtmlFormatter

from k25lib.errors import K25Error
from k25lib.file import write_text
from k25lib.report import escape, first_page, notebook, tables
from k25lib.report.overview import overview

MOST_BYTES = 4_000_000
_TEMPLATES = Path(__file__).with_name("templates")


def write_page(run, notebooks, target, facts=None):
    """Write the page of `run` to the file `target`; returns its size in bytes.

    notebooks: paths of executed ones; some may have failed. A phase without a notebook gets a section that says why.
    facts: the run's overview, if the caller has it.
    """
    facts = facts or overview(run)
    facts = facts | {"phases": [{**phase, "id": notebook.anchor(phase["name"])} for phase in facts["phases"]]}
    sections = _sections(facts["phases"], notebooks)
    first = {"id": "summary", "figures": first_page.figures(run, facts["summary"])}
    figures = {
        notebook.place(section["id"], n, plot)["id"]: escape.figure(plot)
        for section in (first, *sections)
        for n, plot in enumerate(section["figures"], 1)
    }
    text = (
        environment()
        .get_template("page.html.j2")
        .render(
            facts=facts,
            sections=sections,
            plots=[notebook.place("summary", n, plot) for n, plot in enumerate(first["figures"], 1)],
            findings=tables.of_findings(facts["summary"]),
            plotly=_plotly() if figures else "",
            figures=packed(json.dumps(figures, separators=(",", ":"), allow_nan=False)),
            code_style=Markup(HtmlFormatter(style="default").get_style_defs(".highlight")),
            nonce=hashlib.sha256(json.dumps([sections, facts], default=str).encode()).hexdigest()[:32],
        )
    )
    size = write_text(target, text)
    if size > MOST_BYTES:
        print(f"{target} has {size / 1e6:.1f} MB, more than the {MOST_BYTES / 1e6:.0f} MB meant", file=sys.stderr)
    return size


def environment():
    """The jinja2 environment of the page's templates: all text is escaped and free of control characters."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: escape.lines(value) if type(value) is str else value,
    )
    made.filters |= {
        "cell": tables.cell,
        "interval": tables.interval,
        "plain": escape.plain,
        "duration": tables.duration,
    }
    made.globals["source"] = lambda name: Markup((_TEMPLATES / name).read_text(encoding="utf-8"))
    return made


@cache
def _plotly():
    return packed(get_plotlyjs())


def packed(text):
    """Text as base64 of gzip, the same bytes for the same text."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _sections(phases, notebooks):
    paths = {notebook.phase_of(path): Path(path) for path in notebooks if Path(path).is_file()}
    states = {phase["name"]: phase for phase in phases}
    made = []
    for name in sorted({*paths, *states}):
        section = {"id": notebook.anchor(name), "name": name, "html": "", "headings": [], "figures": [], "trouble": ""}
        if name in paths:
            try:
                section |= notebook.section(paths[name])
            except K25Error as error:
                section["trouble"] = str(error)
        section["html"] = Markup(section["html"])
        section["headings"] = [{**h, "html": Markup(h["html"])} for h in section["headings"] if h["level"] <= 2]
        made.append({**section, "phase": states.get(name), "file": paths[name].name if name in paths else ""})
    return made
