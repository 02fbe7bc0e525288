"""An executed notebook as HTML for the page: code folded, figures handed over as JSON, nothing of it trusted."""

import json
import re
from contextlib import suppress
from html import escape as escape_html
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from traitlets.config import Config

from k25lib.errors import K25Error
from k25lib.report import escape

PLOTLY = "application/vnd.plotly.v1+json"
MOST_TEXT = 20_000  # characters of one text output that the page shows
WIDGET = "application/vnd.jupyter.widget-view+json"
_MARKUP = {"text/html", "text/markdown"}
_TEMPLATES = Path(__file__).with_name("templates")


class _Renderer(IPythonRenderer):
    """Markdown without raw HTML, with math as MathML, and with headings that the page's contents can name."""

    def __init__(self, section):
        super().__init__(escape=True, allow_harmful_protocols=False, exclude_anchor_links=True)
        self.section = section

    def heading(self, text, level, **attrs):
        words = re.sub(r"<[^>]+>", "", text)
        place_id = f"{self.section['id']}-{len(self.section['headings']) + 1}"
        self.section["headings"].append({"level": level, "html": words, "id": place_id})
        return f'<h{level + 1} id="{place_id}">{text}</h{level + 1}>\n'

    def image(self, text, url, title=None):
        return super().image(text, url, title) if url.startswith("data:image/") else escape_html(text)

    def block_math(self, body):
        return f"<p>{_mathml(body, 'block')}</p>"

    def inline_math(self, body):
        return _mathml(body, "inline")

    def block_mermaidjs(self, code):
        return f"<pre>{self.escape_html(code)}</pre>"


class _Exporter(HTMLExporter):
    """nbconvert's HTML exporter with our template; its figures go into the section."""

    def __init__(self, section):
        self.section = section
        super().__init__(
            template_name="notebook",
            extra_template_basedirs=[str(_TEMPLATES)],
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        self.register_preprocessor("nbconvert.preprocessors.CoalesceStreamsPreprocessor", enabled=True)
        self.register_filter("harmless", escape.html)
        self.register_filter("figure", self.figure)

    @property
    def default_config(self):
        shown = [PLOTLY, "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain"]
        config = super().default_config.copy()
        config.merge(Config({"NbConvertBase": {"display_data_priority": shown}}))
        return config

    @pass_context
    def markdown2html(self, context, source):
        return MarkdownWithMath(renderer=_Renderer(self.section)).render(source)

    def figure(self, plot):
        """Keep the figure; its place in the page for the template."""
        self.section["figures"].append(plot)
        return place(self.section["id"], len(self.section["figures"]), plot)


def section(path):
    """An executed notebook as {"id", "name", "html", "headings", "figures"}; `figures` are plotly's JSON.

    Raises K25Error for a file that is no notebook.
    """
    name = phase_of(path)
    made = {"id": anchor(name), "name": name, "headings": [], "figures": []}
    made["html"], _ = _Exporter(made).from_notebook_node(_harmless(read(path)))
    return made


def read(path):
    """The notebook as a node; raises K25Error for a file that is none."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError, AttributeError, KeyError, TypeError) as error:
        raise K25Error(f"{path} is no notebook that can be read: {escape.plain(error)[:200]}") from None


def phase_of(path):
    """The phase that a notebook file belongs to: `02_macro.failed.ipynb` -> `02_macro`."""
    return Path(path).name.removesuffix(".ipynb").removesuffix(".failed")


def figures(path):
    """The figures of an executed notebook as they are named in the page: a list of `place`; K25Error as `read`."""
    plots = [
        output.data[PLOTLY]
        for cell in read(path).cells
        for output in cell.get("outputs", [])
        if PLOTLY in output.get("data", {})
    ]
    return [place(anchor(phase_of(path)), n, plot) for n, plot in enumerate(plots, 1)]


def json_of(figure):
    """A plotly Figure as the JSON that a notebook keeps of it."""
    return json.loads(figure.to_json())


def place(section, n, figure):
    """The place in the page of the `n`-th figure of a section: {"id", "title", "height" in px}."""
    height = (figure.get("layout") or {}).get("height")
    return {
        "id": f"{section}-figure-{n}",
        "title": title(figure),
        "height": height if isinstance(height, int | float) else 450,
    }


def title(figure):
    """A figure's title as plain text."""
    text = (figure.get("layout") or {}).get("title") or ""
    text = text.get("text") or "" if isinstance(text, dict) else text
    return escape.plain(re.sub(r"<[^>]*>", " ", str(text))) or "figure"


def anchor(name):
    """A phase's name as the page's anchor."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _harmless(notebook):
    """The notebook without control sequences in its outputs, with long texts cut (a note says how much is missing).

    papermill's own cells about an error go: the page says the reason above the notebook. So do pickers (widgets), which
    do nothing in a page.
    """
    notebook.cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    for cell in notebook.cells:
        cell.source = escape.lines(cell.source)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = _cut(output.text)
            elif output.output_type == "error":
                output.traceback = [_cut(line) for line in output.traceback]
            else:
                output.data |= {kind: escape.lines(output.data[kind]) for kind in _MARKUP & output.data.keys()}
                output.data |= {kind: _cut(output.data[kind]) for kind in {"text/plain"} & output.data.keys()}
    return notebook


def _cut(text):
    text = escape.terminal(text)
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    note = f"… {len(text) - 2 * half:,} characters are left out here; the notebook beside this page has them …"
    return f"{text[:half]}\n{note}\n{text[-half:]}"


def _mathml(tex, display):
    """A formula as MathML; one that the converter cannot read, or that smuggles in other markup, as it was written."""
    with suppress(Exception):  # the converter has no error class of its own
        made = convert(tex, display=display)
        if "<!" not in made and all(map(_is_math, ElementTree.fromstring(made).iter())):
            return made
    return f"<code>{escape_html(tex)}</code>"


def _is_math(element):
    named = element.tag.startswith("{http://www.w3.org/1998/Math/MathML}m")
    return named and not any(
        key.startswith("on") or key in ("href", "src", "style", "class", "id") for key in element.attrib
    )
