"""More kinds of damaged files: every kernel that can be had, and the right message."""

import bz2
import gzip
import json
import lzma
import re
import zlib

import pytest
from cut_short import read_unless_empty, whole_kernels
from generate import write_capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k25lib.errors import K25Error
from k25lib.trace import kineto


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
