"""Text from a server, a trace or a file, made harmless for Markdown, for HTML and for plotly's labels."""

import math
import re

import bleach
from bs4 import BeautifulSoup

MOST = 1000  # characters of one name or value; the table in the run has it whole

# Terminal commands with a text of their own (window titles, links), then every control character but tab and newline,
# and those that hide or turn text; the escape character stays where a colour code follows: the page shows those.
_TERMINAL = re.compile(
    r"\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b(?!\[)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]",
    re.S,
)
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]?")
_MARKDOWN = re.compile(r"([\\`*\[\]|~$#!])|(?<![^\W_])(_)|(_)(?![^\W_])")
_ADDRESS = re.compile(r"\b(?:(?:https?|ftp)://|www\.)[^\s<>]*[^\s<>.,;:!?)'\"]", re.I)
_BEFORE_ADDRESS = re.compile(r"\b(https?|ftp)://|\b(www)\.", re.I)
_NOT_IN_CODE = re.compile(r"[`|\\$]")  # what ends a code span, a cell, or makes it something else
_PLOTLY_TAG = re.compile(r"</?(?:b|i|br|sub|sup|extra)\s*/?>", re.I)
_TAGS = frozenset(
    re.findall(
        r"\w+",
        "a abbr b blockquote br caption code col colgroup dd details div dl dt em h1 h2 h3 h4 h5 h6 hr i img kbd li ol"
        " p pre s small span strong sub summary sup table tbody td tfoot th thead tr u ul",
    )
)
_ATTRIBUTES = {"*": ["class", "title", "colspan", "rowspan", "scope"], "a": ["href"], "img": ["src", "alt", "width"]}


def terminal(text):
    """Terminal output without commands and control characters; colour codes (CSI) stay."""
    return _TERMINAL.sub("", str(text))


def lines(text):
    """Plain text of some lines: no colour codes, no control characters."""
    return _COLOURS.sub("", terminal(text))


def plain(text):
    """One line of plain text: no colour codes, no control characters, no line breaks, of at most MOST characters."""
    return cut(" ".join(lines(text).split()))


def cut(text, most=MOST):
    """The text, and of a longer one its first characters and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def markdown(text):
    """Markdown that shows `text` as it is, in a paragraph, a heading or a list; addresses as code, not as links."""
    line = _inline(plain(text))
    line = re.sub(r"^([-+=])", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)


def markdown_cell(text):
    """Markdown that shows `text` as it is in a cell of a table: as code where it would need escapes and may be."""
    line = plain(text)
    made = _inline(line)
    return made if made == line or _NOT_IN_CODE.search(line) else f"`{line}`"


def _inline(line):
    """A line with everything escaped that Markdown or HTML would take for markup, but for addresses, which are code."""
    if _NOT_IN_CODE.search(line):
        return _BEFORE_ADDRESS.sub(lambda m: f"{m[1]}&#58;//" if m[1] else f"{m[2]}&#46;", _escaped(line))
    made, end = "", 0
    for address in _ADDRESS.finditer(line):
        made += f"{_escaped(line[end : address.start()])}`{address[0]}`"
        end = address.end()
    return made + _escaped(line[end:])


def _escaped(text):
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda m: "\\" + m[0], text)


def html(text):
    """HTML of a notebook's output with only harmless tags left: no script, style, form or address beyond the page."""
    soup = BeautifulSoup(text, "html.parser")
    for element in soup(["script", "style", "template", "noscript", "iframe", "object", "svg", "math", "title"]):
        element.decompose()
    for image in soup("img"):
        if not image.get("src", "").startswith("data:image/"):
            image.decompose()
    return bleach.clean(
        str(soup),
        tags=_TAGS,
        attributes=_attribute,
        protocols=["https", "http", "data"],
        strip=True,
        strip_comments=True,
    )


def _attribute(tag, name, value):
    """Images only from the page itself, links only as https or http."""
    if name not in _ATTRIBUTES["*"] + _ATTRIBUTES.get(tag, []):
        return False
    return name != "href" or value.startswith(("http://", "https://", "#"))


def figure(value):
    """A plotly figure's JSON with its texts shown as they are; only <b>, <i>, <br>, <sub>, <sup>, <extra> stay tags.

    plotly drops what it takes for a tag, so `gemm<int, 4>` would lose its type; numbers that JSON lacks become null.
    """
    if isinstance(value, dict):
        return {key: part if key == "bdata" else figure(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [figure(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        value = cut(lines(value), 300)
    if isinstance(value, str) and "<" in value:
        kept = _PLOTLY_TAG.findall(value)
        parts = [part.replace("<", "&lt;") for part in _PLOTLY_TAG.split(value)]
        return "".join(part + tag for part, tag in zip(parts, [*kept, ""], strict=True))
    return value
