"""The list of all runs, from the reports that lie beside it."""

import shutil

from bs4 import BeautifulSoup

from k25lib.report.document import write_document
from k25lib.report.index import write_index
from k25lib.report.page import write_page


def listed(root, runs):
    write_index(root, runs)
    soup = BeautifulSoup((root / "index.html").read_text(encoding="utf-8"), "html.parser")
    return soup, [row for body in soup("tbody") for row in body("tr")]


def test_no_run_yet(tmp_path):
    soup, rows = listed(tmp_path / "reports", [])
    assert not rows
    assert "There is no report here yet." in soup.get_text()


def test_runs_newest_first_with_links_that_exist(make_run, tmp_path):
    root, runs = tmp_path / "reports", [make_run(environment={"model": f"model <{n}>"}) for n in range(2)]
    for n, run in enumerate(runs):
        run.update(created=f"2026-01-0{n + 1}T00:00:00+00:00")
        write_document(run, root / run.path.name / "bench #1.md")
        write_page(run, [], root / run.path.name / "index.html")
    _, rows = listed(root, runs)
    assert [row("td")[2].get_text().split(" not")[0] for row in rows] == [
        "model <1>not known yet",
        "model <0>not known yet",
    ]
    links = [a["href"] for row in rows for a in row("a")]
    assert f"{runs[1].path.name}/bench%20%231.md" in links
    assert len(links) == 6


def test_a_report_whose_run_is_gone_stays_listed_and_a_damaged_entry_does_not_stop_it(make_run, tmp_path):
    root, run = tmp_path / "reports", make_run()
    write_document(run, root / run.path.name / "bench.md")
    shutil.rmtree(run.path)
    for n, text in enumerate(
        ("[", "[1]", "{}", '{"created": 1, "headline": "x", "states": {}}', '{"created": 1}', "\xff")
    ):
        (root / f"damaged{n}").mkdir()
        (root / f"damaged{n}" / "summary.json").write_text(text, encoding="latin-1")
    _, rows = listed(root, [])
    assert len(rows) == 1
