"""The report of a run with damaged tables or a strange manifest: the rest of it, and what is missing."""

import shutil

import pytest

from k25lib.campaign.report import write_report
from k25lib.run import PROJECT, Run


@pytest.fixture
def sample(tmp_path, monkeypatch):
    monkeypatch.setenv("K25_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("K25_REPORTS", str(tmp_path / "reports"))
    shutil.copytree(PROJECT / "data/sample/run-h200x2", tmp_path / "runs" / "one")
    return Run(tmp_path / "runs" / "one")


def test_one_damaged_table_costs_that_table(sample):
    (sample.path / "collectives.parquet").write_bytes(b"PAR1" + b"x" * 99)
    folder = write_report(sample)
    text = (folder / f"{sample.file_name}.md").read_text(encoding="utf-8")
    missing = text[text.index("## Missing") : text.index("## Plan")]
    assert "collectives.parquet cannot be read" in missing
    assert "From `gemm.parquet`" in text or "rows are in `gemm.parquet`" in text
    assert "`collectives.parquet` of the run" not in text
    assert "could not be computed" not in text
    assert (folder / "index.html").stat().st_size > 10_000


def test_a_name_of_the_manifest_does_not_choose_the_folder(sample):
    sample.update(name="../../<x>|")
    (sample.path.parent / "two").mkdir()
    (sample.path.parent / "two" / "manifest.json").write_text("{")  # a damaged neighbour
    folder = write_report(sample)
    assert [p.name for p in folder.glob("*.md")] == ["..-..-x-.md"]
