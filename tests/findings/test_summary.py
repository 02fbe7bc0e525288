"""Page 1 from whole, half, empty and CPU runs."""

import json
import math
import shutil
from pathlib import Path

import pytest

from k25lib.findings.campaigns import references
from k25lib.findings.facts import gather
from k25lib.findings.summary import summarise
from k25lib.model import load_model
from k25lib.run import Run

CONFIG = str(Path(__file__).parents[2] / "data/reference/kimi-k2.5/config.json")
# One rank of TP=8 on each of two H200s, as served there
OVERRIDES = {"num_attention_heads": 16, "moe_intermediate_size": 512, "intermediate_size": 4608}
GPU = {
    "server": {"kind": "external", "model": "kimi-k2.5-int4", "tp": 2, "config": CONFIG},
    "environment": {"gpus": [{"name": "NVIDIA H200"}] * 2, "flags": {"hf_overrides": OVERRIDES}},
    "macro": {"settings": {"input_tokens": 128, "output_tokens": 64}, "plateau": {"verdict": "still rising"}},
    "captures": {"c1": {"concurrency": 1}, "c64": {"concurrency": 64}},
}
LEVELS = [
    {"concurrency": 1, "tpot_ms_mean": 8.64, "tpot_ms_low": 8.6, "tpot_ms_high": 8.7, "output_tok_s": 112.7},
    {"concurrency": 128, "tpot_ms_mean": 37.96, "output_tok_s": 2534.0, "void": False},
]
STEPS = [
    {"capture": capture, "rank": rank, "step": step, "kind": "decode" if step else "prefill", "batch": 1,
     "start_ns": step * 8_700_000, "kernel_sum_ms": ms if step else 30.0, "busy_ms": 7.41, "span_ms": 8.68}
    for capture, ms in (("c64", 21.0), ("c1", 8.1))
    for rank in (0, 1)
    for step in range(4)
]  # fmt: skip
CATEGORIES = {"moe_gemm": 1.95, "gemm": 2.5, "allreduce_nccl": 0.96, "attention": 0.9, "norm": 1.79}
BREAKDOWN = [
    {"capture": "c1", "rank": 0, "batch": batch, "category": name, "calls": 123, "ms": ms, "exposed_ms": ms}
    for batch in ("1", "all")
    for name, ms in CATEGORIES.items()
] + [
    {"capture": "c64", "rank": 0, "batch": "all", "category": name, "ms": ms}
    for name, ms in (("moe_gemm", 12), ("norm", 9))
]
COLLECTIVES = [
    {"purpose": purpose, "op": op, "bytes": size, "calls": 122, "mode": mode, "backend": backend,
     "time_us_median": us, "status": "ok", "comparable": True, "environment": "{}"}
    for purpose, op, size, mode, backend, us in [
        ("burst", "allreduce", 14336, "graph", "nccl", 7.0),
        ("burst", "allreduce", 14336, "graph", "custom", 4.0),
        ("expert parallel", "alltoall", 14336, "graph", "nccl", 6.0),
        ("sizes", "allreduce", 2**26, "graph", "nccl", 400.0),
    ]
]  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    def _make(tables, **manifest):
        run = Run.create(manifest.pop("name", "test"), tmp_path / "runs", **manifest)
        for name, rows in tables.items():
            run.save(name, rows)
        return run

    return _make


def plain(found):
    """What goes into the report is JSON without NaN."""
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture
def whole(make_run):
    waits = [{"capture": "c1", "op": "allreduce", "calls": 123, "wait_ms": 0.06, "transfer_ms": 0.9}]
    census = [{"capture": "c1", "operation": "allreduce", "expected": 123, "counted": 126.97}]
    tables = {"levels": LEVELS, "steps": STEPS, "breakdown": BREAKDOWN, "collectives": COLLECTIVES}
    return make_run(tables | {"waits": waits, "census": census}, **GPU)


def test_three_sentences_of_a_whole_run(whole):
    number, dominates, following = plain(summarise(whole))["sentences"]
    assert number == (
        "One token takes 8.64 ms (95 %: 8.60 to 8.70) at concurrency 1 (TPOT); "
        "the most throughput is 2,534 tok/s, at concurrency 128, still rising."
    )
    assert dominates == (
        "GEMM dominates the decode step: 2.50 of 8.70 ms (29 %; nine of ten steps take 8.70 to 8.70 ms), "
        "then MoE GEMM 1.95 ms, norm 1.79 ms; communication is 0.90 ms of transfer and 0.06 ms of waiting for other "
        "ranks; in capture c64 MoE GEMM leads (57 % of kernel time)."
    )
    assert following.startswith("Next: GEMMs beyond the time that reading their weights takes, with a ceiling of 3.0")
    assert "after it comes other kernels, 1.79 ms" in following
    assert "gives most in the worst case" in following


def test_what_the_sentences_rest_on(whole):
    assert plain(summarise(whole))["basis"] == (
        "The decode step is that of capture c1, batch 1; mean of 3 steps on rank 0; kernels overlap and add up to "
        "8.10 ms; DRAM efficiency is 16.7 % (6.922 GB a rank at 4.800 TB/s, 160 tokens of context)."
    )


def test_tables_of_a_whole_run(whole):
    found = plain(summarise(whole))
    assert sum(row["ms"] for row in found["closure"][:-1]) == pytest.approx(8.64)
    assert [row["name"] for row in found["headlines"]][:3] == [
        "TPOT at C=1",
        "most throughput, at C=128",
        "decode step in the trace",
    ]
    tpot, *_, efficiency = found["headlines"]
    assert (tpot["low"], tpot["high"], tpot["unit"], tpot["spread"]) == (8.6, 8.7, "ms", "95 %")
    assert (efficiency["low"], efficiency["high"]) == pytest.approx((16.69 * 8.64 / 8.7, 16.69 * 8.64 / 8.6), abs=0.01)
    assert [row["finding"] for row in found["contradictions"]] == ["calls that the model does not predict"]
    changes = {row["change"]: row for row in found["whatif"]}
    assert {
        "AllReduce by custom graph",
        "AllReduce by nccl graph",
        "a link 2 times as fast",
        "expert parallelism",
    } <= set(changes)
    assert changes["AllReduce by custom graph"]["high_ms"] == pytest.approx(0.96 - 123 * 4e-3)
    assert all(row["low_ms"] <= row["high_ms"] for row in found["whatif"])
    assert [(row["micro_ms"], row["trace_ms"]) for row in found["micro"]] == [
        pytest.approx((122 * 0.007, 0.96)),
        pytest.approx((8.64 - 122 * 0.007, 8.7 - 0.96)),
    ]
    assert found["references"][0]["dominant"] == "gemm"


def test_an_empty_run_says_what_is_missing(make_run):
    found = plain(summarise(make_run({})))
    assert [sentence.split(":")[0].split(" is ")[0] for sentence in found["sentences"]] == [
        "The number",
        "What dominates",
        "What next",
    ]
    assert all("missing" in s or "not known" in s for s in found["sentences"])
    assert (found["headlines"], found["closure"], found["whatif"], found["changes"]) == ([], [], [], [])
    assert found["basis"] == ""
    assert any(text.startswith("TPOT and throughput") for text in found["missing"])
    assert any("no breakdown of a trace" in text for text in found["missing"])
    assert any("config.json is not known" in text for text in found["missing"])


def test_load_alone_gives_the_number(make_run):
    found = plain(summarise(make_run({"levels": LEVELS}, **GPU)))
    assert found["sentences"][0].startswith("One token takes 8.64 ms")
    assert found["efficiency"]["percent"] == pytest.approx(16.7, abs=0.05)
    assert found["closure"] == []


def test_a_trace_alone_closes_on_its_own_step(make_run):
    found = plain(summarise(make_run({"steps": STEPS, "breakdown": BREAKDOWN}, **GPU)))
    assert (found["closure"][-1]["part"], found["closure"][-1]["ms"]) == ("step in the trace", pytest.approx(8.7))
    assert sum(row["ms"] for row in found["closure"][:-1]) == pytest.approx(8.7)
    assert "The number is missing" in found["sentences"][0]
    assert "% of the step)" in found["sentences"][2]


def test_waiting_is_that_of_the_rank_whose_step_is_shown(make_run):
    waits = [
        {"capture": "c1", "rank": rank, "op": "allreduce", "calls": 123, "wait_ms": wait_ms, "transfer_ms": 0.4}
        for rank, wait_ms in ((0, 0.5), (1, 0.0))
    ]
    found = plain(
        summarise(make_run({"levels": LEVELS, "steps": STEPS, "breakdown": BREAKDOWN, "waits": waits}, **GPU))
    )
    parts = {row["part"]: row["ms"] for row in found["closure"]}
    assert parts["communication: waiting for other ranks"] == 0.5
    assert parts["communication: transfer"] == pytest.approx(0.96 - 0.5)
    assert "0.50 ms of waiting for other ranks" in found["sentences"][1]
    assert "on rank 0" in found["basis"]
    assert "waiting is 0.00 to 0.50 ms over 2 ranks" in found["basis"]


def test_a_cpu_run_is_labelled(make_run):
    environment = {"gpus": [], "cpu": "Some CPU"}
    gloo = [row | {"backend": "gloo", "comparable": False} for row in COLLECTIVES]
    kernels = [{"capture": "c1", "name": "aten::mm"}]
    tables = {"levels": LEVELS, "steps": STEPS, "breakdown": BREAKDOWN, "kernels": kernels, "collectives": gloo}
    found = plain(summarise(make_run(tables, **(GPU | {"environment": environment}))))
    assert found["sentences"][0].endswith("measured on a CPU, it says nothing of a GPU.")
    assert "CPU operators by their own time, 8.10 ms in all: there are no GPU kernels" in found["basis"]
    assert found["sentences"][2].startswith("Next, on this CPU only: GEMM, with a ceiling of 2.50 ms a step")
    assert found["whatif"] == []
    assert any("DRAM efficiency: not computed for a CPU" in text for text in found["missing"])
    assert found["closure"][0]["part"] == "GEMMs"  # no bound on a CPU


def test_prices_are_of_collectives_over_as_many_ranks_as_the_server_has(make_run):
    def facts_of(*worlds):
        rows = [row | {"world": w, "time_us_median": row["time_us_median"] * w} for w in worlds for row in COLLECTIVES]
        tables = {"levels": LEVELS, "steps": STEPS, "breakdown": BREAKDOWN, "collectives": rows}
        return gather(make_run(tables, **GPU))

    both, other = facts_of(8, 2), facts_of(8)
    assert (both.burst.us, both.alltoall.us) == (14.0, 12.0)
    assert both.link_us == pytest.approx(14336 * 800 / 2**26)
    assert both.burst.source == "burst, nccl graph, 122 calls, 2 ranks"
    assert {way: [price.us for price in prices] for way, prices in both.allreduces.items()} == {
        "nccl graph": [14.0], "custom graph": [8.0]
    }  # fmt: skip
    assert not any("prices of collectives" in text for text in both.missing)
    assert (other.burst, other.alltoall, other.link_us, other.allreduces) == (None, None, None, {})
    said = "prices of collectives: measured over 8 ranks, the server's tensor parallel is 2"
    assert said in other.missing


def test_changes_are_against_the_newest_comparable_run(make_run):
    first = make_run({"levels": LEVELS}, **GPU, created="2026-01-01T00:00:00+00:00")
    make_run({"levels": LEVELS}, **(GPU | {"environment": {"gpus": [{"name": "NVIDIA L40S"}]}}), created="2026-01-02")
    found = plain(summarise(make_run({"levels": LEVELS}, **GPU)))
    assert found["previous"] == first.path.name
    assert {row["verdict"] for row in found["changes"]} == {"unclear"}
    assert any(text.startswith("verdicts on changes") for text in found["missing"])
    assert math.isclose(found["changes"][0]["change_percent"], 0, abs_tol=1e-9)


def test_no_comparable_run_says_why(make_run):
    make_run({"levels": LEVELS}, **(GPU | {"environment": {"gpus": [{"name": "NVIDIA L40S"}]}}), created="2026-01-02")
    found = summarise(make_run({"levels": LEVELS}, **GPU))
    assert "what changed: 1 earlier, none comparable: hardware differs" in " ".join(found["missing"])


def test_a_config_of_an_unknown_family_is_told(make_run, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    server = GPU["server"] | {"config": str(tmp_path / "config.json")}
    found = summarise(make_run({"levels": LEVELS}, **(GPU | {"server": server})))
    assert any("MambaForCausalLM" in text for text in found["missing"])


def test_published_campaigns():
    found = references()
    kimi, glm = found["rtx-pro-6000-kimi-k2.5"], found["glm-5-sglang"]
    assert sum(kimi["by_operation"].values()) == pytest.approx(21.68)
    assert sum(kimi["by_role"].values()) == pytest.approx(21.70)
    assert (glm["shares"]["dtype_cast"], glm["headline"]["dram_efficiency_percent"]) == (69, 3.4)


def test_history_of_comparable_runs(make_run):
    days = [(8.7, "2026-01-01"), (8.6, "2026-01-02"), (8.65, "2026-01-03")]
    tables = {"steps": STEPS, "breakdown": BREAKDOWN}
    for tpot_ms, day in days:
        make_run(tables | {"levels": [LEVELS[0] | {"tpot_ms_mean": tpot_ms}]}, **GPU, created=day)
    other = GPU | {"environment": {"gpus": [{"name": "NVIDIA L40S"}]}}
    make_run(tables | {"levels": LEVELS}, **other, created="2026-01-04")
    newer = GPU | {"environment": GPU["environment"] | {"vllm_version": "0.33"}}
    run = make_run(tables | {"levels": LEVELS}, **newer)
    make_run(tables | {"levels": LEVELS}, **newer, created="2099-01-01")  # a later run is none of its history
    found = plain(summarise(run))
    assert [row["value"] for row in found["history"]] == [8.7, 8.6, 8.65, 8.64]
    assert found["history"][-1] == {
        "run": run.path.name, "value": 8.64, "low": 8.6, "high": 8.7, "changed": "vllm_version: None to 0.33"
    }  # fmt: skip
    assert (found["history_of"]["title"], found["history_of"]["unit"]) == ("TPOT at C=1 over the runs", "ms")
    assert found["history_of"]["band"] == pytest.approx([8.65 - 0.248, 8.65 + 0.248], abs=0.01)
    steps = [row for row in found["steps_by_run"] if row["step"] == run.path.name]
    assert {row["category"]: row["ms"] for row in steps} == {**CATEGORIES, "idle": pytest.approx(8.7 - 7.41)}
    assert len({row["step"] for row in found["steps_by_run"]}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"environment": GPU["environment"] | {"flags": {"hf_overrides": OVERRIDES, "enforce_eager": True}}},
        {"environment": GPU["environment"] | {"vllm_version": "0.33"}},
        {"name": "another campaign"},
    ],
)
def test_the_band_is_of_the_newest_earlier_configuration_alone(make_run, change):
    def band():
        run = make_run({"levels": [LEVELS[0]]}, **(GPU | {"created": "2026-02-01"}))
        found = summarise(run)["history_of"]["band"]
        shutil.rmtree(run.path)
        return found

    def add(day, tpot_ms, **manifest):
        make_run({"levels": [LEVELS[0] | {"tpot_ms_mean": tpot_ms}]}, **(GPU | manifest), created=f"2026-01-0{day}")

    add(1, 10.0)
    add(2, 10.02)
    add(3, 20.0, **change)
    add(4, 20.02, **change)
    assert band() is None  # two restarts of a configuration are too few, whatever else was run
    add(5, 19.98, **change)
    half = 4.303 * 0.02 * (4 / 3) ** 0.5  # Student's t of two degrees of freedom
    assert band() == pytest.approx([20 - half, 20 + half], abs=0.001)
    add(6, 9.98)
    assert band() == pytest.approx([10 - half, 10 + half], abs=0.001)


def test_a_damaged_neighbour_does_not_stop_the_findings(make_run):
    for number, damage in enumerate(("manifest.json", "levels.parquet")):
        neighbour = make_run({"levels": LEVELS}, **GPU, created=f"2026-01-0{number + 1}")
        (neighbour.path / damage).write_text("{")
    found = summarise(make_run({"levels": LEVELS}, **GPU))
    assert "what changed: there is no earlier run" in found["missing"]


def test_a_capture_at_another_concurrency_closes_on_its_own_step(make_run):
    steps = [row for row in STEPS if row["capture"] == "c64"]
    run = make_run({"levels": LEVELS, "steps": steps, "breakdown": BREAKDOWN}, **GPU)
    found = plain(summarise(run))
    assert found["closure"][-1]["ms"] == pytest.approx(8.7)  # not the TPOT of 8.64 ms at C=1
    assert found["closure"][0]["part"] == "GEMMs"
    assert found["whatif"] == []
    assert any("measured at C=1, the capture at C=64" in text for text in found["missing"])


def test_gemms_that_take_longer_alone_than_the_step_are_flagged(make_run):
    names = [gemm["name"] for gemm in load_model(CONFIG).step(tp=2).gemms]
    gemm = [
        {"name": name, "m": 1, "state": state, "calls_per_step": 61, "time_us_median": 20.0, "status": "ok"}
        for name in names
        for state in ("cold", "warm")
    ]
    found = plain(summarise(make_run({"levels": LEVELS, "gemm": gemm}, **GPU)))
    assert found["micro"][0]["micro_ms"] == pytest.approx(13 * 61 * 0.02)
    assert [row["finding"] for row in found["contradictions"]] == ["parts timed alone exceed the step"]
