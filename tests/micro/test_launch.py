"""The launcher with real workers: every way of failing is one row with its reason, and nothing stays behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k25lib.errors import K25Error, UsageError
from k25lib.micro import launch, remote
from k25lib.micro.plan import collective_tasks, gemm_tasks
from k25lib.model import load_model
from k25lib.run import PROJECT

PLANTED = str(Path(__file__).parent / "planted")
TASK = {"name": "o_proj", "m": 1, "n": 256, "k": 128, "batch": 1, "dtype": "bf16", "group_size": None}
TASK |= {"state": "warm", "calls_per_step": 61, "category": "gemm"}


def measure(fault="", batches=(2, 3, 4), python=None, **more):
    limits = {"row_timeout_s": more.pop("row_timeout_s", 60)}
    settings = {"device": "cpu", "seconds": 0.01, "tasks": [TASK | {"m": m} for m in batches], **limits}
    settings["env"] = {"PYTHONPATH": PLANTED, "K25_PLANT": fault} if fault else {}
    return launch.run_gemm(settings, python, **more)


def left_behind():
    """Processes that run a worker, and the folders that it was sent to."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                mine = f"K25_TEST={os.getpid()}" in (folder / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mine and "k25lib.micro" in command:
                found.append(command)
    return found


@pytest.fixture(autouse=True)
def no_traces(monkeypatch, tmp_path):
    monkeypatch.setenv("K25_TEST", str(os.getpid()))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    deadline = time.monotonic() + 10  # a worker whose launcher was killed cleans up by itself
    while (left_behind() or list(tmp_path.glob("k25-*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind() == []
    assert list(tmp_path.glob("k25-*")) == []


@pytest.mark.slow
def test_rows_come_back_as_they_are_made_with_peaks_and_provenance():
    seen, facts = [], {}
    rows = measure(on_row=seen.append, on_facts=facts.update)
    assert [row["m"] for row in rows] == [2, 3, 4]
    assert rows == seen
    for row in rows:
        assert row["status"] == "ok"
        assert row["error"] < 5e-3
        assert row["time_us_min"] <= row["time_us_median"]
        assert row["gb_s"] == pytest.approx((256 * 128 + row["m"] * (256 + 128)) * 2 / row["time_us_median"] / 1e3)
        assert row["ms_per_step"] == pytest.approx(61 * row["time_us_median"] / 1e3)
        assert row["peak_source"] == "measured here"
        assert (row["method"], row["copies"]) == (2, 1)
    assert facts["copy_gb_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("gemm-die", "failed", "signal SIGSEGV"),
        ("gemm-hang", "failed", "time-out (8 s)"),
        ("gemm-memory", "failed", "OutOfMemoryError: planted: out of memory"),
        ("gemm-nan", "failed", "wrong result against float32"),
    ],
)
def test_a_fault_costs_its_row_alone(fault, status, reason):
    rows = measure(fault, row_timeout_s=8)
    assert [row["status"] for row in rows] == ["ok", status, "ok"]
    assert reason in rows[1]["reason"]
    assert "time_us_median" not in rows[1]


@pytest.mark.slow
def test_the_time_for_all_rows_is_kept():
    start = time.monotonic()
    rows = measure("gemm-hang", timeout_s=25)
    assert time.monotonic() - start < 60
    assert [row["status"] for row in rows] == ["ok", "failed", "not run"]
    assert "time-out (25 s for all rows)" in rows[1]["reason"]
    assert "after the time-out" in rows[2]["reason"]


@pytest.mark.slow
def test_no_cuda_is_said_by_every_row():
    rows = launch.run_gemm({"device": "cuda", "tasks": [TASK, TASK]})
    assert {row["reason"] for row in rows} == {"no CUDA device that torch can use"}


def test_ranks_that_never_met_are_asked_once(monkeypatch):
    started = []

    def worker(python, arguments, settings, env):
        started.append(env)
        return Scripted([{"event": "abort", "reason": "3 ranks want a GPU each, there are 2"}], 0)

    monkeypatch.setattr(launch, "Worker", worker)
    task = {"op": "allreduce", "bytes": 1024, "calls": 1, "mode": "graph", "backend": "nccl"}
    told = []
    variants = [task | {"environment": {"NCCL_ALGO": name}} for name in ("Ring", "Tree")]
    rows = launch.run_collectives({"device": "cuda", "tasks": [task, *variants]}, world=3, on_row=told.append)
    assert [row["reason"] for row in rows] == ["3 ranks want a GPU each, there are 2"] * 3
    assert [row["environment"] for row in rows] == ["{}", '{"NCCL_ALGO": "Ring"}', '{"NCCL_ALGO": "Tree"}']
    assert (told, len(started)) == (rows, 1)


@pytest.mark.parametrize(("kind", "places", "most"), [("cuda", 2, 2), ("cpu", 2, 16), ("cpu", 64, 128)])
def test_more_ranks_than_there_are_places_start_nothing(monkeypatch, kind, places, most):
    said = [{"event": "device", "kind": kind, "places": places}]
    monkeypatch.setattr(launch, "Worker", lambda *_: Scripted(said, 0))
    assert launch.probe(world=most) == kind
    with pytest.raises(UsageError, match=f"{most + 1} ranks are too many for {places} "):
        launch.probe(world=most + 1)


@pytest.mark.parametrize("python", ["'", 'ssh "host'])
def test_a_quote_that_does_not_close_is_a_usage_error(python):
    with pytest.raises(UsageError, match="No closing quotation"):
        remote.prefix_of(python)
    assert remote.prefix_of(" ") == [sys.executable]


def test_an_interpreter_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match="cannot run /no/such/python: No such file"):
        measure(python="/no/such/python")


@pytest.mark.slow
def test_an_interpreter_without_torch_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    python = ["env", f"PYTHONPATH={tmp_path}", sys.executable]
    rows = measure(python=python)
    assert {row["status"] for row in rows} == {"failed"}
    assert "No module named 'torch'" in rows[0]["reason"]
    with pytest.raises(K25Error, match="cannot run the worker"):
        launch.probe(python)


@pytest.mark.slow
def test_any_prefix_will_do_and_noise_on_its_stdout_is_no_row(tmp_path):
    script = tmp_path / "elsewhere"
    script.write_text(f'#!/bin/sh\necho "welcome to host"\necho "{{not json"\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    assert [row["status"] for row in measure(python=f"env A=1 {script}", batches=(1,))] == ["ok"]


@pytest.mark.slow
def test_ssh_gets_one_word_a_quoted_argument(tmp_path):
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\nshift\nexec sh -c "$*"\n# {sys.executable}\n')
    script.chmod(0o755)
    rows = measure(python=[str(script), "somehost", sys.executable], batches=(1,))
    assert [row["status"] for row in rows] == ["ok"]


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("docker exec vllm python3", ["docker", "exec", "-i", "vllm", "python3"]),
        ("docker exec -i vllm python3", ["docker", "exec", "-i", "vllm", "python3"]),
        ("kubectl exec pod -- python3", ["kubectl", "exec", "-i", "pod", "--", "python3"]),
        ("sudo docker exec vllm python3", ["sudo", "docker", "exec", "-i", "vllm", "python3"]),
        ("kubectl -n ns exec pod -- python3", ["kubectl", "-n", "ns", "exec", "-i", "pod", "--", "python3"]),
        ("ssh -i k h docker exec v python3", ["ssh", "-i", "k", "h", "docker", "exec", "-i", "v", "python3"]),
        ("/opt/vllm/bin/python", ["/opt/vllm/bin/python"]),
        (None, [sys.executable]),
    ],
)
def test_a_container_is_given_a_stdin(prefix, command):
    assert remote.prefix_of(prefix) == command


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_worker_along(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_launch as t;"
        "t.measure('gemm-hang', batches=(3,), on_facts=lambda f: print('started', flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(Path(__file__).parent)], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"started\n"
    assert left_behind()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while left_behind() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind() == []


@pytest.mark.slow
def test_the_command_prints_one_json_object(tmp_path):
    command = [
        sys.executable,
        "-m",
        "k25lib",
        "gemm",
        "--batch",
        "1",
        "--state",
        "warm",
        "--only",
        "q_b_proj",
        "--json",
    ]
    done = subprocess.run([*command, "--seconds", "0.01"], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["schema"] == "k25.gemm/1"
    (row,) = answer["rows"]
    assert (row["name"], row["n"], row["k"], row["calls_per_step"]) == ("q_b_proj", 1536, 1536, 61)
    assert row["time_us"]["min"] <= row["time_us"]["median"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemm", "--batch", "0"], "batches are whole numbers from 1, at least one, not [0]"),
        (["gemm", "--state", "hot"], "states are cold, warm or both, not ['hot']"),
        (["gemm", "--only", "nothing"], "no GEMM to time"),
        (["gemm", "--config", "/no/config.json"], "cannot read /no/config.json"),
        (["collectives", "--world", "0"], "--world must be at least 1"),
        (["collectives", "--torchrun", "'"], "No closing quotation"),
        (["gemm", "--python", "'"], "No closing quotation"),
        (["gemm", "--batch", "1,x"], "--batch takes whole numbers"),
        (["gemm", "--seconds", "nan"], "nan is no positive number"),
        (["gemm", "--timeout", "0"], "0 is no positive number"),
    ],
)
def test_bad_arguments_are_one_line(arguments, says, capsys):
    from k25lib.cli import main

    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert says in error
    assert (out, error.count("\n")) == ("", 1)


@pytest.mark.parametrize("batches", [[], [0], [1.5], ["1"], [True], 4])
def test_batches_that_are_none_are_usage_errors(batches):
    model = load_model(PROJECT / "data" / "reference" / "kimi-k2.5" / "config.json")
    for make in (lambda: gemm_tasks(model, 8, batches), lambda: collective_tasks(model, 2, batches, False)):
        with pytest.raises(UsageError, match="batches are whole numbers from 1"):
            make()
    assert [task["m"] for task in gemm_tasks(model, 8, [4, 1, 4], ["warm"], "o_proj")] == [4, 1]


class Scripted:
    """A worker that says the events of its script and then ends with a code."""

    def __init__(self, events, code):
        self.events, self.code = list(events), code

    def next(self, timeout_s):
        return self.events.pop(0) if self.events else None

    def wait(self, seconds):
        pass

    def stop(self):
        return self.code

    def last_words(self):
        return ""


def test_a_fatal_row_costs_that_row_alone():
    started = []

    def start(todo):
        started.append([task["name"] for task in todo])
        events = []
        for task in list(todo):
            fatal = task["name"] == "b"
            row = {"event": "row", "status": "failed" if fatal else "ok", "reason": "CUDA error" if fatal else ""}
            events += [{"event": "start", "id": task["id"]}, row]
            if fatal:
                return Scripted(events, 3)
        return Scripted([*events, {"event": "end"}], 0)

    rows = launch.Job([{"name": name} for name in "abcd"], 60, 10, None, None).run(start)
    assert [(row["name"], row["status"]) for row in rows] == [("a", "ok"), ("b", "failed"), ("c", "ok"), ("d", "ok")]
    assert started == [["a", "b", "c", "d"], ["c", "d"]]


def test_a_worker_that_never_begins_fails_every_row_once():
    started = []

    def start(todo):
        started.append(len(todo))
        return Scripted([], 1)

    rows = launch.Job([{"name": name} for name in "ab"], 60, 10, None, None).run(start)
    assert [row["reason"] for row in rows] == ["the worker ended with exit code 1"] * 2
    assert started == [2]
