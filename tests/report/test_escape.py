"""Hostile text shows as it is, everywhere that the report shows text."""

import json

import mistune
import pytest
from bs4 import BeautifulSoup
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k25lib.report import escape

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "a|b `code` \\| *bold* _under_ __x__ [link](javascript:alert(1)) ![i](http://x/y.png) ~~no~~ $a$",
    "\"quoted\" & 'single' &lt;b&gt; &amp;",
    "# heading", "- item", "1. item", "> quote", "+ plus", "=", "---", "| a | b |",
    "http://evil.example/x www.evil.example",
    "void gemm<int, 4>(float*, __half const*) [clone .1]",
]  # fmt: skip
render = mistune.create_markdown(escape=False, plugins=["table", "strikethrough", "url", "math", "footnotes"])


def words(html):
    return BeautifulSoup(html, "html.parser").get_text().split()


@settings(deadline=None)
@given(st.text())
@example("\\")
@example("a`b")
@example("&#60;")
@example("http://x")
@example("[^1]")
def test_markdown_shows_any_text_as_it_is(text):
    assert words(render(f"word {escape.markdown(text)} word")) == ["word", *escape.plain(text).split(), "word"]


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_of_hostile_text_has_no_markup(text):
    for made in (
        render(escape.markdown(text)),
        render(f"| a | b |\n| --- | --- |\n| {escape.markdown(text)} | last |"),
    ):
        tags = {tag.name for tag in BeautifulSoup(made, "html.parser")()}
        assert tags <= {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert words(made) == ["a", "b", *text.split(), "last"]


@settings(deadline=None)
@given(st.text(alphabet="ab\x1b[]0;1mKP\x07\\\n\r\x00\u202e"))
def test_plain_is_one_line_without_control_characters(text):
    made = escape.plain(text)
    assert made.isprintable()
    assert escape.plain(made) == made


def test_terminal_keeps_colours_and_drops_commands():
    assert escape.terminal("\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1b[31mred\x1b[0m\x00") == (
        "link \x1b[31mred\x1b[0m"
    )
    assert escape.plain("\x1b[31mred\x1b[0m\ttab\nline") == "red tab line"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("<p onclick='x()' style='color:red'>1</p>", "<p>1</p>"),
        ("<script>alert(1)</script>a", "a"),
        ("<style>td{}</style>a", "a"),
        ("<img src='http://x/y.png'>", ""),
        ("<img src='data:image/png;base64,AA' onerror='x()'>", '<img src="data:image/png;base64,AA">'),
        ("<a href='javascript:x()'>a</a>", "<a>a</a>"),
        ("<svg><script>alert(1)</script></svg><form action='http://x'><input></form>", ""),
        ("<iframe src='http://x'></iframe>b", "b"),
    ],
)  # fmt: skip
def test_html_keeps_harmless_tags_only(given, kept):
    assert escape.html(given) == kept


def test_figure_texts_show_as_they_are():
    made = escape.figure(
        {
            "y": ["gemm<int, 4>", "<a href='http://x'>a</a>", "<b>bold</b>"],
            "x": [1.0, float("nan"), float("inf")],
            "hovertemplate": "%{x}<br><i>ms</i><extra></extra>",
        }
    )
    assert made["y"] == ["gemm&lt;int, 4>", "&lt;a href='http://x'>a&lt;/a>", "<b>bold</b>"]
    assert made["hovertemplate"] == "%{x}<br><i>ms</i><extra></extra>"
    assert json.loads(json.dumps(made, allow_nan=False))["x"] == [1.0, None, None]
