"""What a notebook shows of which run: its parameters decide, and headless nothing is asked."""

import pytest

from k25lib.errors import UsageError
from k25lib.report.choice import Choice
from k25lib.run import Run

ROWS = [{"capture": c, "batch": b, "ms": ms} for c, ms in (("c1", 1.0), ("c64", 64.0)) for b in ("1", "all")]


@pytest.fixture
def run(places):
    made = Run.create("bench")
    made.save("breakdown", ROWS)
    for name in ("c1", "c64"):
        (made.path / "captures" / name).mkdir(parents=True)
    return made


def test_all_captures_or_the_one_that_is_named(run):
    both, one = Choice(str(run.path)), Choice(str(run.path), "c64")
    assert (set(both.traces()), set(one.traces())) == ({"c1", "c64"}, {"c64"})
    assert list(both.table("breakdown", batch="all")["ms"]) == [1.0, 64.0]
    assert list(one.table("breakdown", batch="all")["ms"]) == [64.0]
    assert both.table("kernels", batch="all").empty


def test_a_path_stands_for_a_capture_of_its_name(run, tmp_path):
    chosen = Choice(str(run.path), str(tmp_path / "elsewhere"))
    assert chosen.traces() == {"elsewhere": tmp_path / "elsewhere"}
    assert chosen.capture == "elsewhere"


def test_a_path_and_no_run_is_a_run_of_its_own(run, tmp_path):
    foreign = tmp_path / "other-run" / "captures" / "c1"
    foreign.mkdir(parents=True)
    run.update(server={"tp": 8, "config": "config.json"})
    chosen = Choice("", str(foreign))
    assert chosen.run.path != run.path
    assert (chosen.run.manifest["kind"], chosen.run.manifest.get("server")) == ("interactive", None)
    assert chosen.traces() == {"c1": foreign}
    assert Choice("", str(foreign)).run.path != chosen.run.path  # nor does it replace another path's
    assert len(Run.all()) == 3


def test_a_path_that_would_replace_a_capture_of_the_run_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="has a capture c1 of its own, .*leave run empty"):
        Choice(str(run.path), str(tmp_path / "elsewhere" / "c1")).traces()
    run.update(captures={"gone": {"concurrency": 1}})
    with pytest.raises(UsageError, match="has a capture gone of its own"):
        Choice(str(run.path), str(tmp_path / "gone")).traces()
    own = run.path / "captures" / "c1"
    assert Choice(str(run.path), str(own)).traces() == {"c1": own}


def test_no_name_is_the_newest_run_and_no_capture_says_what_to_do(run):
    newest = Run.create("newer")
    assert Choice().run.path == newest.path
    with pytest.raises(UsageError, match="05_profiler_capture"):
        Choice().traces()


def test_what_is_shown_is_made_once_outside_a_notebook(run):
    chosen, made = Choice(str(run.path)), []
    chosen.show(lambda: made.append(1) or chosen.table("breakdown"))
    chosen.offer()
    assert made == [1]
