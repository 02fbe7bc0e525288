"""Collectives: the conventions of their bandwidths, and real ranks over gloo with planted faults."""

import socket
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_launch import PLANTED, no_traces  # noqa: F401 (an autouse fixture: nothing stays behind)

from k25lib.micro import collectives, launch, messages
from k25lib.micro.fit import fit
from k25lib.micro.plan import collective_tasks
from k25lib.model import load_model

KIMI = Path(__file__).parents[2] / "data" / "reference" / "kimi-k2.5" / "config.json"


def task(size, op="allreduce", **more):
    return {"op": op, "bytes": size, "calls": 3, "mode": "eager", "backend": "gloo", "purpose": "sizes"} | more


def measure(tasks, fault="", world=2, row_timeout_s=20, **more):
    env = {"PYTHONPATH": PLANTED, "K25_PLANT": fault} if fault else {}
    asked = {"device": "cpu", "seconds": 0.01, "tasks": tasks, "row_timeout_s": row_timeout_s, "env": env}
    return launch.run_collectives(asked | more, world=world)


# Conventions. The factors are those that nccl-tests publishes (doc/PERFORMANCE.md of that project).


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("allreduce", lambda n: 2 * (n - 1) / n),
        ("reducescatter", lambda n: (n - 1) / n),
        ("allgather", lambda n: (n - 1) / n),
        ("alltoall", lambda n: (n - 1) / n),
    ],
)
def test_bus_bandwidth_factors(op, factor, world):
    algbw, busbw = messages.bandwidths(op, 10**9, 1e6, world)
    assert algbw == 1.0
    assert busbw == factor(world)


def test_the_known_row():
    algbw, busbw = messages.bandwidths("allreduce", 14336, 78, 8)
    assert (round(algbw, 3), round(busbw, 3)) == (0.184, 0.322)


@given(st.integers(1, 256), st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_test_data_adds_up_exactly_in_bf16(world, call):
    total = sum(messages.values(26, rank, call, world, "cpu").float() for rank in range(world))
    assert (total == total.bfloat16().float()).all()
    assert len(messages.values(26, 0, call, world, "cpu").unique()) > 2
    if world > 1:
        assert (messages.values(26, 0, call, 2, "cpu") != messages.values(26, 1, call, 2, "cpu")).any()


def test_fit_finds_the_law_it_was_given():
    sizes = [2**p for p in range(8, 24)]
    law = fit(sizes, [5.0 + size / 40e3 for size in sizes])
    assert law["alpha_us"] == pytest.approx(5.0)
    assert law["gb_s"] == pytest.approx(40.0)
    assert law["worst"] < 1e-6


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(2, 10**8), st.floats(0.1, 1e6)), min_size=3, max_size=20))
def test_fit_is_never_negative(points):
    law = fit(*zip(*points, strict=True))
    if law:
        assert law["alpha_us"] >= 0
        assert law["gb_s"] is None or law["gb_s"] > 0


def test_the_plan_has_the_models_burst_and_sizes():
    tasks = collective_tasks(load_model(KIMI), 8, [1, 64, 256], gpu=True)
    burst = [t for t in tasks if t["purpose"] == "burst" and t["backend"] == "nccl"]
    assert {(t["bytes"], t["calls"], t["mode"]) for t in burst} == {
        (14336, 122, "eager"), (14336, 122, "graph"), (14336 * 64, 122, "eager"), (14336 * 64, 122, "graph"),
    }  # fmt: skip
    assert {t["bytes"] for t in tasks if t.get("batch") == 256 and t["op"] == "allreduce"} == {3_670_016}
    assert {t["bytes"] for t in tasks if t["op"] == "alltoall" and t["batch"] == 1} == {14336, 114688}
    assert {t["bytes"] for t in tasks if t["op"] == "allgather" and t["batch"] == 1} == {14336 * 8}
    (in_place,) = [t for t in collective_tasks(load_model(KIMI), 8, [1], gpu=False) if t["purpose"] == "in place"]
    assert (in_place["calls_per_step"], in_place["gemm"]) == (122, [1, 7168, 1024])
    environments = [tuple(t["environment"].items()) for t in tasks if t["purpose"] == "variant"]
    assert len(set(environments)) == 8
    tree, no_events = (("NCCL_ALGO", "Tree"), ("NCCL_PROTO", "LL")), (("NCCL_GRAPH_MIXING_SUPPORT", "0"),)
    assert {(), tree, no_events} < set(environments)
    assert {t["backend"] for t in tasks} == {"nccl", "pynccl", "custom", "symm_mem"}


@pytest.mark.parametrize(
    ("device", "there", "said"), [("cpu", True, None), ("cuda", True, True), ("cuda", False, False)]
)
def test_gpu_ranks_have_the_servers_communicator_before_any_row(monkeypatch, device, there, said):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(collectives.timing, "Output", lambda: None)
    asked = []

    def reducer(backend, control, device):
        asked.append(backend)
        if not there:
            raise messages.NotRun("no vLLM")

    monkeypatch.setattr(collectives, "reducer", reducer)
    bench = collectives.Bench({})
    bench.device, bench.control = torch.device(device), None
    assert bench.accompany() is said
    assert asked == (["pynccl"] if device == "cuda" else [])


# Real ranks.


@pytest.mark.slow
def test_every_operation_is_right_over_gloo():
    tasks = [task(14336, op) for op in messages.FACTORS] + [task(14336, gemm=[1, 64, 64])]
    tasks += [task(14336, mode="graph"), task(14336, backend="custom"), task(14338, "alltoall"), task(7, "allreduce")]
    rows = measure(tasks)
    for row in rows[:5]:
        assert row["status"] == "ok", row["reason"]
        assert row["time_us_min"] <= row["time_us_median"] <= row["time_us_max"]
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * messages.FACTORS[row["op"]](2))
        assert row["algbw_gb_s"] == pytest.approx(14336 / row["time_us_median"] / 1e3)
        assert (row["world"], row["comparable"], row["nccl"]) == (2, False, None)
        assert row["burst_ms"] == pytest.approx(3 * row["time_us_median"] / 1e3)
    assert rows[5]["gemm"] == "1x64x64"
    assert [row["status"] for row in rows[6:]] == ["not run", "not run", "failed", "failed"]
    assert "CUDA graphs need GPUs" in rows[6]["reason"]
    assert "custom needs GPUs" in rows[7]["reason"]
    assert "14338 bytes do not divide into 2 BF16 parts" in rows[8]["reason"]
    assert "7 bytes do not divide" in rows[9]["reason"]


@pytest.mark.slow
def test_ranks_for_gpus_that_are_not_there():
    (row,) = measure([task(64, backend="nccl")], device="cuda")
    assert (row["status"], row["reason"]) == ("failed", "no CUDA device that torch can use")


@pytest.mark.parametrize(
    ("available", "count", "nccl", "reason"),
    [
        (True, 1, True, "2 ranks want a GPU each, there are 1"),
        (True, 2, False, f"torch {torch.__version__} has no NCCL"),
        (True, 2, True, ""),
    ],
)
def test_why_ranks_cannot_start(monkeypatch, available, count, nccl, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    bench = object.__new__(collectives.Bench)
    bench.local_world = 2
    assert bench.refusal("cuda") == reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("die", ["exitcode: -9", "SIGKILL", "rank 1: allreduce 64 B"]),
        ("hang", ["time-out (20 s)", "rank 0: allreduce 64 B", "rank 1: allreduce 64 B"]),
        ("raise", ["planted: unsupported operation", "rank 1: allreduce 64 B x 3 eager gloo failed"]),
        ("other", ["rank"]),
        ("corrupt", ["wrong data after the last call", "rank 1: 3"]),
    ],
)
def test_a_faulty_rank_costs_its_row_alone(fault, reasons):
    rows = measure([task(32), task(64), task(128)], f"{fault}:1:64")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"], rows
    for reason in reasons:
        assert reason in rows[1]["reason"]
    assert "time_us_median" not in rows[1]


@pytest.mark.slow
def test_a_late_rank_shows_in_the_time_of_the_others():
    rows = measure([task(32), task(64), task(128)], "late:1:64")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert rows[1]["time_us_median"] > 50_000 > rows[0]["time_us_median"]


@pytest.mark.slow
def test_a_busy_port_is_a_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--master-addr", "127.0.0.1", "--master-port", str(taken.getsockname()[1])]
        (row,) = measure([task(64)], torchrun=options, row_timeout_s=40)
    assert row["status"] == "failed"
    assert "in use" in row["reason"].lower()


@pytest.mark.slow
def test_variants_run_in_processes_of_their_own():
    seen = {}
    environments = [{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}]
    asked = {"device": "cpu", "seconds": 0.01, "tasks": [task(64, environment=e) for e in environments]}
    rows = launch.run_collectives(
        asked, sys.executable, on_facts=lambda f: seen.update({f["environment"]["NCCL_ALGO"]: f["world"]})
    )
    assert [row["environment"] for row in rows] == ['{"NCCL_ALGO": "Ring"}', '{"NCCL_ALGO": "Tree"}']
    assert seen == {"Ring": 2, "Tree": 2}
