"""Comparison of runs: verdicts, false alarms by simulation, and the command."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k25lib.cli import main
from k25lib.findings import compare
from k25lib.findings.spread import Spread, change, pooled_spread, restarts_for, smallest_visible
from k25lib.run import Run

SERVER = {"kind": "external", "model": "kimi", "tp": 8}
ENVIRONMENT = {"gpus": [{"name": "NVIDIA H200"}], "vllm_version": "0.26.0", "driver": "580"}


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.setenv("K25_RUNS", str(tmp_path / "runs"))

    def _make(tpot_ms, tok_s=1000.0, levels=None, campaign="test", **manifest):
        run = Run.create(campaign, **{"server": SERVER, "environment": ENVIRONMENT, **manifest})
        run.save(
            "levels",
            levels
            or [
                {"concurrency": 1, "tpot_ms_mean": tpot_ms, "output_tok_s": 1e3 / tpot_ms, "ttft_ms_p50": 50.0},
                {"concurrency": 8, "tpot_ms_mean": 2 * tpot_ms, "output_tok_s": tok_s, "ttft_ms_p50": 60.0},
            ],
        )
        return run

    return _make


def simulate(shift, restarts, tries=800, seed=1):
    """Share of verdicts better or worse when `after` is slower by `shift`: 1 % between restarts, 3 % of them +4 %."""
    rng = np.random.default_rng(seed)

    def run(n, by=0.0):
        return np.exp(rng.normal(np.log(20 * (1 + by)), 0.01, n)) * (1 + (rng.random(n) < 0.03) * 0.04)

    hits = 0
    for _ in range(tries):
        history = [run(restarts, rng.uniform(-0.2, 0.2)) for _ in range(4)]
        before, after = run(restarts), run(restarts, shift)
        spread = pooled_spread([*history, before, after])
        hits += change(before, after, spread)["verdict"] in ("better", "worse")
    return hits / tries


@pytest.mark.parametrize("restarts", [2, 3, 5])
def test_false_alarms_are_as_rare_as_promised(restarts):
    assert simulate(0.0, restarts) <= 0.05 + 2.5 * (0.05 * 0.95 / 800) ** 0.5


def test_a_change_of_five_percent_is_found_by_three_restarts():
    assert simulate(0.05, 3, tries=400) > 0.95


def test_a_change_of_the_smallest_visible_size_is_seen_four_times_in_five():
    spread = Spread(0.012, 20)
    visible = smallest_visible(spread, 3, 3)
    rng, hits = np.random.default_rng(2), 0
    for _ in range(800):
        sd = 0.012 * np.sqrt(rng.chisquare(20) / 20)
        before, after = (np.exp(rng.normal(np.log(m), 0.012, 3)) for m in (1, 1 + visible))
        hits += change(before, after, Spread(sd, 20))["verdict"] == "worse"
    assert 0.75 < hits / 800 < 0.9


values = st.lists(st.floats(1.0, 100.0), min_size=1, max_size=5)


@given(values, values, st.floats(1e-4, 0.1), st.integers(2, 30))
def test_swapping_the_sides_turns_the_verdict_around(before, after, sd, df):
    there = change(before, after, Spread(sd, df))
    back = change(after, before, Spread(sd, df))
    assert there["low_percent"] <= there["change_percent"] <= there["high_percent"]
    assert (1 + there["change_percent"] / 100) * (1 + back["change_percent"] / 100) == pytest.approx(1)
    if "worse" in (there["verdict"], back["verdict"]) and min(abs(r["change_percent"]) for r in (there, back)) > 1:
        assert {there["verdict"], back["verdict"]} == {"worse", "better"}


def test_no_change_says_what_would_have_been_seen():
    row = {"metric": "TPOT at C=1", "unit": "ms", "before": 10.0, "after": 10.2, "lower_is_better": True}
    row |= change([10.0] * 3, [10.2] * 3, Spread(0.03, 20)) | {"restarts_for_5_percent": 7}
    assert compare.sentence(row).startswith(
        "TPOT at C=1: 10 to 10.2 ms (+2.0 %, -3.1 to +7.3 %): no change seen (would have"
    )
    assert compare.sentence(row).endswith("; to see 5 %: 7 restarts a side)")


def test_restarts_for_a_wanted_change():
    spread = Spread(0.01, 20)
    n = restarts_for(spread, 0.03)
    assert smallest_visible(spread, n, n) <= 0.03 < smallest_visible(spread, n - 1, n - 1)
    assert restarts_for(Spread(5.0, 20), 0.01) is None
    assert restarts_for(Spread(0.02, 1), 0.05) == restarts_for(Spread(0.02, 6), 0.05) == 4


@pytest.mark.parametrize(
    ("after", "lower_is_better", "verdict"),
    [(11.0, True, "worse"), (9.0, True, "better"), (11.0, False, "better"), (10.001, True, "same")],
)
def test_verdicts(after, lower_is_better, verdict):
    assert change([10.0], [after], Spread(0.002, 20), lower_is_better)["verdict"] == verdict


def test_a_wide_spread_is_unclear_and_none_too():
    assert change([10.0], [10.5], Spread(0.05, 4))["verdict"] == "unclear"
    found = change([10.0], [20.0], None)
    assert (found["verdict"], found["low_percent"]) == ("unclear", None)


def test_no_restart_twice_is_said(make_run):
    found = compare.compare_runs([make_run(10.0)], [make_run(10.1)])
    assert found["verdict"] == "unclear"
    assert found["changes"][0]["text"].endswith("unclear, the spread between restarts is unknown")


def test_the_spread_comes_from_history(make_run):
    history = [make_run(t, git={"commit": "a"}) for t in (10.0, 10.02, 9.98, 10.01, 9.99)]
    before, after = make_run(10.0, git={"commit": "b"}), make_run(11.0, git={"commit": "c"})
    found = compare.compare_runs([before], [after], [*history, before, after])
    row = found["changes"][0]
    assert (row["metric"], row["verdict"], row["df"]) == ("TPOT at C=1", "worse", 4)
    assert row["low_percent"] < 10 < row["high_percent"]
    assert found["verdict"] == "worse"


def test_an_unclear_verdict_says_what_would_have_been_seen(make_run):
    sides = [[make_run(t) for t in times] for times in ((10.0, 10.4, 9.7), (10.1, 9.8, 10.3))]
    found = compare.compare_runs(*sides)
    seen = max(row["smallest_visible_percent"] for row in found["changes"] if row["headline"])
    assert found["verdict"] == "unclear" and 5 < seen < 30
    assert found["meaning"] == f"no change seen, one of {seen:.3g} % would have been"
    assert compare.compare_runs([make_run(10.0)], [make_run(10.1)])["meaning"] == ""  # no spread, nothing to promise


def test_another_flag_is_another_configuration(make_run):
    flags = [{"port": 1, "a": 1}, {"port": 2, "a": 1}, {"port": 3, "a": 2}]
    history = [make_run(t, environment={**ENVIRONMENT, "flags": f}) for t, f in zip((10, 10.1, 20), flags, strict=True)]
    assert compare.compare_runs([make_run(10.0)], [make_run(11.0)], history)["changes"][0]["df"] == 1


def test_runs_of_other_hardware_lend_no_spread(make_run):
    other = {"gpus": [{"name": "NVIDIA L40S"}]}
    history = [make_run(t, environment=other) for t in (10.0, 12.0)]
    assert compare.compare_runs([make_run(10.0)], [make_run(11.0)], history)["changes"][0]["df"] == 0


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"server": {**SERVER, "model": "glm"}}, "model differs: kimi against glm"),
        ({"server": {**SERVER, "tp": 4}}, "tensor parallel differs: 8 against 4"),
        ({"environment": {"gpus": [{"name": "NVIDIA L40S"}]}}, "hardware differs: NVIDIA H200 against NVIDIA L40S"),
        ({"macro": {"settings": {"input_tokens": 64}, "method": 1}}, "input tokens differs: 128 against 64"),
        ({"macro": {"settings": {"input_tokens": 128}, "method": 2}}, "method of the load differs: 1 against 2"),
    ],
)
def test_runs_that_cannot_be_compared_say_why(make_run, manifest, reason):
    macro = {"settings": {"input_tokens": 128}, "method": 1}
    before, after = make_run(10.0, macro=macro), make_run(10.0, **{"macro": macro, **manifest})
    found = compare.compare_runs([before], [after])
    assert not found["comparable"]
    assert reason in found["obstacles"][0]
    assert found["changes"] == []


def test_void_levels_are_left_out(make_run):
    levels = [
        {"concurrency": 1, "tpot_ms_mean": 10.0, "output_tok_s": 100.0, "void": None, "client_limited": False},
        {
            "concurrency": 8,
            "tpot_ms_mean": 10.0,
            "output_tok_s": 900.0,
            "void": "prefix cache",
            "client_limited": False,
        },
        {"concurrency": 16, "tpot_ms_mean": 10.0, "output_tok_s": 999.0, "void": None, "client_limited": True},
    ]
    found = compare.measurements(make_run(10.0, levels=levels))
    assert found["best throughput"] == 100.0
    assert not any("C=8" in metric or "C=16" in metric for metric in found)


def test_environment_differences_are_listed(make_run):
    before, after = make_run(10.0), make_run(10.0, environment={**ENVIRONMENT, "driver": "590"})
    rows = compare.compare_runs([before], [after])["environment"]
    assert rows == [{"what": "environment.driver", "before": "580", "after": "590"}]


def test_command(make_run, capsys):
    before = ",".join(str(make_run(t).path) for t in (10.0, 10.02, 9.98))
    after = ",".join(str(make_run(t).path) for t in (12.0, 12.02, 11.98))
    assert main(["compare", before, after, "--fail-over", "5%"]) == 3
    text = capsys.readouterr().out
    assert "verdict: worse (by the lines marked *)" in text
    assert "* TPOT at C=1: 10 to 12 ms (+20.0 %, " in text
    assert main(["compare", before, after, "--fail-over", "25%", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["comparable"], result["worse_beyond"]) == ("k25.compare/1", True, [])


def test_a_campaigns_name_stands_for_all_its_restarts(make_run, capsys):
    for name, times in (("old", (10.0, 10.02, 9.98)), ("new", (12.0, 12.02, 11.98))):
        for t in times:
            make_run(t, campaign=name)
    Run.create("new")
    assert main(["compare", "old", "new", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == "new: 1 of 4 runs measured nothing: left out\n"
    result = json.loads(said.out)
    assert (result["restarts"], result["changes"][0]["df"]) == ({"before": 3, "after": 3}, 4)
    assert result["changes"][0]["spread_percent"] == pytest.approx(0.19, abs=0.02)
    assert main(["compare", "old", "old"]) == 2


def test_command_refuses_nonsense(make_run, capsys):
    one, two = make_run(10.0).path, make_run(10.0, server={**SERVER, "model": "glm"}).path
    assert main(["compare", str(one), str(one)]) == 2
    assert main(["compare", str(one), "no-such-run"]) == 2
    for limit in ("much", "", " ", "5", "-1%", "nan%", "inf%", "2000%"):
        assert main(["compare", str(one), str(two), f"--fail-over={limit}"]) == 2
    assert main(["compare", str(one), str(two)]) == 1
    assert "model differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "text"), [("manifest.json", "{"), ("manifest.json", '{"macro": 3}'), ("levels.parquet", "PAR1")]
)
def test_a_damaged_run_is_one_line(make_run, capsys, file, text):
    one, two = make_run(10.0).path, make_run(10.0).path
    (two / file).write_text(text)
    for sides in ((one, two), (two, one)):
        assert main(["compare", *map(str, sides)]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert f"{two / file}" in said.err
    assert main(["compare", str(one), str(make_run(10.0).path)]) == 0  # a damaged neighbour is no obstacle
