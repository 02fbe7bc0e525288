"""The page: every notebook or the reason why not, the figures once, nothing that could ask or act."""

import base64
import gzip
import json
import re

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest
from bs4 import BeautifulSoup
from small_notebooks import RAW_FIGURE, execute, shown, written

from k25lib.report import notebook
from k25lib.report.page import write_page

STATES = {
    "01_service_check": ("ok", ""),
    "02_macro": ("failed", "cell 2: ZeroDivisionError"),
    "03_micro_gemm": ("skipped", "the GPUs are held"),
}


def page(run, notebooks, folder):
    size = write_page(run, notebooks, folder / "index.html")
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert size == len(text.encode())
    return BeautifulSoup(text, "html.parser")


def unpacked(soup, name):
    return gzip.decompress(base64.b64decode(soup.find(id=name).string)).decode()


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The first as if executed, with what pandas and plotly give a notebook; the second by papermill, which marks a
    failure in cells of its own."""
    folder = tmp_path_factory.mktemp("executed")
    table = pd.DataFrame({"kernel": ["gemm<int>"], "ms": [1.5]})
    figure = go.Figure(go.Bar(x=["a", "b"], y=[1.0, 2.0]), layout={"title": {"text": "Step by part"}, "height": 300})
    outputs = [
        nbformat.v4.new_output("stream", text="up\n"),
        shown(figure=notebook.json_of(figure)),
        shown(html=table._repr_html_(), plain=repr(table)),
    ]
    return [
        written(folder / "01_service_check.ipynb", *outputs, text="# Is it up?\n\nArea $a^2$."),
        execute(folder / "02_macro.failed.ipynb", "# How fast?", RAW_FIGURE, "1/0", fails=True),
    ]


def test_executed_notebooks_with_figures_and_a_failed_and_a_missing_one(make_run, tmp_path, executed):
    soup = page(make_run(STATES), executed, tmp_path)
    assert [plot["id"] for plot in soup(class_="plot")] == ["01_service_check-figure-1", "02_macro-figure-1"]
    figures = json.loads(unpacked(soup, "figures"))
    assert figures["02_macro-figure-1"]["layout"]["title"] == "Raw"
    assert "plotly.js v" in unpacked(soup, "plotly")
    assert "gemm<int>" in soup.find(id="01_service_check").get_text()
    assert "ZeroDivisionError: division by zero" in soup.find(id="02_macro").get_text()
    assert "An Exception was encountered" not in soup.get_text()
    assert "the GPUs are held" in soup.find(id="03_micro_gemm").get_text()
    assert soup.find("math") is not None
    assert all("open" not in details.attrs for details in soup(class_="code"))
    assert (tmp_path / "index.html").stat().st_size < 4_000_000


def test_the_contents_name_every_section(make_run, tmp_path, executed):
    soup = page(make_run(STATES), executed, tmp_path)
    targets = [a["href"][1:] for a in soup.nav("a")]
    assert targets[0] == "summary"
    assert {"01_service_check", "02_macro", "03_micro_gemm"} <= set(targets)
    ids = [element["id"] for element in soup(id=True)]
    assert set(targets) <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_same_run_gives_the_same_page(make_run, tmp_path, executed):
    run = make_run(STATES)
    assert str(page(run, executed, tmp_path)) == str(page(run, executed, tmp_path))


def test_a_run_with_nothing_has_no_figures_and_no_plotly(bare_run, tmp_path):
    soup = page(bare_run, [], tmp_path)
    assert not soup(class_="plot")
    assert not soup("script")
    assert "The number is missing" in soup.get_text()


def test_a_damaged_notebook_is_said(make_run, tmp_path):
    (tmp_path / "01_service_check.ipynb").write_text('{"cells": [')
    soup = page(make_run(), [tmp_path / "01_service_check.ipynb", tmp_path / "02_macro.ipynb"], tmp_path)
    assert "is no notebook that can be read" in soup.find(id="01_service_check").get_text()


def test_a_picker_is_left_out(make_run, tmp_path):
    data = {notebook.WIDGET: {"model_id": "1"}, "text/plain": "Dropdown(options=())"}
    picker = nbformat.v4.new_output("display_data", data)
    soup = page(make_run(), [written(tmp_path / "01_service_check.ipynb", picker, shown(plain="kept"))], tmp_path)
    text = soup.find(id="01_service_check").get_text()
    assert ("kept" in text, "Dropdown" in text) == (True, False)


def test_long_output_is_cut_and_the_loss_counted(make_run, tmp_path):
    path = written(tmp_path / "01_service_check.ipynb", shown(plain="x" * 50_000 + "end"))
    text = page(make_run(), [path], tmp_path).find(id="01_service_check").get_text()
    assert "30,003 characters are left out here" in text
    assert "xend" in text


def test_long_progress_is_folded_with_its_last_line_in_view(make_run, tmp_path):
    text = "".join(f"{n} of 99 <done>\n" for n in range(100))
    stream = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": text})
    soup = page(make_run(), [written(tmp_path / "01_service_check.ipynb", stream)], tmp_path)
    folded = soup.find(class_="output_stdout").details
    assert folded.summary.get_text() == "100 lines of output, the last: 99 of 99 <done>"
    assert folded.pre.get_text().count("<done>") == 100


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`|\x1b]0;t\x07\x1b[31mred\x1b[0m"


def test_hostile_text_is_shown_and_does_nothing(make_run, tmp_path):
    figure = {"data": [{"type": "bar", "x": [1], "y": [HOSTILE]}], "layout": {"title": {"text": HOSTILE}}}
    error = {"output_type": "error", "ename": HOSTILE, "evalue": HOSTILE, "traceback": [HOSTILE]}
    stream = {"output_type": "stream", "name": "stdout", "text": HOSTILE}
    outputs = [shown(plain=HOSTILE), shown(html=HOSTILE), shown(markdown=HOSTILE), shown(figure=figure)]
    math = "$\\text{<script>alert(1)</script>}$ $\\href{javascript:alert(1)}{x}$"
    sources = f"# {HOSTILE}\n\n{math} ![i](http://x/y.png) [a](javascript:alert(1))"
    outputs += [nbformat.from_dict(error), nbformat.from_dict(stream)]
    path = written(tmp_path / "01_service_check.ipynb", *outputs, text=sources)
    run = make_run(
        {"01_service_check": ("failed", HOSTILE)}, environment={"model": HOSTILE, "flags": {HOSTILE: HOSTILE}}
    )
    run.update(title=HOSTILE)
    soup = page(run, [path], tmp_path)
    assert [script.get("nonce", script.get("type")) for script in soup("script")][:2] == ["text/plain", "text/plain"]
    assert len(soup("script")) == 3
    assert not soup("img")
    assert not [tag for tag in soup(True) for name in tag.attrs if name.startswith("on")]
    assert not re.search(r"javascript:", " ".join(a["href"] for a in soup("a", href=True)))
    assert "alert(1)" in soup.h1.get_text()
    assert "\x1b" not in str(soup)


def test_nothing_in_the_page_names_another_place(make_run, tmp_path, executed):
    soup = page(make_run(STATES), executed, tmp_path)
    policy = soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert policy.startswith("default-src 'none'")
    assert not [tag for tag in soup(src=True) if not tag["src"].startswith("data:")]
    assert [tag["href"] for tag in soup("link")] == ["data:,"]
