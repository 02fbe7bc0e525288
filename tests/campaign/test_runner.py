"""What a campaign leaves in its run."""

import nbformat
import pytest

from k25lib.campaign import runner
from k25lib.campaign.plan import Phase
from k25lib.campaign.runner import Runner, drop_traces
from k25lib.client import Client
from k25lib.errors import K25Error
from k25lib.run import Run
from k25lib.settings import Settings


@pytest.mark.parametrize(
    "traces", [["r0.pt.trace.json.gz", "r1.trace.json"], ["k25.1.nsys-rep", "k25.1.sqlite", "k25.1.sqlite-wal"]]
)
@pytest.mark.parametrize("state", ["ok", "failed"])
def test_traces_are_dropped_only_after_their_breakdown(tmp_path, state, traces):
    run = Run.create("x", tmp_path, phases={"06_breakdown": {"state": state}}, captures={"c1": {"ranks": [0]}})
    folder = run.path / "captures" / "c1"
    folder.mkdir(parents=True)
    kept = ["capture.json", "profiler_out_0.txt"]
    for name in (*kept, *traces):
        (folder / name).write_text("{}")
    drop_traces(run)
    assert sorted(p.name for p in folder.iterdir()) == sorted(kept if state == "ok" else kept + traces)
    assert run.manifest["captures"]["c1"].get("dropped", False) == (state == "ok")


def test_a_server_that_is_not_as_it_was_found_is_in_the_manifest(places):
    class Broken:
        def close(self):
            raise K25Error("it died while starting: no room")

    run = Run.create("x", settings={}, title="x", phases={})
    Runner(run, [], Settings(), Broken(), say=str).go()
    assert run.manifest["server_error"] == "it died while starting: no room"
    Broken.close = lambda self: None
    Runner(run, [], Settings(), Broken(), say=str).go()
    assert run.manifest["server_error"] == ""


def test_a_report_that_can_not_be_written_is_in_the_manifest_until_it_can(places, monkeypatch):
    def broken(run, page):
        raise ValueError("no room")

    class There:
        def close(self):
            pass

    run, said = Run.create("x", settings={}, title="x", phases={}), []
    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_report", broken)
        Runner(run, [], Settings(), There(), say=said.append).go()
    assert run.manifest["report_error"] == "ValueError: no room"
    assert said == ["the report could not be written: ValueError: no room"]
    Runner(run, [], Settings(), There(), say=said.append).go()
    assert run.manifest["report_error"] == ""
    assert (run.report_dir / "index.html").is_file()


def test_a_capture_that_was_cut_off_leaves_no_profiler_running(places, monkeypatch):
    class There:
        def up(self, profiler):
            return {"url": "http://127.0.0.1:9"}

        def died(self):
            return ""

        def close(self):
            pass

    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": ""}})
    tagged = {"metadata": {"tags": ["parameters"]}}
    book.cells = [nbformat.v4.new_code_cell('run: str = ""  # run', **tagged), nbformat.v4.new_code_cell("1/0")]
    nbformat.write(book, places / "05_x.ipynb")
    asked = []
    monkeypatch.setattr(Client, "has_profiler", lambda self, timeout_s: asked.append(self.url))
    run = Run.create("x", settings={}, title="x", phases={})
    failed = Runner(run, [Phase(places / "05_x.ipynb", "capture", "profiler")], Settings(), There(), say=str).go()
    assert (failed, asked) == (["05_x"], ["http://127.0.0.1:9"])
