"""The Kineto reader gets every whole event, invents none, and counts what was lost."""

import gzip
import json
import re
import zlib

import numpy as np
import pytest
from cut_short import read_unless_empty, whole_kernels
from generate import BASE_NS, FILL, complete, kernel, load, rank_events, wrap, write_capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k25lib.errors import K25Error
from k25lib.trace import kineto, windows

KERNELS = 468
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def kernels(trace):
    return int((trace.kind == 0).sum())


def losses(trace):
    return {loss["kind"]: loss["count"] for loss in trace.losses}


def rows(trace):
    """Every kernel as (name, absolute ns, ns, stream, correlation)."""
    return [
        (trace.names[n], trace.origin_ns + int(s), int(d), int(stream), int(c))
        for n, s, d, stream, c, kind in zip(
            trace.name_id, trace.start_ns, trace.dur_ns, trace.stream, trace.correlation, trace.kind, strict=True
        )
        if kind == 0
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small valid trace: its text, and its kernels by the standard library."""
    folder = tmp_path_factory.mktemp("base")
    (path,), _ = write_capture(folder, ranks=1, decode=3, prefill=0, layers=3, allreduces=7)
    truth = sorted(
        (
            e["name"],
            BASE_NS + round(e["ts"] * 1000),
            round(e["dur"] * 1000),
            e["args"]["stream"],
            e["args"]["correlation"],
        )
        for e in load(path)
        if e.get("cat") == "kernel"
    )
    return gzip.decompress(path.read_bytes()), truth


@pytest.fixture
def read(tmp_path):
    def read(data, name="t.pt.trace.json"):
        path = tmp_path / name
        path.write_bytes(data)
        return kineto.read(path)

    return read


def test_every_kernel_with_its_exact_times(base, read):
    text, truth = base
    trace = read(text)
    assert sorted(rows(trace)) == truth
    assert trace.losses == []
    assert trace.meta["rank"] == 0
    assert trace.meta["process"] == "VLLM::Worker_TP0"
    assert (np.diff(trace.start_ns) >= 0).all()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("h00_base", {}),
        ("h04_trailing_commas", {"repaired": 1}),
        ("h05_nan_inf", {"repaired": 2}),
        ("h08_invalid_escape", {"repaired": 1}),
        ("h09_invalid_utf8", {"repaired": 1}),
        ("h12_array_format", {}),
        ("h13_indent4", {}),
        ("h18_no_distinfo_rank3.1767189312003", {}),
        ("h19_duprank_a", {}),
        ("h19_duprank_b", {}),
        ("h25_integer_us", {"precision": 472}),
    ],
)
def test_damaged_files_lose_no_kernel(damaged, file, expected):
    trace = kineto.read(damaged / f"{file}.pt.trace.json.gz")
    assert kernels(trace) == KERNELS
    assert losses(trace) == expected


def test_a_cut_file_gives_its_whole_events_and_says_so(damaged):
    trace = kineto.read(damaged / "h02_truncated_gz.pt.trace.json.gz")
    assert kernels(trace) == 340
    assert trace.truncated
    assert losses(trace)["truncated"]


def test_no_events_is_an_error(damaged):
    with pytest.raises(K25Error, match="neither GPU events nor CPU operators"):
        kineto.read(damaged / "h28_empty.pt.trace.json.gz")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b", "not a Kineto trace|is empty"),
        (b"<html>502 Bad Gateway</html>", "not a Kineto trace"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": []}', "neither GPU events"),
        (b"[]", "neither GPU events"),
        (b"[", "neither GPU events"),
        (b'{"traceEvents": 7}', "no traceEvents"),
        (gzip.compress(b'{"traceEvents": []}')[:12], "not a Kineto trace|is empty"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip stream at all", "not a Kineto trace|is empty"),
        (bytes(1000), "not a Kineto trace"),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(read, data, told):
    with pytest.raises(K25Error, match=told) as error:
        read(data)
    assert "\n" not in str(error.value)


def test_a_gpu_capture_without_gpu_events_says_so(read):
    events = [complete("cpu_op", "aten::mm", 1, 1, 10**15 + i * 10**6, 500) for i in range(3)]
    trace = read(wrap(events).encode())
    assert trace.is_cpu
    assert losses(trace) == {"no GPU events": 1}
    text = wrap([*events, kernel(FILL, 10**15, 900, 3)])
    trace = read(text[: text.index('"kernel"')].encode())
    assert trace.is_cpu
    assert losses(trace) == {"no GPU events": 1, "truncated": 1}
    assert any("cut before them" in loss["detail"] for loss in trace.losses)


def test_missing_file(tmp_path):
    with pytest.raises(K25Error, match="cannot read"):
        kineto.read(tmp_path / "none.json")


def remade(text, change=lambda event: event, dump=json.dumps, key="traceEvents"):
    data = json.loads(text)
    data[key] = [e for e in map(change, data["traceEvents"]) if e is not None]
    return dump(data).encode()


LAYOUTS = {
    "compact": lambda d: json.dumps(d, separators=(",", ":")),
    "default": json.dumps,
    "indent 1": lambda d: json.dumps(d, indent=1),
    "indent tab": lambda d: json.dumps(d, indent="\t"),
    "sorted keys": lambda d: json.dumps(d, sort_keys=True, indent=2),
    "windows lines": lambda d: json.dumps(d, indent=2).replace("\n", "\r\n"),
    "events first": lambda d: json.dumps({"traceEvents": d.pop("traceEvents"), **d}),
    "byte order mark": lambda d: "\ufeff" + json.dumps(d),
    "reversed keys": lambda d: json.dumps(
        {k: ([dict(reversed(e.items())) for e in v] if k == "traceEvents" else v) for k, v in d.items()}
    ),
    "escaped": lambda d: json.dumps(d).replace("AllReduce", "All\\u0052educe"),
    "bare array": lambda d: json.dumps(d["traceEvents"]),
    "bare array, open": lambda d: json.dumps(d["traceEvents"])[:-1],
    "double comma": lambda d: json.dumps(d).replace('}, {"ph"', '},, {"ph"', 3),
    "lines": lambda d: "[\n" + ",\n".join(map(json.dumps, d["traceEvents"])) + "\n]\n",
    "comma first": lambda d: "[\n" + "\n,".join(map(json.dumps, d["traceEvents"])) + "\n]\n",
    "more after the events": lambda d: (
        json.dumps(d)[:-1] + ', "deviceProperties": [{"id": 0, "name": "x"}, {"id": 1}]}'
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1 << 14])
def test_any_layout(base, read, monkeypatch, layout, window):
    text, truth = base
    if window:
        monkeypatch.setattr(windows, "WINDOW_BYTES", window)
    data = LAYOUTS[layout](json.loads(text)).encode()
    for trace in (read(data), read(gzip.compress(data, 1), "t.json.gz")):
        found = sorted(rows(trace))
        if "array" in layout or layout in ("lines", "comma first"):
            found = sorted((n, s + BASE_NS, d, st_, c) for n, s, d, st_, c in found)
        assert found == truth
        assert trace.truncated == (layout == "bare array, open")


def test_distributed_info_after_the_events(base, read):
    data = json.loads(base[0])
    moved = json.dumps({"traceEvents": data["traceEvents"], "distributedInfo": {"rank": 5, "world_size": 8}})
    trace = read(moved.encode())
    assert (trace.meta["rank"], trace.meta["world_size"]) == (5, 8)


def test_nested_arguments_that_look_like_events(base, read):
    text, truth = base
    nested = '{"inputs": [{"name": "a", "x": {}}, {"name": "b"}, {"id": 3}], "stream": 7, "correlation": 9}, "n": 1'
    odd = '{"ph": "X", "cat": "kernel", "name": "odd", "ts": 5000000000000.5, "dur": 2.25, "args": ' + nested + "}"
    trace = read(text.replace(b'"traceEvents": [', b'"traceEvents": [' + odd.encode() + b",", 1))
    found = [row for row in rows(trace) if row[0] == "odd"]
    assert found == [("odd", BASE_NS + 5_000_000_000_000_500, 2250, 7, 9)]
    assert kernels(trace) == len(truth) + 1


def test_several_gzip_members_and_padding(base, read):
    text, truth = base
    cuts = [0, 10, 5000, 5001, len(text) // 2, len(text)]
    members = [gzip.compress(text[a:b], 1) for a, b in zip(cuts, cuts[1:], strict=False)]
    for joint in (b"", b"\0" * 512):
        trace = read(joint.join(members) + b"\0" * 100, "t.json.gz")
        assert sorted(rows(trace)) == truth
        assert trace.losses == []


@quick
@given(st.lists(st.integers(0, 10**6), max_size=4))
def test_joined_members_anywhere(base, tmp_path_factory, cuts):
    text, truth = base
    edges = sorted({0, len(text), *(c % len(text) for c in cuts)})
    path = tmp_path_factory.mktemp("m") / "t.json.gz"
    path.write_bytes(b"".join(gzip.compress(text[a:b], 1) for a, b in zip(edges, edges[1:], strict=False)))
    assert sorted(rows(kineto.read(path))) == truth


@quick
@given(st.data())
def test_a_trace_cut_at_any_byte(base, tmp_path_factory, data):
    """No crash, no invented kernel, every whole event before the cut, and the cut is told."""
    text, truth = base
    zipped = data.draw(st.booleans())
    whole = gzip.compress(text, 6) if zipped else text
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("c") / "t.json"
    path.write_bytes(whole[:cut])
    left = zlib.decompressobj(31).decompress(whole[:cut]) if zipped else whole[:cut]
    complete_kernels = whole_kernels(left)
    trace = read_unless_empty(path, complete_kernels)
    if trace is None:
        return
    found = rows(trace)
    assert set(found) <= set(truth)
    assert len(found) == complete_kernels
    if cut < len(whole) - 60:
        assert trace.truncated


@quick
@given(st.data())
def test_one_event_corrupted_costs_at_most_that_event(base, tmp_path_factory, data):
    text, truth = base
    starts = [m.start() for m in re.finditer(rb'  \{\n    "ph": "X", "cat": "kernel"', text)]
    which = data.draw(st.integers(0, len(starts) - 2))
    end = starts[which + 1] - 10
    at = data.draw(st.integers(starts[which] + 4, end - 40))
    junk = data.draw(st.binary(min_size=1, max_size=12).filter(lambda b: not set(b) & set(b'{}[],:"')))
    path = tmp_path_factory.mktemp("e") / "t.json"
    path.write_bytes(text[:at] + junk + text[at + len(junk) :])
    found = rows(kineto.read(path))
    assert len(set(truth) - set(found)) <= 2  # the event, or the two that it can hide
    assert len(set(found) - set(truth)) <= 1  # its mended form
    assert len(found) >= len(truth) - 2


@quick
@given(st.randoms(use_true_random=False), st.integers(0, 5))
def test_reordered_and_duplicated_events(base, tmp_path_factory, rnd, copies):
    text, truth = base
    data = json.loads(text)
    events = data["traceEvents"]
    doubles = rnd.sample([e for e in events if e.get("cat") == "kernel"], copies)
    events += doubles
    rnd.shuffle(events)
    path = tmp_path_factory.mktemp("r") / "t.json"
    path.write_text(json.dumps(data))
    trace = kineto.read(path)
    assert sorted(rows(trace)) == truth
    assert losses(trace) == ({"duplicate": copies} if copies else {})


@pytest.mark.parametrize(
    ("ts", "dur", "kind"),
    [
        (0.0, 3.0, "zero or negative time"),
        (-5.5, 3.0, "zero or negative time"),
        (1e18, 3.0, "absurd time"),
        (5_000_000_000_000.0, -3.0, "negative duration"),
        (5_000_000_000_000.0, 1e13, "absurd duration"),
        (5_000_000_000_000.0, float("nan"), "no time"),
        (float("inf"), 1.0, "no time"),
        (None, 1.0, "no time"),
        ("yesterday", 1.0, "no time"),
    ],
)
def test_impossible_times_are_set_aside(base, read, ts, dur, kind):
    text, truth = base
    data = json.loads(text)
    data["traceEvents"].append({"ph": "X", "cat": "kernel", "name": "bad", "ts": ts, "dur": dur, "args": {"stream": 7}})
    trace = read(json.dumps(data).encode())
    assert sorted(rows(trace)) == truth
    assert losses(trace)[kind] == 1


def test_an_event_without_times_is_set_aside(base, read):
    text, truth = base
    data = json.loads(text)
    data["traceEvents"] += [
        {"ph": "X", "cat": "kernel", "name": "no ts", "dur": 1},
        {"ph": "X", "cat": "kernel"},
        7,
        "x",
        None,
    ]
    trace = read(json.dumps(data).encode())
    assert sorted(rows(trace)) == truth
    assert losses(trace)["no time"] == 2


def test_a_zero_duration_is_kept_and_told(base, read):
    text, truth = base
    data = json.loads(text)
    when = next(e["ts"] for e in data["traceEvents"] if e.get("cat") == "kernel")
    data["traceEvents"].append({"ph": "X", "cat": "kernel", "name": "z", "ts": when, "dur": 0, "args": {"stream": 7}})
    trace = read(json.dumps(data).encode())
    assert kernels(trace) == len(truth) + 1
    assert losses(trace) == {"zero duration": 1}


def test_odd_types_cost_nothing(base, read):
    text, truth = base
    data = json.loads(text)
    for i, e in enumerate(data["traceEvents"]):
        if e.get("cat") == "kernel":
            e["ts"], e["dur"] = str(e["ts"]), str(e["dur"])
            e["args"]["stream"] = str(e["args"]["stream"])
            e["args"]["External id"] = None if i % 2 else "x"
    assert sorted(rows(read(json.dumps(data).encode()))) == truth


def test_times_without_a_base_keep_their_nanoseconds(read):
    """Old traces count from 1970: a double can't tell such a nanosecond, so the text is read exactly."""
    text = wrap([kernel(FILL, 1712195495520883 * 1000 + i * 1001, 777, i) for i in range(4)])
    text = re.sub(r'.*"baseTimeNanoseconds".*\n', "", text)
    starts = [row[1] for row in rows(read(text.encode()))]
    assert starts == [1712195495520883 * 1000 + i * 1001 for i in range(4)]


def test_an_old_spelling_of_categories(read):
    events = [complete("Kernel", "k", 0, 7, 10**15, 500), complete("Memcpy", "Memcpy DtoD", 0, 7, 10**15 + 1000, 500)]
    trace = read(wrap(events).encode())
    assert trace.kind.tolist() == [0, 1]


def test_a_huge_string_does_not_fill_memory(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [{"ph": "X", "name": "' + b"x" * (20 << 20))
    with pytest.raises(K25Error, match="cut before"):
        kineto.read(path)


def test_memory_is_bounded_by_the_table(base, tmp_path, monkeypatch):
    """Windows do not pile up: after reading, what is kept per event is columns."""
    events, _ = rank_events(0, decode=30, prefill=0, layers=20, allreduces=20)
    path = tmp_path / "t.json"
    path.write_text(wrap(events))
    columns = kineto.scan(path)
    kept = sum(
        len(a) * a.itemsize for a in (columns.name_id, columns.ts, columns.dur, columns.stream, columns.correlation)
    )
    assert kept <= 40 * len(columns.kind)
    assert len(columns.marks) == 60


def test_peek_agrees_with_reading(c64, cpu, dp):
    for path in [p for folder in (c64, cpu, dp) for p in sorted(folder.glob("*.gz"))]:
        known, trace = kineto.peek(path), kineto.read(path)
        assert (known["rank"], known["world_size"]) == (trace.meta["rank"], trace.meta["world_size"])
        assert abs(known["start_ns"] - trace.origin_ns) < 5e9


def test_an_annotation_of_absurd_length_is_set_aside(base, read):
    text, truth = base
    mark = complete(
        "gpu_user_annotation", "execute_context_0(0)_generation_1(1)", 0, 7, 10**12, 10**17, '"External id": 99'
    )
    trace = read(text.replace(b'"traceEvents": [', b'"traceEvents": [' + mark.encode() + b",", 1))
    assert losses(trace) == {"absurd annotation": 1}
    assert len(trace.marks) == 3
    assert sorted(rows(trace)) == truth


@pytest.mark.parametrize(("dur_us", "stream", "lost"), [(5e5, 7, 1), (2e4, 7, 1), (5e5, 99, 0), (9e3, 7, 0)])
def test_a_kernel_that_others_of_its_stream_run_inside_is_set_aside(read, dur_us, stream, lost):
    """A stream runs one kernel after another; a long wait beside other streams is possible, and kept."""
    events, truth = rank_events(0, decode=80, prefill=0)
    at = next(re.search(r'"ts": ([\d.]+)', e)[1] for e in events if '"kernel"' in e)
    args = f'"args": {{"stream": {stream}, "correlation": 1}}'
    events.append(
        f'{{"ph": "X", "cat": "kernel", "name": "x", "pid": 0, "tid": 7, "ts": {at}, "dur": {dur_us}, {args}}}'
    )
    trace = read(wrap(events).encode())
    assert losses(trace) == ({"absurd duration": 1} if lost else {})
    assert kernels(trace) == truth["kernels"] + 1 - lost


@pytest.mark.parametrize(
    ("ts", "kind"),
    [(0, "zero or negative time"), (-7.5, "zero or negative time"), (1e17, "absurd time"), (1e300, "absurd time")],
)
@pytest.mark.parametrize("count", [4, 20])
def test_many_impossible_times_are_set_aside_like_one(base, read, ts, kind, count):
    text, truth = base
    data = json.loads(text)
    bad = [e for e in data["traceEvents"] if e.get("cat") == "kernel"][:count]
    data["traceEvents"] += [e | {"ts": ts, "dur": 1 + i, "name": "bad"} for i, e in enumerate(bad)]
    trace = read(json.dumps(data).encode())
    assert sorted(rows(trace)) == truth
    assert losses(trace) == {kind: count}


@pytest.mark.parametrize("key", ["stream", "correlation", "External id", "device"])
@pytest.mark.parametrize("value", [2**70, -(2**70), 2**63])
def test_a_number_that_no_integer_holds_is_unknown(base, read, tmp_path, key, value):
    text, truth = base
    data = json.loads(text)
    next(e for e in data["traceEvents"] if e.get("cat") == "kernel")["args"][key] = value
    assert [row[:3] for row in sorted(rows(read(json.dumps(data).encode())))] == [row[:3] for row in truth]
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "x", "ts": value, "dur": 1, "args": {"correlation": 3}}
    data["traceEvents"].append(launch)
    (tmp_path / "u.json").write_text(json.dumps(data))
    assert 3 not in kineto.read(tmp_path / "u.json", launches=True).launches


def test_whole_microseconds_are_told_with_a_base_time_too(base, read):
    data = json.loads(base[0])
    for e in data["traceEvents"]:
        e |= {key: int(e[key]) for key in ("ts", "dur") if key in e}
    assert losses(read(json.dumps(data).encode()))["precision"] == 48
