"""Text from a server, a trace or a file, made harmless for Markdown, for HTML and for plotly's labels."""

import math
import re

import bleach
from bs4 import BeautifulSoup

# Terminal commands with a text of their own (window titles, links), then every control character but tab and newline;
# the escape character stays where a colour code follows it: the page shows those as colours.
_TERMINAL = re.compile(
    r"\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b(?!\[)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]",
    re.S,
)
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]?")
_MARKDOWN = re.compile(r"([\\`*\[\]|~$#!])|(?<![^\W_])(_)|(_)(?![^\W_])")
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
    """One line of plain text: no colour codes, no control characters, no line breaks."""
    return " ".join(lines(text).split())


def markdown(text):
    """One line of Markdown that shows `text` as it is, in a paragraph, a heading or a table's cell."""
    line = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _MARKDOWN.sub(lambda m: "\\" + m[0], line)
    line = re.sub(r"^([-+=])", r"\\\1", line)
    line = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)
    # A bare address would become a link of its own on most readers.
    return re.sub(r"(?i)\b(https?|ftp)://|\b(www)\.", lambda m: f"{m[1]}&#58;//" if m[1] else f"{m[2]}&#46;", line)


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
        return {key: figure(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [figure(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and "<" in value:
        kept = _PLOTLY_TAG.findall(value)
        parts = [part.replace("<", "&lt;") for part in _PLOTLY_TAG.split(value)]
        return "".join(part + tag for part, tag in zip(parts, [*kept, ""], strict=True))
    return value
