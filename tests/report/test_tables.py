"""Numbers and headings as a reader sees them."""

import pandas as pd
import pytest

from k25lib.report import tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.1, "12.1"), (0.0313, "0.0313"), (1536, "1,536"), (1536.2, "1,536"), (65536.0, "65,536"), (0, "0"),
        (-3.54, "-3.54"),
        (float("nan"), "–"), (float("inf"), "inf"), (None, "–"), (True, "yes"), ([1, 2.5], "1, 2.5"),
        (1.5e-7, "1.500e-07"),
        (9.9996, "10"), ("text", "text"), (pd.NA, "–"), ({"a": 1}, "a 1"),
    ],
)  # fmt: skip
def test_cell(value, text):
    assert tables.cell(value) == text


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("time_us_median", "time median (us)"), ("output_tok_s", "output (tok/s)"), ("ms", "ms"), ("percent", "%"),
        ("busbw_gb_s", "busbw (GB/s)"), ("tpot_ms_p99", "TPOT p99 (ms)"), ("calls_per_step", "calls per step"),
        ("concurrency", "concurrency"), ("bytes", "bytes"), ("steady_s", "steady (s)"),
        ("percent_of_peak", "% of peak"), ("median", "median"),
        ("tpot_ms_low..tpot_ms_high", "TPOT interval (ms)"), ("low_percent..high_percent", "interval (%)"),
    ],
)  # fmt: skip
def test_heading_has_the_unit(column, text):
    assert tables.heading(column) == text


def test_table_says_what_it_leaves_out_and_drops_empty_columns():
    made = tables.table([{"a": n, "b": None, "c": "x"} for n in range(5)], rows=2)
    assert (made["head"], made["rows"], made["left_out"]) == (["a", "c"], [["0", "x"], ["1", "x"]], 3)
    assert made["numeric"] == [True, False]
    assert tables.table([]) is None


def test_kernels_are_the_longest_of_each_capture_with_names_cut(bare_run):
    rows = [
        {"capture": c, "rank": r, "name": f"{n:03}" + "k" * 300, "ms": n + r / 2}
        for c in "ba"
        for r in (0, 1)
        for n in range(20)
    ]
    bare_run.save("kernels", rows)
    (kernels,) = tables.of_run(bare_run)
    assert [row[0] for row in kernels["rows"]] == ["a"] * 12 + ["b"] * 12
    assert [row[2] for row in kernels["rows"][:2]] == ["19.25", "18.25"]
    assert (kernels["left_out"], kernels["whole"]) == (56, 80)
    assert kernels["rows"][0][1] == "019" + "k" * 107 + "… (193 more characters)"


def test_eight_ranks_are_one_row_with_least_and_most():
    rows = [
        {"capture": "c1", "rank": r, "op": op, "ms": ms + r, "wait_ms": None}
        for op, ms in (("a", 1.0), ("b", 9.0))
        for r in range(8)
    ]
    made = tables.over_ranks(pd.DataFrame(rows), ["capture", "op"])
    assert made.to_dict("records") == [
        {"capture": "c1", "op": "b", "ms": 12.5, "ms_least": 9.0, "ms_most": 16.0},
        {"capture": "c1", "op": "a", "ms": 4.5, "ms_least": 1.0, "ms_most": 8.0},
    ]
    assert tables.over_ranks(pd.DataFrame(rows), ["capture", "op"], "wait_ms")["wait_ms_most"].isna().all()


def test_a_rank_without_a_row_counts_as_nothing():
    rows = [{"capture": "c1", "rank": rank, "name": "a", "calls": 2.0, "ms": 1.0, "percent": 50.0} for rank in range(8)]
    rows.append({"capture": "c1", "rank": 0, "name": "b", "calls": 4.0, "ms": 0.8, "percent": 44.0})
    a, b = tables.over_ranks(pd.DataFrame(rows), ["capture", "name"]).to_dict("records")
    assert (a["ms"], a["ms_least"], a["ms_most"], a["calls"]) == (1.0, 1.0, 1.0, 2.0)
    assert (b["ms_least"], b["ms_most"]) == (0.0, 0.8)
    assert (b["ms"], b["calls"], b["percent"]) == (pytest.approx(0.1), pytest.approx(0.5), pytest.approx(5.5))


def test_two_columns_as_an_interval():
    made = tables.table(
        [{"low_ms": 1.25, "high_ms": 2.0}, {"low_ms": None, "high_ms": None}], columns=["low_ms..high_ms"]
    )
    assert (made["head"], made["rows"]) == (["interval (ms)"], [["1.25 – 2"], ["–"]])


def test_tables_of_a_run_are_sorted_and_named(bare_run):
    bare_run.save("levels", [{"concurrency": 16, "output_tok_s": 900.0}, {"concurrency": 1, "output_tok_s": 81.0}])
    (levels,) = tables.of_run(bare_run)
    assert levels["name"] == "levels"
    assert [row[0] for row in levels["rows"]] == ["1", "16"]
