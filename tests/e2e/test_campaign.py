"""The whole campaign on a real server: states, tables, files, document, and the page in a real browser."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from k25lib.run import PROJECT, Run

pytestmark = pytest.mark.slow

MICRO = [
    "--set", "gemm.batches=[1]", "--set", 'gemm.states=["warm"]', "--set", "gemm.seconds=0.02",
    "--set", "collectives.batches=[1]", "--set", "collectives.seconds=0.05",
]  # fmt: skip
SMALL = [
    "--set", "macro.concurrency=[1, 4]", "--set", "macro.requests_per_slot=2", "--set", "macro.output_tokens=16",
    "--set", "capture.concurrency=[1, 8]", "--set", "capture.requests=[2, 8]", "--set", "capture.output_tokens=[9, 5]",
    *MICRO,
]  # fmt: skip
PHASES = ["01_service_check", "02_macro", "03_micro_gemm", "04_nccl", "05_profiler_capture", "06_breakdown"]


def k25(folder, *words, **more):
    """Run the command with runs and reports below `folder`."""
    environment = {**os.environ, "K25_RUNS": str(folder / "runs"), "K25_REPORTS": str(folder / "reports")}
    command = [sys.executable, "-m", "k25lib", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=folder, **more)


def states(run):
    return {name: phase["state"] for name, phase in run.manifest["phases"].items()}


def only_run(folder):
    (run,) = Run.all(folder / "runs")
    return run


@pytest.fixture(scope="session")
def campaign(served, tmp_path_factory):
    """One campaign against the running server: (finished process, its folder, its run)."""
    folder = tmp_path_factory.mktemp("campaign")
    done = k25(folder, "run", "--url", served.url, *SMALL)
    return done, folder, only_run(folder)


def test_the_campaign_ends_well(campaign):
    done, _, run = campaign
    assert done.returncode == 0, done.stderr
    assert states(run) == dict.fromkeys(PHASES, "ok")
    assert Path(done.stdout.strip()).name == "index.html"


def test_the_server_is_described(campaign, served):
    manifest = campaign[2].manifest
    assert manifest["server"]["url"] == served.url
    assert manifest["environment"]["vllm_version"].startswith("0.32.0")
    assert manifest["environment"]["flags"]["tensor_parallel_size"] == 2
    assert manifest["environment"]["chosen"]["attention backend"] in ("CPU_MLA", "AMX_MLA")
    assert manifest["environment"]["cores"] >= 1


def test_the_load_was_what_was_asked_for(campaign):
    run = campaign[2]
    levels, requests = run.table("levels"), run.table("requests")
    assert levels["concurrency"].tolist() == [1, 4]
    assert levels["failed"].sum() == 0
    measured = requests[requests["ok"]]
    assert (measured["output_tokens"] == 16).all()
    assert (measured["tpot_ms"] > 0).all()
    assert (levels["output_tok_s"] > 0).all()


def test_the_captures_are_whole(campaign):
    run = campaign[2]
    records = run.manifest["captures"]
    assert sorted(records) == ["c1", "c8"]
    for record in records.values():
        assert record["ranks"] == [0, 1]
        assert record["missing_ranks"] == []
        assert all(not file["fault"] for file in record["files"])


def test_the_breakdown_counts_the_steps_and_the_calls_of_the_model(campaign):
    run = campaign[2]
    breakdown = run.table("breakdown")
    rank0 = breakdown[
        (breakdown["capture"] == "c1") & (breakdown["rank"] == 0) & (breakdown["batch"].astype(str) == "all")
    ]
    calls = rank0.groupby("category")["calls"].sum()
    assert sum(calls[name] for name in calls.index if name.startswith("allreduce")) == pytest.approx(9)
    assert calls["moe_gemm"] == pytest.approx(3)
    steps = run.table("steps")
    assert (steps[(steps["capture"] == "c1") & (steps["rank"] == 0)]["kind"] == "decode").sum() == 2 * (9 - 1)


def test_microbenchmarks_have_rows_that_worked(campaign):
    run = campaign[2]
    gemm, collectives = run.table("gemm"), run.table("collectives")
    assert (gemm["status"] == "ok").all()
    assert {"allreduce", "allgather", "reducescatter", "alltoall"} <= set(
        collectives[collectives["status"] == "ok"]["op"].str.replace("_", "")
    )


def test_nothing_half_done_is_left(campaign, served):
    _, folder, run = campaign
    assert not list(folder.rglob("*.part*"))
    assert not list(folder.rglob("*.failed.ipynb"))
    assert not [p for p in Path(served.traces).iterdir() if "trace.json" in p.name]  # moved into the run
    sources = [nbformat.read(p, 4) for p in (PROJECT / "notebooks").glob("*.ipynb")]
    assert not any(c.get("outputs") for book in sources for c in book.cells)


def test_the_document_stands_alone(campaign):
    run = campaign[2]
    text = (campaign[1] / "reports" / run.path.name / "k25b6000bench1.md").read_text()
    for word in [*PHASES, "tiny-kimi-k2.5", "TPOT", "0.32.0"]:
        assert word in text
    assert "nan" not in text.lower().split()


def test_resume_does_only_what_is_left(campaign):
    _, folder, run = campaign
    copy = shutil.copytree(run.path, folder / "more" / "runs" / run.path.name)
    shutil.copytree(folder / "reports" / run.path.name, folder / "more" / "reports" / run.path.name)
    again = Run(copy)
    again.update(phases={"06_breakdown": {"state": "failed", "why": "made up"}})
    done = k25(folder / "more", "run", "--resume", again.path.name)
    assert done.returncode == 0, done.stderr
    assert "01_service_check" not in done.stderr
    assert states(again)["06_breakdown"] == "ok"


def test_the_page_draws_every_figure_offline(campaign):
    from browser import look

    _, folder, run = campaign
    folder = folder / "reports" / run.path.name
    page = folder / "index.html"
    seen = look(page)
    books = [nbformat.read(p, 4) for p in sorted(folder.glob("*.ipynb"))]
    drawn = sum(
        "application/vnd.plotly.v1+json" in output.get("data", {})
        for book in books for cell in book.cells for output in cell.get("outputs", [])
    )  # fmt: skip
    assert drawn >= 6
    assert seen.figures >= drawn
    assert seen.drawn == seen.figures
    assert seen.requests == []
    assert seen.errors == []
    assert page.stat().st_size < 4_000_000


def test_a_server_that_is_down_fails_the_check_and_skips_what_needs_it(tmp_path):
    done = k25(tmp_path, "run", "--url", "http://127.0.0.1:9", "--only", "01,02,05,06")
    assert done.returncode == 1
    run = only_run(tmp_path)
    assert states(run) == {
        "01_service_check": "failed", "02_macro": "skipped", "03_micro_gemm": "pending", "04_nccl": "pending",
        "05_profiler_capture": "skipped", "06_breakdown": "skipped",
    }  # fmt: skip
    assert "connection refused" in run.manifest["phases"]["01_service_check"]["why"]
    report = tmp_path / "reports" / run.path.name
    assert "connection refused" in (report / "k25b6000bench1.md").read_text()
    assert "connection refused" in (report / "index.html").read_text()


def test_wrong_parameters_stop_before_anything_starts(tmp_path):
    done = k25(tmp_path, "run", "--set", "macro.concurency=[1]")
    assert done.returncode == 2
    assert "did you mean concurrency?" in done.stderr
    done = k25(tmp_path, "run", "--set", "capture.input_tokens=many")
    assert done.returncode == 2
    assert "capture.input_tokens must be int" in done.stderr
    assert not (tmp_path / "runs").exists()


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def test_a_server_killed_in_the_middle_of_the_sweep(tmp_path):
    """The sweep fails with its reason, phases without a server are done, the report says so."""
    from k25lib.server.embedded import Embedded

    with Embedded(PROJECT, profiler=False) as server:
        environment = {**os.environ, "K25_RUNS": str(tmp_path / "runs"), "K25_REPORTS": str(tmp_path / "reports")}
        sweep = ["--set", "macro.concurrency=[1, 2]", "--set", "macro.requests_per_slot=400"]
        words = ["run", "--url", server.url, *sweep, *MICRO]
        campaign = subprocess.Popen(
            [sys.executable, "-m", "k25lib", *words], env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        wait_for(
            lambda: Run.all(tmp_path / "runs") and states(only_run(tmp_path)).get("02_macro") == "running", 120, "02"
        )
        time.sleep(12)
        os.kill(server.pid, signal.SIGKILL)
        _, said = campaign.communicate(timeout=600)
    run = only_run(tmp_path)
    assert campaign.returncode == 1, said
    assert states(run) == {
        "01_service_check": "ok", "02_macro": "failed", "03_micro_gemm": "ok", "04_nccl": "ok",
        "05_profiler_capture": "skipped", "06_breakdown": "skipped",
    }  # fmt: skip
    why = run.manifest["phases"]["02_macro"]["why"]
    assert "connection" in why.lower() or "no server answers" in why, why
    document = (tmp_path / "reports" / run.path.name / "k25b6000bench1.md").read_text()
    assert "Connection refused" in document
    assert not run.table("requests").empty  # what was measured before is kept


def test_a_server_without_a_profiler_says_which_flag_to_add(tmp_path):
    """On a real server: the capture fails, the breakdown is skipped, the rest is done."""
    from k25lib.server.embedded import Embedded

    with Embedded(PROJECT, profiler=False) as server:
        done = k25(tmp_path, "run", "--url", server.url, "--only", "01,05,06", *SMALL)
    run = only_run(tmp_path)
    assert done.returncode == 1
    assert states(run)["05_profiler_capture"] == "failed"
    assert "--profiler-config" in run.manifest["phases"]["05_profiler_capture"]["why"]
    assert "needs 05_profiler_capture, which failed" in run.manifest["phases"]["06_breakdown"]["why"]


def test_the_default_starts_and_ends_its_own_server(tmp_path):
    """No URL: the embedded server, stopped for the microbenchmarks and started again; nothing is left behind."""
    before = {p.name for p in Path("/dev/shm").iterdir()}
    done = k25(tmp_path, "run", "--only", "01,04,05", *SMALL)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    assert run.manifest["server"]["kind"] == "embedded"
    starts = [line for line in done.stderr.splitlines() if line.strip().startswith("server: ready")]
    assert len(starts) == 2, done.stderr
    assert {p.name for p in Path("/dev/shm").iterdir()} - before == set()
    assert (run.path / "logs" / "server.log").stat().st_size > 0


def test_status_of_a_running_server(served):
    done = subprocess.run(
        [sys.executable, "-m", "k25lib", "status", served.url, "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert (found["ready"], found["model"], found["version"][:6]) == (True, "tiny-kimi-k2.5", "0.32.0")
