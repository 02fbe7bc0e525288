"""The capture protocol against servers that answer 200 and did not do what it says."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from k25lib import capture as capture_module
from k25lib.capture import Load, capture, place
from k25lib.client import ProfilerMissing
from k25lib.errors import K25Error
from k25lib.run import Run

STEPS = ["execute_context_1(8)_generation_0(0)", *["execute_context_0(0)_generation_1(1)"] * 3]


def trace(rank, world=2, **more):
    """A small whole trace file's bytes: a prefill and three decode steps."""
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}]
    events += [{"ph": "X", "cat": f"{gpu}user_annotation", "name": name} for name in STEPS for gpu in ("", "gpu_")]
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}, **more}
    return gzip.compress(json.dumps({**head, "traceEvents": events}).encode())


class Server:
    """A profiler's two endpoints: `start` and `stop` are lists of statuses, `writes` what each stop writes."""

    def __init__(self, folder):
        self.folder, self.calls = folder, []
        self.start, self.stop = [200], [200]
        # the first stop ends a session that was cut off, if there is one
        self.writes = [{}, {f"rank{rank}.1.pt.trace.json.gz": trace(rank) for rank in (0, 1)}]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.calls.append(self.path)
                statuses = outer.start if self.path == "/start_profile" else outer.stop
                status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                if self.path == "/stop_profile" and outer.writes:
                    for name, data in outer.writes.pop(0).items():
                        (folder / name).write_bytes(data)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = tmp_path / "traces"
    folder.mkdir()
    made = Server(folder)
    made.sent = []

    def send(url, model, requests, concurrency, *_):
        made.sent.append((requests, concurrency))
        return [{"tpot_ms": 10.0 + len(made.sent), "ok": True}] * requests

    monkeypatch.setattr(capture_module, "send", send)
    monkeypatch.setattr(capture_module, "SETTLE_S", 0.05)
    yield made
    made.http.shutdown()
    made.http.server_close()


def take(server, tmp_path, **more):
    said = []
    load = Load(more.pop("concurrency", 1), requests=5, input_tokens=8, output_tokens=4)
    asked = {"world_size": 2, "say": said.append, **more}
    record = capture(server.url, "m", server.folder, tmp_path / "run" / "c1", load, **asked)
    return record, said


def test_files_are_moved_and_described(server, tmp_path):
    (server.folder / "old.pt.trace.json.gz").write_bytes(trace(0))
    server.writes[1]["profiler_out_0.txt"] = b"table"
    record, _ = take(server, tmp_path)
    assert [(f["rank"], f["decode_steps"], f["fault"]) for f in record["files"]] == [(0, 3, ""), (1, 3, "")]
    assert record["missing_ranks"] == []
    assert record["tables"] == ["profiler_out_0.txt"]
    assert (record["tpot_ms"], record["tpot_profiled_ms"]) == (12.0, 13.0)
    assert server.sent == [(5, 1)] * 3
    assert [p.name for p in server.folder.iterdir()] == ["old.pt.trace.json.gz"]
    assert json.loads((tmp_path / "run" / "c1" / "capture.json").read_text()) == record


def test_the_world_size_comes_from_the_trace_if_nobody_knows_it(server, tmp_path):
    record, _ = take(server, tmp_path, world_size=0)
    assert record["world_size"] == 2


def test_the_trace_knows_the_world_size_better_than_the_tensor_parallel_size(server, tmp_path):
    record, _ = take(server, tmp_path, world_size=1)  # TP=1, DP=2
    assert (record["world_size"], record["ranks"], record["missing_ranks"]) == (2, [0, 1], [])


def test_a_missing_table_is_no_fault(server, tmp_path):
    record, _ = take(server, tmp_path)
    assert (record["tables"], record["missing_ranks"]) == ([], [])


def test_a_rank_that_writes_late_is_waited_for(server, tmp_path):
    late = server.writes[1].pop("rank1.1.pt.trace.json.gz")
    writer = threading.Timer(1.0, lambda: (server.folder / "rank1.1.pt.trace.json.gz").write_bytes(late))
    writer.start()
    record, _ = take(server, tmp_path)
    assert record["ranks"] == [0, 1]


def test_a_missing_rank_is_told(server, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "FILES_S", 0.5)
    del server.writes[1]["rank1.1.pt.trace.json.gz"]
    record, _ = take(server, tmp_path)
    assert record["missing_ranks"] == [1]


def test_a_truncated_file_is_told_and_counts_as_missing(server, tmp_path):
    server.writes[1]["rank1.1.pt.trace.json.gz"] = trace(1)[:-20]
    record, _ = take(server, tmp_path)
    assert record["files"][1]["fault"] == "its compressed data ends early"
    assert record["missing_ranks"] == [1]


def test_a_damaged_gzip_is_told_and_the_other_ranks_are_kept(server, tmp_path):
    for at in (2, 10):  # in its header, and where its data begins
        whole = trace(0)
        damaged = whole[:at] + b"\xff\xff" + whole[at + 2 :]
        server.writes = [{}, {"rank0.pt.trace.json.gz": damaged, "rank1.pt.trace.json.gz": trace(1)}]
        record, _ = take(server, tmp_path)
        assert record["files"][0]["fault"].startswith("its compressed data is damaged (")
        assert (record["ranks"], record["missing_ranks"], record["world_size"]) == ([1], [0], 2)
        assert list(server.folder.iterdir()) == []
        (tmp_path / "run" / "c1").rename(tmp_path / "run" / f"damaged-{at}")


def test_json_that_does_not_close_is_told(server, tmp_path):
    server.writes[1]["rank1.1.pt.trace.json.gz"] = gzip.compress(b'{"traceEvents": [{"a": 1},')
    record, _ = take(server, tmp_path)
    assert record["files"][1]["fault"] == "its JSON is not closed"


def test_no_file_after_stop_is_an_error_that_names_the_folder(server, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "FILES_S", 0.5)
    server.writes.clear()
    with pytest.raises(K25Error, match="no trace appeared in .*traces.*torch_profiler_dir"):
        take(server, tmp_path)


def test_no_profiler_names_the_flag_and_sends_no_load(server, tmp_path):
    server.start = server.stop = [404]
    with pytest.raises(ProfilerMissing, match="--profiler-config"):
        take(server, tmp_path)
    assert (server.calls, server.sent) == (["/stop_profile"], [])


def test_a_session_that_was_cut_off_is_ended_first_and_its_files_are_not_ours(server, tmp_path):
    ours = server.writes[1]
    server.writes[0] = {"stale.pt.trace.json.gz": trace(0)}
    record, _ = take(server, tmp_path)
    assert server.calls == ["/stop_profile", "/start_profile", "/stop_profile"]
    assert [f["file"] for f in record["files"]] == sorted(ours)


@pytest.mark.parametrize(
    ("start", "stop", "words", "calls"),
    [
        ([409], [200], "somebody else has started the profiler", 3),
        ([500], [200], r"POST /start_profile failed \(500\)", 3),
        ([200], [200, 500], r"POST /stop_profile failed \(500\)", 3),
        ([401], [200], "asks for an API key: set K25_API_KEY", 3),
    ],
)
def test_other_answers_are_told(server, tmp_path, start, stop, words, calls):
    server.start, server.stop = start, stop
    with pytest.raises(K25Error, match=words):
        take(server, tmp_path)
    assert len(server.calls) == calls and server.calls[-1] == "/stop_profile"


def test_a_stop_that_fails_does_not_hide_why_the_load_failed(server, tmp_path, monkeypatch):
    server.stop = [200, 500]

    def fail(*_, **__):
        server.sent.append(0)
        if len(server.sent) == 3:  # warm-up, without, with the profiler
            raise K25Error("all 5 requests failed")
        return [{"tpot_ms": 1.0}]

    monkeypatch.setattr(capture_module, "send", fail)
    with pytest.raises(K25Error, match="all 5 requests failed"):
        take(server, tmp_path)


def test_bounds_are_said_before_anything_is_sent(server, tmp_path):
    _, said = take(server, tmp_path, concurrency=2)
    assert said[0] == "about 9 decode steps on 2 ranks: at most 17 MB of traces"
    assert Load(1, 5, 128, 32).bounds(ranks=8) == (155, 160 * 8 * 600_000)
    assert Load(64, 64, 128, 8).bounds(ranks=2, stacks=True) == (7, 71 * 2 * 12_000_000)


def test_a_further_capture_of_a_run_gets_a_name_of_its_own(tmp_path):
    run, load = Run.create("x", tmp_path), Load(64, 64, 128, 8)
    for name in ("c64", "c64-2", "c64-3"):
        assert place(run, load) == run.path / "captures" / name
        place(run, load).mkdir(parents=True)
    assert place(run, Load(1, 5, 128, 32)).name == "c1"


def test_stacks_are_warned_of_before_and_after(server, tmp_path):
    _, said = take(server, tmp_path, stacks=True)
    assert '"torch_profiler_with_stack":false' in said[0] and "20 times larger" in said[0]
    server.writes = [{}, {f"rank{rank}.2.pt.trace.json.gz": trace(rank, with_stack=1) for rank in (0, 1)}]
    (tmp_path / "run" / "c1").rename(tmp_path / "run" / "c1-first")
    record, said = take(server, tmp_path)
    assert "the traces hold Python stacks" in said[-1] and not any("stacks" in file for file in record["files"])


def test_an_interrupt_stops_the_profiler(server, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        server.sent.append(0)
        if len(server.sent) == 3:  # warm-up, without, with the profiler
            raise KeyboardInterrupt
        return [{"tpot_ms": 1.0}]

    monkeypatch.setattr(capture_module, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(server, tmp_path)
    assert server.calls == ["/stop_profile", "/start_profile", "/stop_profile"]


def test_a_capture_never_overwrites_another(server, tmp_path):
    take(server, tmp_path)
    with pytest.raises(K25Error, match="never overwrites"):
        take(server, tmp_path)


def test_a_folder_that_is_not_here_and_a_full_disk_stop_before_the_load(server, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda _: type("U", (), {"free": 10_000_000}))
    with pytest.raises(K25Error, match="may need 0.2 GB .* 0.0 GB free"):
        take(server, tmp_path)
    server.folder.rmdir()
    with pytest.raises(K25Error, match="set capture.traces"):
        take(server, tmp_path)
    assert server.sent == server.calls == []
