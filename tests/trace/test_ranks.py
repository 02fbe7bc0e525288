"""Ranks and sessions are told apart; collectives are paired, and waiting is told from transfer."""

import gzip
import json
import re
import shutil

import pytest
from generate import BASE_NS, DELAYS_NS, write_capture

from k25lib.errors import UsageError
from k25lib.trace import ranks
from k25lib.trace.breakdown import breakdown

SMALL = {"decode": 8, "prefill": 1, "layers": 10, "allreduces": 21}


def peeks(*names, rank=None, process=None):
    return [{"path": f"/x/{name}", "rank": rank, "process": process, "start_ns": 0} for name in names]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json.gz", "dp1_pp0_tp0_dcp0_ep1_rank0.2.pt.trace.json.gz"], [0, 1]),
        (
            [f"dp{d}_pp0_tp{t}_dcp0_ep{2 * d + t}_rank{t}.1.pt.trace.json.gz" for d in (0, 1) for t in (0, 1)],
            [0, 1, 2, 3],
        ),
        (["h18_no_distinfo_rank3.1767189312003.pt.trace.json.gz"], [3]),
        (["rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz"], [34]),
        (["1700000000.5-TP-0.trace.json.gz", "1700000000.5-TP-1.trace.json.gz"], [0, 1]),
        (["pp0_tp1_rank1.pt.trace.json", "pp1_tp0_rank2.pt.trace.json"], [1, 2]),
        (["host_123.456.pt.trace.json.gz", "host_124.456.pt.trace.json.gz"], [0, 1]),
    ],
)
def test_rank_from_the_name(names, found):
    known = peeks(*names)
    ranks.identify(known)
    assert [p["rank"] for p in known] == found
    assert all(p["rank_from"] != "distributedInfo" for p in known)


def test_distributed_info_is_believed_first():
    known = peeks("dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json.gz", rank=7)
    ranks.identify(known)
    assert (known[0]["rank"], known[0]["rank_from"]) == (7, "distributedInfo")


def test_the_process_name_helps_where_the_file_name_says_nothing():
    known = peeks("a.json.gz", process="VLLM::Worker_TP3_EP3")
    ranks.identify(known)
    assert (known[0]["rank"], known[0]["rank_from"]) == (3, "process name")


def test_a_known_delay_is_waiting_of_the_other_rank(tmp_path):
    """Rank 1 comes 1.25 us late to every collective: rank 0 waits that long in each, rank 1 not at all."""
    write_capture(tmp_path, 2, (0, 1250), **SMALL)
    result = breakdown([tmp_path])
    skew = {(row["rank"], row["op"]): row for row in result["skew"]}
    transfer_ms = 21 * (7000 + DELAYS_NS - 1250) / 1e6
    assert skew[0, "allreduce"]["calls"] == skew[1, "allreduce"]["calls"] == 21
    assert skew[0, "allreduce"]["transfer_ms"] == pytest.approx(transfer_ms)
    assert skew[1, "allreduce"]["transfer_ms"] == pytest.approx(transfer_ms)
    assert skew[0, "allreduce"]["wait_ms"] == pytest.approx(21 * 1250 / 1e6)
    assert skew[1, "allreduce"]["wait_ms"] == pytest.approx(0)
    assert skew[0, "allreduce"]["late_us"] == pytest.approx(0)
    assert skew[1, "allreduce"]["late_us"] == pytest.approx(1.25)
    row = next(r for r in result["collectives"] if r["op"] == "allreduce")
    assert row["wait_ms"] == pytest.approx(21 * 625 / 1e6)
    assert row["ms"] == pytest.approx(row["wait_ms"] + row["transfer_ms"])


def test_base_times_are_aligned(tmp_path):
    """The same moments on files with other bases: nothing changes but the text."""
    write_capture(tmp_path, 2, (0, 1250), **SMALL)
    other, _ = write_capture(
        tmp_path / "b", 2, (0, 1250), base_ns=BASE_NS - 10**9, start_ns=5_000_001_000_000_000, **SMALL
    )
    same = breakdown([tmp_path / other[0].name, other[1]])
    assert same["collectives"] == breakdown(sorted(tmp_path.glob("*.gz")))["collectives"]


def test_clocks_that_differ_are_told_and_taken_off(tmp_path):
    write_capture(tmp_path, 2, (0, 1250), **SMALL)
    other, _ = write_capture(tmp_path / "b", 2, (0, 1250), start_ns=5_000_000_003_000_000, **SMALL)
    result = breakdown([sorted(tmp_path.glob("*.gz"))[0], other[1]])
    skew = {(row["rank"], row["op"]): row for row in result["skew"]}
    assert skew[1, "allreduce"]["clock_us"] == pytest.approx(3000)
    assert skew[1, "allreduce"]["late_us"] == pytest.approx(1.25)
    assert any(loss["kind"] == "collectives" and "apart" in loss["detail"] for loss in result["losses"])


def test_a_missing_rank_is_told(tmp_path):
    paths, _ = write_capture(tmp_path, 3, **SMALL)
    paths[1].unlink()
    result = breakdown([tmp_path])
    assert result["capture"]["ranks"] == [0, 2]
    assert result["capture"]["missing_ranks"] == [1]
    assert result["capture"]["world_size"] == 3
    assert any(loss["kind"] == "missing ranks" for loss in result["losses"])


def test_a_rank_that_lost_its_end_is_paired_by_time(tmp_path):
    paths, _ = write_capture(tmp_path, 2, (0, 1250), **SMALL)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[: int(len(data) * 0.7)])
    result = breakdown([tmp_path])
    skew = {(row["rank"], row["op"]): row for row in result["skew"]}
    assert {loss["kind"] for loss in result["losses"]} >= {"truncated", "collectives"}
    assert skew[0, "allreduce"]["wait_ms"] == pytest.approx(21 * 1250 / 1e6)


def test_two_files_that_claim_one_rank(damaged):
    result = breakdown(sorted(damaged.glob("h19*")))
    assert result["capture"]["files"] == 2
    assert [clash["rank"] for clash in result["capture"]["clashes"]] == [0]
    assert len(result["capture"]["clashes"][0]["files"]) == 2
    assert [row["rank"] for row in result["per_step"] if row["batch"] == "all"] == [0, 0]
    sums = [row["kernel_sum_ms"] for row in result["per_step"] if row["batch"] == "all"]
    assert sums == pytest.approx([0.782195, 0.738957])


def test_sessions_of_one_folder_are_not_merged(tmp_path, c64):
    write_capture(tmp_path, 2, **SMALL)
    write_capture(
        tmp_path,
        2,
        name="dp0_pp0_tp{r}_dcp0_ep{r}_rank{r}.1999{r}",
        start_ns=5_001_000_000_000_000,
        **SMALL | {"decode": 5},
    )
    for file in c64.glob("*.gz"):
        shutil.copy(file, tmp_path)
    result = breakdown([tmp_path])
    sessions = result["capture"]["sessions"]
    assert [len(s["files"]) for s in sessions] == [2, 2, 2]
    assert [s["ranks"] for s in sessions] == [[0, 1]] * 3
    assert [s["used"] for s in sessions] == [False, False, True]
    assert result["steps"]["by_batch"] == {"5": 1, "44": 1, "62": 1, "63": 1, "64": 3}
    assert next(loss for loss in result["losses"] if loss["kind"] == "other sessions")["count"] == 4
    assert [breakdown([tmp_path], session=i)["steps"]["decode"] for i in (0, 1, 2)] == [8, 5, 7]
    with pytest.raises(UsageError, match="numbered from 0"):
        breakdown([tmp_path], session=3)


def test_captures_in_folders_of_one_folder_are_not_merged(tmp_path):
    write_capture(tmp_path / "c1", 2, **SMALL)
    write_capture(tmp_path / "c64", 2, batch=64, **SMALL)
    result = breakdown([tmp_path])
    assert [len(s["files"]) for s in result["capture"]["sessions"]] == [2, 2]
    assert result["capture"]["files"] == 2
    assert result["capture"]["clashes"] == []


def test_the_real_capture(c1):
    result = breakdown([c1])
    allreduce = next(row for row in result["collectives"] if row["op"] == "allreduce")
    assert allreduce["calls"] == 123
    assert allreduce["ms"] == pytest.approx(allreduce["wait_ms"] + allreduce["transfer_ms"])
    assert 0.8 < allreduce["transfer_ms"] < 0.97
    assert all(abs(row["clock_us"]) < 2 for row in result["skew"])


def test_data_parallel_ranks_pair_decode_with_dummy_steps(dp):
    """A decode step of one rank is a dummy pass of the other: the session's calls pair, not the decode steps'."""
    result = breakdown([dp])
    rows = {row["op"]: row for row in result["collectives"]}
    assert set(rows) == {"allgather", "reducescatter"}
    assert rows["allgather"]["calls"] == rows["reducescatter"]["calls"] == 20
    for row in rows.values():
        assert row["ms"] == pytest.approx(row["wait_ms"] + row["transfer_ms"])
        assert row["transfer_ms"] < 0.5 * row["ms"]
    assert result["capture"]["parallel"] == {"dp": 2, "pp": 1, "tp": 1, "ep": True}


def test_replicas_of_tensor_parallel_groups(tmp_path):
    """Two data-parallel replicas of two ranks each: an AllReduce is one of a replica, not of all four ranks."""
    for d in (0, 1):
        name = f"dp{d}_pp0_tp{{r}}_dcp0_ep0_rank{{r}}.9"
        paths, _ = write_capture(
            tmp_path / f"d{d}", 2, (0, 1000), name=name, start_ns=5_000_000_000_000_000 + d * 4_321_000, **SMALL
        )
        for r, path in enumerate(paths):
            text = gzip.decompress(path.read_bytes()).replace(
                f'"rank": {r}, "world_size": 2'.encode(), f'"rank": {2 * d + r}, "world_size": 4'.encode()
            )
            (tmp_path / path.name).write_bytes(gzip.compress(text, 1))
            path.unlink()
        (tmp_path / f"d{d}").rmdir()
    result = breakdown([tmp_path])
    assert result["capture"]["ranks"] == [0, 1, 2, 3]
    waits = [row["wait_ms"] for row in result["skew"] if row["op"] == "allreduce"]
    assert waits == pytest.approx([21 * 1000 / 1e6, 0, 21 * 1000 / 1e6, 0])


def test_names_decide_where_every_replica_counts_from_0():
    """Replicas of a dense model are worlds of their own: distributedInfo says rank 0 (and 1) in each."""
    names = [f"dp{d}_pp0_tp{t}_dcp0_ep0_rank{t}.1.pt.trace.json.gz" for d in (0, 1) for t in (0, 1)]
    known = peeks(*names)
    for i, p in enumerate(known):
        p["rank"] = i % 2
    ranks.identify(known)
    assert [p["rank"] for p in known] == [0, 1, 2, 3]
    assert {p["rank_from"] for p in known} == {"file name"}
    assert "several: the name decides" in known[3]["doubt"]


def test_a_copy_beside_a_named_file_is_a_clash_of_ranks(tmp_path):
    paths, _ = write_capture(tmp_path, 2, **SMALL)
    shutil.copy(paths[0], tmp_path / "copy.pt.trace.json.gz")
    result = breakdown([tmp_path])
    assert result["capture"]["ranks"] == [0, 0, 1]
    assert [loss["kind"] for loss in result["losses"]] == ["rank clash"]


def test_a_name_that_contradicts_distributed_info_is_told(tmp_path):
    paths, _ = write_capture(tmp_path, 2, **SMALL)
    paths[0].rename(tmp_path / "x")
    paths[1].rename(paths[0])
    (tmp_path / "x").rename(paths[1])
    result = breakdown([tmp_path])
    details = [loss["detail"] for loss in result["losses"] if loss["kind"] == "rank in doubt"]
    assert details == [
        f"the name says rank {1 - rank}, distributedInfo {rank}: distributedInfo is believed" for rank in (0, 1)
    ]


def test_folders_of_hosts_whose_clocks_are_seconds_apart(tmp_path):
    paths, _ = write_capture(tmp_path / "a", 2, (0, 1250), **SMALL)
    later, _ = write_capture(tmp_path / "b", 2, (0, 1250), start_ns=5_000_005_000_000_000, **SMALL)
    before = breakdown([tmp_path / "a"])["collectives"]
    paths[1].unlink()
    later[0].unlink()
    result = breakdown([tmp_path / "a", tmp_path / "b"])
    assert result["capture"]["ranks"] == [0, 1]
    for row, same in zip(result["collectives"], before, strict=True):
        assert row["wait_ms"] == pytest.approx(same["wait_ms"], abs=1e-6)
    assert {loss["kind"] for loss in result["losses"]} == {"collectives"}


def test_a_folder_of_traces_whose_names_say_nothing(tmp_path):
    paths, _ = write_capture(tmp_path / "a", 2, **SMALL)
    for i, path in enumerate(paths):
        (tmp_path / f"worker{i}.json").write_bytes(gzip.decompress(path.read_bytes()))
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert breakdown([tmp_path])["capture"]["ranks"] == [0, 1]


@pytest.mark.parametrize("absolute", [False, True])
def test_gpus_of_one_process_are_a_rank_each(tmp_path, absolute):
    """One process drives two GPUs: one file, with the streams' numbers twice."""
    paths, _ = write_capture(tmp_path / "a", 2, (0, 1250), cpu_marks=False, **SMALL)
    before = breakdown([tmp_path / "a"])
    data, other = (json.loads(gzip.decompress(path.read_bytes())) for path in paths)
    for e in other["traceEvents"]:
        args = e.get("args", {})
        for key in {"correlation", "External id"} & set(args):
            args[key] += 10**6
        if e.get("cat") in ("kernel", "gpu_user_annotation"):
            e["pid"] = 1
        if e.get("cat") == "kernel":
            args["device"] = 1
    data["traceEvents"] += other["traceEvents"]
    del data["distributedInfo"]
    text = json.dumps(data)
    if absolute:  # read exactly, by another event type
        text = re.sub(r'"ts": (\d{13})\.', lambda m: f'"ts": {int(m[1]) + 1_762_000_000_000_000}.', text)
        text = text.replace("baseTimeNanoseconds", "other")
    (tmp_path / "both.pt.trace.json").write_text(text)
    result = breakdown([tmp_path / "both.pt.trace.json"])
    assert [row["device"] for row in result["capture"]["devices"]] == [0, 1]
    assert (result["capture"]["ranks"], result["capture"]["parallel"]["tp"]) == ([0, 1], 2)
    assert [(loss["kind"], loss["count"]) for loss in result["losses"]] == [("several devices", 2)]
    for ours, theirs in zip(result["per_step"], before["per_step"], strict=True):
        assert {**ours, "file": ""} == {**theirs, "file": ""}
    assert result["collectives"] == before["collectives"]


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_waiting_and_transfer_add_up_however_much_is_lost(tmp_path, share):
    """A rank that lost calls, or all of them, does not take time out of the sum of the two parts."""
    paths, _ = write_capture(tmp_path, 2, (0, 1250), **SMALL)
    text = gzip.decompress(paths[1].read_bytes())
    paths[1].write_bytes(gzip.compress(text[: int(len(text) * share)]))
    result = breakdown([tmp_path])
    assert result["collectives"]
    for row in [*result["collectives"], *result["skew"]]:
        if row["wait_ms"] is not None:
            assert row["ms"] == pytest.approx(row["wait_ms"] + row["transfer_ms"])
            assert row["wait_ms"] >= 0


@pytest.mark.parametrize("value", [5, 10**18, None, "x", -3])
def test_a_few_odd_device_numbers_make_no_rank(tmp_path, value):
    (path, *_), _ = write_capture(tmp_path, 1, **SMALL)
    before = breakdown([path])
    data = json.loads(gzip.decompress(path.read_bytes()))
    for e in [e for e in data["traceEvents"] if e.get("cat") == "kernel"][:3]:
        e["args"]["device"] = value
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    result = breakdown([path])
    assert result["per_step"] == before["per_step"]
    assert result["losses"] == []


def test_a_file_named_twice_is_one_file(tmp_path):
    paths, _ = write_capture(tmp_path, 2, **SMALL)
    (tmp_path / "link.pt.trace.json.gz").symlink_to(paths[0])
    result = breakdown([tmp_path, *paths, tmp_path / "link.pt.trace.json.gz"])
    assert (result["capture"]["ranks"], result["capture"]["files"], result["losses"]) == ([0, 1], 2, [])
    with pytest.raises(UsageError, match="an empty path"):
        breakdown([""])


@pytest.mark.parametrize("ahead_ns", [0, 300_000, -300_000, 5_000_000_000])
@pytest.mark.parametrize("lost", ["start", "end"])
def test_a_step_fewer_on_another_clock(tmp_path, ahead_ns, lost):
    """A clock that is off by most of a step does not pair the calls of one step with those of the next."""
    paths, _ = write_capture(tmp_path, 2, (0, 1250), others=2, **SMALL)
    before = {row["op"]: row["wait_ms"] for row in breakdown([tmp_path])["collectives"]}
    data = json.loads(gzip.decompress(paths[1].read_bytes()))
    marks = sorted(e["ts"] for e in data["traceEvents"] if e.get("cat") == "gpu_user_annotation")
    first, last = marks[2] - 1, marks[-2] - 1
    inside = (lambda ts: ts >= first) if lost == "start" else (lambda ts: ts < last)
    gpu = ("kernel", "gpu_user_annotation")
    data["traceEvents"] = [e for e in data["traceEvents"] if e.get("cat") not in gpu or inside(e["ts"])]
    for e in data["traceEvents"]:
        e["ts"] = round(e["ts"] + ahead_ns / 1000, 3)
    paths[1].write_bytes(gzip.compress(json.dumps(data).encode()))
    result = breakdown([tmp_path])
    assert {row["op"]: row["wait_ms"] for row in result["collectives"]} == pytest.approx(before, rel=0.02)
    clocks = [row["clock_us"] for row in result["skew"] if row["rank"] == 1]
    assert clocks == pytest.approx([ahead_ns / 1000] * 2, abs=1)
    assert any("unequal counts" in loss["detail"] for loss in result["losses"])
