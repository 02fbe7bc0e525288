"""The Markdown document: whole for any half of a run, and never more than there is."""

import json

import mistune
from bs4 import BeautifulSoup
from small_notebooks import shown, written

from k25lib.report.document import write_document

STATES = {
    "01_service_check": ("ok", ""),
    "02_macro": ("failed", "cell 3: nothing answers"),
    "04_nccl": ("skipped", "the GPUs are held"),
    "05_profiler_capture": ("running", ""),
    "06_breakdown": ("pending", ""),
}


def document(run, folder):
    write_document(run, folder / "bench.md")
    return (folder / "bench.md").read_text(encoding="utf-8")


def test_a_run_with_nothing_but_a_manifest(bare_run, tmp_path):
    text = document(bare_run, tmp_path / "report")
    assert text.startswith("# Kimi-K2.5 on one box\n")
    assert "No phase is planned" in text
    assert "## Results" not in text
    assert "## Figures" not in text


def test_the_plan_has_every_state_with_its_reason(make_run, tmp_path):
    text = document(make_run(STATES), tmp_path / "report")
    assert "| 01_service_check | Question of 01_service_check? | ok |  | 1.2 s |" in text
    assert "| 02_macro | Question of 02_macro? | failed | cell 3: nothing answers |  |" in text
    for line in (
        "- 02_macro failed: cell 3: nothing answers",
        "- 04_nccl was skipped: the GPUs are held",
        "- 05_profiler_capture is running",
        "- 06_breakdown has not run yet",
    ):
        assert line in text


def test_results_are_those_that_exist_with_their_source(make_run, tmp_path):
    run = make_run()
    run.save("levels", [{"concurrency": 1, "output_tok_s": 81.234, "tpot_ms_mean": 12.1}])
    text = document(run, tmp_path / "report")
    assert "| 1 | 81.23 | 12.1 |" in text
    assert "`levels.parquet`" in text
    assert "gemm.parquet" not in text


def test_figures_are_links_into_the_page(make_run, tmp_path):
    figure = {"data": [], "layout": {"title": {"text": "Step<br><sub>by part</sub>"}}}
    written(
        tmp_path / "report" / "01_service_check.ipynb", shown(figure=figure), shown(plain="x"), shown(figure=figure)
    )
    text = document(make_run(STATES), tmp_path / "report")
    assert "- [Step by part](index.html#01_service_check-figure-1)" in text
    assert "(index.html#01_service_check-figure-2)" in text


def test_environment_has_its_differences_from_the_run_before(make_run, tmp_path):
    before = make_run(environment={"driver": "580", "gpus": [{"name": "H200", "memory_used_bytes": 1}] * 2})
    before.update(created="2026-01-01T00:00:00+00:00")
    now = make_run(
        environment={
            "driver": "590",
            "flags": {"port": 8000, "api_key": ["hunter2"]},
            "gpus": [{"name": "H200", "memory_used_bytes": 2}] * 2,
        }
    )
    text = document(now, tmp_path / "report")
    assert "| driver | 590 | 580 |" in text
    assert "| gpus.name | 2 × H200 | the same |" in text
    assert "| flags.port | 8000 |" in text
    assert "| flags.api_key | (not shown) |" in text
    assert "hunter2" not in text
    assert "| gpus.memory_used_bytes | 2 | the same |" in text
    assert "| Hardware | 2 × H200 |" in text


def test_hostile_names_stay_text(make_run, tmp_path):
    name = "<script>alert(1)</script>|`x`\n# [a](javascript:b) \u202e\x1b[31m"
    run = make_run({"02_macro": ("failed", name)}, environment={"model": name, "flags": {name: name}})
    run.update(title=name)
    run.save("kernels", [{"name": name, "ms": 1.0}])
    made = mistune.create_markdown(escape=False, plugins=["table"])(document(run, tmp_path / "report"))
    soup = BeautifulSoup(made, "html.parser")
    assert not soup(["script", "a", "img"])
    assert {len(row("td")) for row in soup("table")[-1]("tr")[1:]} == {2}
    assert soup.h1.get_text() == "<script>alert(1)</script>|`x` # [a](javascript:b)"


def test_findings_that_fail_are_said_not_hidden(make_run, tmp_path, monkeypatch):
    def broken(run):
        raise KeyError("tpot")

    monkeypatch.setattr("k25lib.report.overview.summarise", broken)
    assert "the findings could not be computed: KeyError: 'tpot'" in document(make_run(), tmp_path / "report")


def test_findings_are_shown_with_their_intervals(make_run, tmp_path, monkeypatch):
    found = {
        "sentences": ["TPOT is 12.1 ms.", "AllReduce dominates.", "Next: casts."],
        "headlines": [{"name": "TPOT", "value": 12.1, "low": 11.9, "high": 12.3, "unit": "ms", "source": "levels"}],
        "closure": [{"part": "weights", "ms": 3.365}, {"part": "rest", "ms": 8.7}],
        "changes": [{"metric": "TPOT", "verdict": "worse"}],
        "verdict": "worse",
    }
    monkeypatch.setattr("k25lib.report.overview.summarise", lambda run: found)
    text = document(make_run(), tmp_path / "report")
    assert "| TPOT | 12.1 ms | 11.9 – 12.3 ms | levels |" in text
    assert "| weights | 3.365 |" in text
    entry = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert (entry["headline"]["value"], entry["verdict"]) == (12.1, "worse")
