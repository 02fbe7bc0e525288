"""A run's directory: nothing overwritten, the manifest whole under two writers, tables as they were saved."""

import threading

import pandas as pd
import pytest

from k25lib.errors import K25Error, UsageError
from k25lib.run import Run


def test_two_runs_of_one_second_do_not_meet(tmp_path):
    first, second = Run.create("a b/c", tmp_path), Run.create("a b/c", tmp_path)
    assert first.path != second.path
    assert first.path.name.endswith("-a-b-c")
    assert Run.find("newest", tmp_path).path == second.path


def test_tables_come_back_as_saved(tmp_path):
    run = Run.create("x", tmp_path)
    run.save("gemm", [{"name": "o_proj", "time_us": 1.5}, {"name": "lm_head", "time_us": None, "reason": "no memory"}])
    table = run.table("gemm")
    assert table["name"].tolist() == ["o_proj", "lm_head"]
    assert table["time_us"].isna().tolist() == [False, True]
    assert run.table("levels").empty
    assert run.tables() == ["gemm"]


def test_a_table_that_can_not_be_written_leaves_the_old_one(tmp_path):
    run = Run.create("x", tmp_path)
    run.save("gemm", [{"a": 1}])
    with pytest.raises(Exception, match="mix"):
        run.save("gemm", pd.DataFrame({"a": [{1, 2}, "text"]}))
    assert run.table("gemm")["a"].tolist() == [1]


def test_two_writers_of_the_manifest_lose_nothing(tmp_path):
    run = Run.create("x", tmp_path)

    def write(start):
        for n in range(start, start + 40):
            Run(run.path).update(phases={str(n): n})

    threads = [threading.Thread(target=write, args=(k * 40,)) for k in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(run.manifest["phases"]) == 120


def test_an_unknown_run_names_those_there_are(tmp_path):
    known = Run.create("known", tmp_path)
    with pytest.raises(UsageError, match=known.path.name):
        Run.find("other", tmp_path)
    with pytest.raises(UsageError, match="there is no run"):
        Run.find("newest", tmp_path / "empty")


def test_notebooks_find_the_newest_run_but_never_write_into_a_campaign(tmp_path):
    campaign = Run.create("campaign", tmp_path, kind="campaign")
    assert Run.open_or_new("", tmp_path, reading=True).path == campaign.path
    mine = Run.open_or_new("", tmp_path)
    assert mine.path != campaign.path
    assert mine.manifest["kind"] == "interactive"
    assert Run.open_or_new("", tmp_path).path == mine.path


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name": ',
        "[]",
        "null",
        "[" * 100_000,
        '{"server": []}',
        '{"captures": {"c1": "ok"}}',
        '{"environment": {"gpus": "H200"}}',
        '{"macro": {"settings": [1]}}',
        '{"command": 3}',
    ],
)
def test_a_damaged_manifest_is_told_in_one_line(tmp_path, text):
    run = Run.create("x", tmp_path)
    (run.path / "manifest.json").write_text(text)
    with pytest.raises(K25Error, match=r"manifest.json .*restore it, or move the run away$") as caught:
        _ = run.manifest
    assert "\n" not in str(caught.value)
    assert Run.open_or_new("", tmp_path).path != run.path


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-20], lambda data: b"PAR1" + b"x" * 99])
def test_a_damaged_table_is_told_in_one_line(tmp_path, damage):
    run = Run.create("x", tmp_path)
    run.save("gemm", [{"name": "o_proj"}])
    file = run.path / "gemm.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(K25Error, match=r"gemm.parquet cannot be read \(.*\): restore it") as caught:
        run.table("gemm")
    assert "\n" not in str(caught.value)


def test_a_name_cannot_leave_its_folder(tmp_path):
    run = Run.create("x", tmp_path)
    for name, file in (("../../a|b\0", "..-..-a-b-"), (None, "run"), (5, "5"), ("ok-1.2_x", "ok-1.2_x")):
        run.update(name=name)
        assert run.file_name == file


def test_a_damaged_run_is_no_reason_to_leave_the_others_alone(tmp_path):
    whole = Run.create("x", tmp_path, kind="interactive")
    damaged = tmp_path / "2999-01-01T000000-damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    with pytest.raises(K25Error, match="cannot be read"):
        Run.find(damaged.name, tmp_path).update(title="y")
    assert (damaged / "manifest.json").read_text() == "{"
    assert Run.find("newest", tmp_path).path == Run.open_or_new("", tmp_path).path == whole.path
    assert Run.open_or_new("", tmp_path, reading=True).path == whole.path


def test_a_kind_of_run_is_found_among_others(tmp_path):
    campaign = Run.create("x", tmp_path, kind="campaign")
    interactive = Run.create("y", tmp_path, kind="interactive")
    assert Run.find("newest", tmp_path, kind="campaign").path == campaign.path
    with pytest.raises(UsageError, match="is no campaign: it is of the kind 'interactive'"):
        Run.find(interactive.path.name, tmp_path, kind="campaign")


def test_what_can_not_be_written_leaves_no_part(tmp_path, monkeypatch):
    run = Run.create("x", tmp_path)
    run.save("gemm", [{"a": 1}])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", full)
        with pytest.raises(OSError, match="No space"):
            run.save("gemm", [{"a": 2}])
        with pytest.raises(OSError, match="No space"):
            run.update(title="y")
    assert run.table("gemm")["a"].tolist() == [1] and "title" not in run.manifest
    assert not list(run.path.glob(".*part"))
