"""The page in a real browser with the network off: all figures drawn, nothing asked for, nothing hostile done."""

import sys
from pathlib import Path

import pandas as pd
import pytest
from small_notebooks import shown, written

sys.path.insert(0, str(Path(__file__).parents[1]))
import browser

from k25lib.report import notebook
from k25lib.report.document import write_document
from k25lib.report.figures import summary
from k25lib.report.index import write_index
from k25lib.report.page import write_page
from k25lib.run import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not browser.CHROMIUM.exists(), reason=f"no Chromium: {browser.INSTALL}"),
]

HOSTILE = (
    "</script><script>alert(1)</script><img src=http://x.invalid/y onerror=alert(1)>\"'|`&lt;\x1b[31m"
    "\u202e\u200f\n=cmd|'/c calc'!A0 [a](javascript:alert(1))"
)
LONG = HOSTILE + "n" * 10_000
STATES = {
    "01_service_check": ("ok", ""),
    "02_macro": ("failed", LONG),
    "04_nccl": ("skipped", "the GPUs are held"),
}
CLOSURE = [
    ("bandwidth bound", 3.365, "total"),
    ("communication: waiting for other ranks", 9.5, "part"),
    ("kernels that overlap", -3.5, "part"),
    ("measured TPOT", 9.365, "total"),
]
WHATIF = [("expert parallelism", -0.24, 3.54), ("another AllReduce", 1.1, 3.5), ("tensor parallel 16", -2.5, -1.2)]
CATEGORIES = [
    "allreduce_nccl",
    "moe_gemm",
    "gemm",
    "attention",
    "norm",
    "rope",
    "silu_mul",
    "routing",
    "kv_cache",
    "other",
]


def bars(name):
    figure = {"data": [{"type": "bar", "orientation": "h", "x": [1, 2], "y": [name, "gemm<int, 4>"]}]}
    return {**figure, "layout": {"title": {"text": f"Kernels of {name}"}, "height": 300, "yaxis": {"automargin": True}}}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a run with a failed and a skipped phase, hostile names everywhere, and every figure of page 1."""
    found = {
        "sentences": [HOSTILE, "It is so.", "Next."],
        "headlines": [{"name": HOSTILE, "value": 12.1, "low": 11.9, "high": 12.3, "unit": HOSTILE, "source": HOSTILE}],
        "closure": [dict(zip(("part", "ms", "kind"), row, strict=True)) for row in CLOSURE],
        "whatif": [dict(zip(("change", "low_ms", "high_ms"), row, strict=True)) for row in WHATIF],
        "changes": [{"metric": LONG, "before": 1.0, "after": 2.0, "verdict": "worse"}],
        "steps_by_run": [
            {"step": c, "category": k, "ms": 9.0 - n, "wall_ms": 40.0}
            for c in ("c1", LONG)
            for n, k in enumerate(CATEGORIES)
        ],
        "missing": [LONG],
    }
    tmp_path = tmp_path_factory.mktemp("report")
    phases = {name: {"state": state, "why": why, "question": HOSTILE} for name, (state, why) in STATES.items()}
    environment = {"model": HOSTILE, "gpus": [{"name": HOSTILE}], "flags": {LONG: LONG}}
    run = Run.create("bench", tmp_path / "runs", title=HOSTILE, phases=phases, environment=environment)
    folder = tmp_path / "reports" / run.path.name
    outputs = [shown(plain=LONG), shown(html=LONG), shown(markdown=LONG), shown(figure=bars(HOSTILE))]
    paths = [
        written(folder / "01_service_check.ipynb", *outputs, text=f"# {LONG}"),
        written(folder / "02_macro.failed.ipynb", shown(figure=bars("kernel<float>"))),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k25lib.report.overview.summarise", lambda run: found)
        write_document(run, folder / "bench.md")
        write_page(run, paths, folder / "index.html")
        write_index(folder.parent, [run])
    return folder


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_every_figure_is_drawn_and_nothing_is_asked_for(report, width):
    seen = browser.look(report / "index.html", width)
    assert (seen.figures, seen.drawn) == (5, 5)
    assert (seen.requests, seen.errors) == ([], [])
    assert seen.overflow_px <= 0
    assert [text for text in seen.overlaps if text.startswith("summary-")] == []


def test_figures_are_drawn_only_when_they_come_near(report):
    with browser.opened(report / "index.html") as (page, seen):
        page.locator(".plot").first.scroll_into_view_if_needed()
        page.wait_for_selector(".plot .main-svg")
        drawn = page.locator(".js-plotly-plot").count()
        assert 0 < drawn < page.locator(".plot").count()
        assert seen.errors == []


def test_hostile_names_are_shown_in_labels_as_they_are(report):
    with browser.opened(report / "index.html") as (page, seen):
        box = page.locator('[id="01_service_check-figure-1"]')
        box.scroll_into_view_if_needed()
        page.wait_for_function(browser.DRAWN, arg=box.element_handle())
        labels = box.locator(".ytick text").all_text_contents()
        assert labels[1] == "gemm<int, 4>"
        assert labels[0].startswith("</script><script>alert(1)</script><img src=http://x.invalid/y onerror=alert(1)>")
        assert page.locator(".plot a, .plot image, .plot img").count() == 0
        assert page.locator("main img").count() == 0
        assert (seen.requests, seen.errors) == ([], [])


def test_a_script_of_another_hand_could_not_run_or_ask(report, tmp_path):
    text = (report / "index.html").read_text(encoding="utf-8")
    bad = "<script>document.title = 'run'</script><img src='http://x.invalid/y.png'></main>"
    (tmp_path / "bad.html").write_text(text.replace("</main>", bad), encoding="utf-8")
    with browser.opened(tmp_path / "bad.html") as (page, seen):
        page.wait_for_timeout(300)
        assert page.title() != "run"
        assert len([error for error in seen.errors if "Content Security Policy" in error]) == 2


def test_print_has_every_figure_on_paper(report, tmp_path):
    with browser.opened(report / "index.html") as (page, seen):
        page.locator(".plot").first.scroll_into_view_if_needed()
        page.wait_for_selector(".plot .main-svg")
        page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
        assert page.locator(".js-plotly-plot").count() == 5
        assert page.locator("main details[open]:not(.code)").count() == 2  # the numbers of two figures; not all facts
        assert seen.errors == []
    assert (tmp_path / "page.pdf").stat().st_size > 20_000


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_the_list_of_runs(report, width):
    with browser.opened(report.parent / "index.html", width) as (page, seen):
        page.get_by_role("link", name="bench.md").wait_for()
        page.locator("tbody a").first.click()
        page.wait_for_selector("#summary")
        assert (seen.requests, seen.errors) == ([], [])


def test_a_legend_of_many_lines_clears_the_title_on_a_phone(make_run, tmp_path):
    frame = pd.DataFrame(
        {"step": "c1", "category": [f"category number {n}" for n in range(12)], "ms": 1.0, "wall_ms": 9.0}
    )
    path = written(tmp_path / "01_service_check.ipynb", shown(figure=notebook.json_of(summary.step_by_category(frame))))
    write_page(make_run(), [path], tmp_path / "index.html")
    assert browser.look(tmp_path / "index.html", 360).overlaps == []


def test_a_browser_that_cannot_unpack_says_so(report):
    with browser.opened(report / "index.html") as (page, _):
        page.add_init_script("delete window.DecompressionStream")
        page.reload()
        page.get_by_text("this browser cannot draw it").first.wait_for()
        assert page.locator(".main-svg").count() == 0
