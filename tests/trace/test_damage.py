"""More kinds of damaged files: every kernel that can be had, and the right message."""

import bz2
import gzip
import json
import lzma
import re
import zlib

import numpy as np
import pytest
from cut_short import read_unless_empty, whole_kernels
from generate import write_capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k25lib.errors import K25Error
from k25lib.trace import kineto
from k25lib.trace.breakdown import breakdown


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    (path,), _ = write_capture(tmp_path_factory.mktemp("d"), 1, decode=3, prefill=0, layers=3, allreduces=7)
    return gzip.decompress(path.read_bytes())


KERNELS = 3 * 16


@pytest.fixture
def read(tmp_path):
    def read(data, name="t.pt.trace.json"):
        (tmp_path / name).write_bytes(data)
        trace = kineto.read(tmp_path / name)
        return int((trace.kind == 0).sum()), {loss["kind"]: loss["count"] for loss in trace.losses}

    return read


def in_kernel(text, member, value):
    """The text with another value (or value and more) for a member of its first kernel."""
    return re.sub(rb'("cat": "kernel".*?"%s": )[^,]+' % member, rb"\1" + value, text, count=1, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        (b"pid", b"+inf"),
        (b"grid", b"[nan, 1"),
        (b"stream", b"nan(ind)"),
        (b"correlation", b"Infinity"),
        (b"queued", b'{"y": [NaN, {"z": -Infinity}]}'),
    ],
)
def test_bare_nan_in_odd_places(text, read, member, value):
    assert read(in_kernel(text, member, value)) == (KERNELS, {"repaired": 1})


@pytest.mark.parametrize(("member", "value"), [(b"ts", b"-inf"), (b"dur", b"NaN")])
def test_bare_nan_as_a_time(text, read, member, value):
    assert read(in_kernel(text, member, value)) == (KERNELS - 1, {"repaired": 1, "no time": 1})


def whole(text, **how):
    return json.dumps(json.loads(text), **how).encode()


def args_first(text):
    data = json.loads(text)
    data["traceEvents"] = [dict(reversed(event.items())) for event in data["traceEvents"]]
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b"\n", b"\r"),
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: b" \n\t" * 50 + text,
        lambda text: text + b"\0" * 4096,
        lambda text: whole(text, indent=1),
        lambda text: whole(text, indent="\t"),
        lambda text: whole(text, separators=(",", ":")),
        args_first,
        lambda text: gzip.compress(b"\xef\xbb\xbf" + text),
    ],
)
@pytest.mark.parametrize("name", ["t.pt.trace.json", "t.pt.trace.json.gz"])
def test_another_spelling_costs_nothing(text, read, change, name):
    assert read(change(text), name) == (KERNELS, {})


def test_a_missing_comma_costs_nothing(text, read):
    for number in range(1, 6):
        parts = text.split(b"  },\n  {", number)
        assert read(b"  },\n  {".join(parts[:-1]) + b"  }\n  {" + parts[-1]) == (KERNELS, {"repaired": 1})


def test_junk_behind_an_event_costs_the_junk(text, read):
    found = read(text.replace(b"  },\n  {", b"  } junk,\n  {", 1))
    assert found == (KERNELS, {"unreadable": 1})


def test_an_unreadable_kernel_is_told_as_one_of_the_gpu(text, tmp_path):
    (tmp_path / "t.json").write_bytes(text.replace(b'"cat": "kernel"', b"'cat': 'kernel'", 1))
    (loss,) = kineto.read(tmp_path / "t.json").losses
    assert (loss["kind"], loss["count"]) == ("unreadable", 1)
    assert "1 of them of the GPU" in loss["detail"]


@pytest.mark.parametrize("joined", [lambda a, b: a + b, lambda a, b: gzip.compress(a) + gzip.compress(b)])
def test_a_second_trace_in_the_file_is_told(text, read, joined):
    assert read(joined(text, text)) == (KERNELS, {"second trace": 1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda text: b"", "is empty"),
        (lambda text: gzip.compress(b""), "is empty"),
        (lambda text: text.decode().encode("utf-16"), "UTF-16"),
        (lambda text: text.decode().encode("utf-16-be"), "UTF-16"),
        (lambda text: text.decode().encode("utf-32"), "UTF-32"),
        (lambda text: b"\x28\xb5\x2f\xfd" + text[:99], "unzstd"),
        (lambda text: bz2.compress(text), "bunzip2"),
        (lambda text: lzma.compress(text), "unxz"),
        (lambda text: b"PK\x03\x04" + text, "unzip"),
        (lambda text: gzip.compress(gzip.compress(text)), "gunzip it once"),
        (lambda text: b"<html>404</html>", "no traceEvents"),
        (lambda text: b"null", "no traceEvents"),
        (lambda text: b'{"traceEvents": null}', "no traceEvents"),
    ],
)
def test_what_is_no_trace_says_why(text, read, data, message):
    with pytest.raises(K25Error, match=message) as caught:
        read(data(text), "t.json.gz")
    assert "\n" not in str(caught.value)


def test_a_wrong_checksum_loses_nothing_and_is_told(text, read):
    assert read(gzip.compress(text)[:-8] + b"\0" * 8) == (KERNELS, {"damaged gzip": 1})


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_gzip_damaged_anywhere_gives_what_was_before(text, tmp_path_factory, data):
    whole = bytearray(gzip.compress(text, 6))
    at = data.draw(st.integers(20, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    member, before = zlib.decompressobj(31), b""
    for i in range(at):
        before += member.decompress(whole[i : i + 1])
    path = tmp_path_factory.mktemp("g") / "t.json.gz"
    path.write_bytes(whole)
    complete = whole_kernels(before)
    trace = read_unless_empty(path, complete)
    if trace is None:
        return
    assert (trace.kind == 0).sum() >= complete - 1  # damage may make the last two one
    assert trace.losses


FIRST = '{"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": %s, "dur": 1.0},'


@pytest.mark.parametrize("ts", ["0", "-3.5", "1e18", "99999999999999999999.5", '"soon"', "null", "true", "[1]"])
def test_the_time_of_the_first_event_does_not_decide_the_session(tmp_path, ts):
    """A file whose first event has an absurd time is still a rank of the capture, to the nanosecond."""
    paths, _ = write_capture(tmp_path, 2, decode=4, prefill=0, layers=3, allreduces=7)
    before = breakdown([tmp_path])["per_step"]
    text = gzip.decompress(paths[1].read_bytes())
    assert breakdown([tmp_path])["capture"]["ranks"] == [0, 1]
    paths[1].write_bytes(
        gzip.compress(text.replace(b'"traceEvents": [', b'"traceEvents": [' + (FIRST % ts).encode(), 1))
    )
    result = breakdown([tmp_path])
    assert result["per_step"] == before
    assert result["losses"] == []


@pytest.mark.parametrize("ts", ["99999999999999999999.5", "1e99999999999999999999", "true", '" 1712195495520883.5 "'])
def test_exact_times_in_spite_of_one_that_is_absurd(text, tmp_path, ts):
    absolute = re.sub(rb'"ts": (\d+)\.', lambda m: b'"ts": %d.' % (int(m[1]) + 1_762_000_000_000_000), text)
    absolute = absolute.replace(b"baseTimeNanoseconds", b"other")
    (tmp_path / "a.json").write_bytes(absolute)
    bad = FIRST.replace("cpu_op", "kernel") % ts
    (tmp_path / "b.json").write_bytes(absolute.replace(b'"traceEvents": [', b'"traceEvents": [' + bad.encode(), 1))
    (tmp_path / "c.json").write_bytes(text)
    one, two, base = (kineto.read(tmp_path / f"{n}.json") for n in "abc")
    keep = np.array([two.names[n] != "x" for n in two.name_id])
    for column in ("start_ns", "dur_ns"):
        assert (getattr(one, column) == getattr(base, column)).all()
    assert np.diff(two.start_ns[keep]).tolist() == np.diff(base.start_ns).tolist()


@pytest.mark.parametrize("deep", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000])
def test_endless_nesting_costs_one_event(text, read, deep):
    assert read(in_kernel(text, b"queued", deep)) == (KERNELS - 1, {"unreadable": 1})


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\uDBFF\\u0041"])
def test_half_a_surrogate_pair_becomes_a_character(text, tmp_path, half):
    (tmp_path / "t.json").write_bytes(text.replace(b'"name": "nccl', b'"name": "' + half.encode() + b" nccl", 1))
    trace = kineto.read(tmp_path / "t.json")
    assert sum("\ufffd" in name for name in trace.names) == 1
    assert "\n".join(trace.names).encode()
    pair = text.replace(b'"name": "nccl', b'"name": "\\ud83d\\ude00 nccl', 1)
    (tmp_path / "u.json").write_bytes(pair)
    whole = kineto.read(tmp_path / "u.json")
    assert sum("\U0001f600" in name for name in whole.names) == 1
    assert whole.losses == []


@pytest.mark.parametrize("key", ["id", "bp", "s", "tts", "cname", "sf"])
def test_a_mended_name_ends_where_it_ends(text, tmp_path, key):
    rest = '"ph": "X", "cat": "kernel", "ts": 5000000000000.5, "dur": 2.25, "args": {}},'
    event = f'{{"name": "odd\\q", "{key}": 1, {rest}'
    (tmp_path / "t.json").write_bytes(text.replace(b'"traceEvents": [', b'"traceEvents": [' + event.encode(), 1))
    assert "odd\\q" in kineto.read(tmp_path / "t.json").names


def test_text_names_stay_on_one_line(tmp_path, capsys):
    from k25lib.cli import main

    (path,), _ = write_capture(tmp_path, 1, decode=4, prefill=0, layers=3, allreduces=7)
    name = b"frob\\n\\u001b[31m\\u0000\\u202enicate"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"ncclDevKernel_AllGather", name)))
    assert main(["breakdown", str(path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "frob" in line]
    assert line.isprintable()


def test_no_decode_step_is_said_in_words(tmp_path, capsys):
    from k25lib.cli import main

    (path,), _ = write_capture(tmp_path, 1, decode=4, prefill=0, layers=3, allreduces=7)
    text = gzip.decompress(path.read_bytes()).replace(b"context_0(0)_generation_1(1)", b"context_1(9)_generation_0(0)")
    path.write_bytes(gzip.compress(text))
    assert main(["breakdown", str(path)]) == 0
    out = capsys.readouterr().out
    assert "passes: 4 prefill" in out
    assert "rank 0 prefill: 4 passes, 16.0 kernels" in out
