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
    "javascript:alert(1)", "=cmd|'/c calc'!A0", "@SUM(1+1)", "`x` http://x/$y$`", "a http://h:1/p?q=[1]&r=*_x_* b",
    "``` fence", "<a title=`x", "`", "http://", "x\\", "$`x`$ a_b_ http://y",
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
    shown = ["word", *escape.plain(text).split(), "word"]
    assert words(render(f"word {escape.markdown(text)} word")) == shown
    cells = f"| a | b |\n| --- | --- |\n| word {escape.markdown_cell(text)} | word |"
    assert words(render(cells)) == ["a", "b", *shown]


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_of_hostile_text_has_no_markup(text):
    for made in (
        render(escape.markdown(text)),
        render(f"| a | b |\n| --- | --- |\n| {escape.markdown_cell(text)} | {escape.markdown_cell(text)} |"),
    ):
        tags = {tag.name for tag in BeautifulSoup(made, "html.parser")()}
        assert tags <= {"p", "table", "thead", "tbody", "tr", "th", "td", "code"}
    assert words(made) == ["a", "b", *text.split(), *text.split()]


@pytest.mark.parametrize(
    ("text", "prose", "cell"),
    [
        (
            "at http://127.0.0.1:8011/v1, now",
            "at `http://127.0.0.1:8011/v1`, now",
            "`at http://127.0.0.1:8011/v1, now`",
        ),
        ("/tmp/model_2", "/tmp/model_2", "/tmp/model_2"),
        ("-0.7", "\\-0.7", "-0.7"),
        ("gemm<int>(__half*)", "gemm&lt;int&gt;(\\_\\_half\\*)", "`gemm<int>(__half*)`"),
        ("a|b http://x", "a\\|b http&#58;//x", "a\\|b http&#58;//x"),
    ],
)
def test_ordinary_addresses_and_names_can_be_read_in_an_editor(text, prose, cell):
    assert (escape.markdown(text), escape.markdown_cell(text)) == (prose, cell)


def test_what_hides_or_turns_text_goes_and_a_name_of_10_kB_is_cut():
    assert escape.plain("ab\u202edc\u200b\u200f\u2066e\ufeff\U000e0041") == "abdce"
    assert escape.plain("n" * 10_000) == "n" * 1000 + "… (9,000 more characters)"
    made = escape.figure({"y": ["n" * 10_000], "x": {"bdata": "A" * 10_000}})
    assert (len(made["y"][0]), len(made["x"]["bdata"])) == (325, 10_000)


@settings(deadline=None)
@given(st.text(alphabet="ab\x1b[]0;1mKP\x07\\\n\r\x00\u202e"))
def test_plain_is_one_line_without_control_characters(text):
    made = escape.plain(text)
    assert made.isprintable()
    assert len(made) > escape.MOST or escape.plain(made) == made


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
