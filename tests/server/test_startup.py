"""Start-up logs: real ones of two versions, a generated load of 36 minutes, and the ways that servers die."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k25lib.client import ServerDown
from k25lib.errors import K25Error
from k25lib.server import startup, watch
from k25lib.server.startup import Startup, explain, key, last_error

DATA = Path(__file__).with_name("data")
CPU = (DATA / "vllm-0.32-cpu-tp2.log").read_bytes().decode()
GPU = (DATA / "vllm-0.26-h200-tp2.log").read_bytes().decode()


def stages(text, step=200):
    """The stages that a log goes through, fed `step` characters a second."""
    state, seen = Startup(0.0), []
    for now, at in enumerate(range(0, len(text), step)):
        state.feed(text[at : at + step], float(now))
        if state.stage not in seen:
            seen.append(state.stage)
    return state, seen


def test_cpu_log_of_0_32():
    state, seen = stages(CPU)
    assert seen == ["start", "configure", "engine", "weights", "memory", "api", "ready"]
    assert (state.version, state.shards) == ("0.32.0", (2, 2))
    assert state.line(999.0) == "start-up complete"


def test_gpu_log_of_0_26():
    state, seen = stages(GPU)
    assert seen == ["start", "configure", "engine", "weights", "memory", "compile", "graphs", "api", "ready"]
    assert (state.version, state.shards) == ("0.26.0", None)


def test_graphs_are_told_in_percent():
    state = Startup(0.0)
    state.feed(GPU[: GPU.index("decode, FULL):  33%") + len("decode, FULL):  33%|█")], 60.0)
    assert state.line(60.0) == "capturing CUDA graphs: 33 %"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([CPU, GPU]), st.lists(st.integers(0, 13_700), max_size=30))
def test_a_log_may_be_cut_anywhere(text, cuts):
    whole, parts = Startup(0.0), Startup(0.0)
    whole.feed(text, 1.0)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        parts.feed(text[begin:end], 1.0)
    for name in ("stage", "version", "shards", "percent"):
        assert getattr(parts, name) == getattr(whole, name)


def test_starts_are_compared_by_model_and_tensor_parallel_size():
    assert (key(GPU), key(CPU)) == ("/tmp/model tp=2", "/tmp/vllmcpu/out/models/tiny-k25 tp=2")
    assert key("nothing") == ""


def slow_load(shards=64, minutes=36.0, quiet=(29, 600.0)):
    """(time in s, text) of a load: shards at an even rate, but for one that comes `quiet` seconds late."""
    begin = GPU[: GPU.index("(Worker_TP0 pid=1896) INFO 11-29 21:48:52")]
    end = GPU[len(begin) :]
    after, pause = quiet
    each = (minutes * 60 - pause) / shards
    events, now = [(5.0, begin)], 5.0
    for n in range(shards + 1):
        spent, left = now - 5.0, (shards - n) * each
        clock = f"{int(spent) // 60:02d}:{int(spent) % 60:02d}<{int(left) // 60:02d}:{int(left) % 60:02d}"
        bar = f"{100 * n // shards:3d}% Completed | {n}/{shards} [{clock}, {each:.2f}s/it]"
        events.append((now, f"\rLoading safetensors checkpoint shards: {bar}"))
        now += (each if n < shards else 0.0) + (pause if n == after else 0.0)
    return [*events, (now, "\n" + end)]


class Replay:
    """A log, a clock and a server that replay events at any speed; the server is up when the log says so."""

    def __init__(self, events, monkeypatch):
        self.events, self.now, self.done, self.lines = list(events), 0.0, "", []
        replay = self

        class FakeClient:
            shown_url = "http://replayed"

            def __init__(self, *_, **__):
                pass

            def ready(self, _):
                if "Application startup complete" not in replay.done:
                    raise ServerDown("no server answers")
                return "kimi"

        monkeypatch.setattr(watch, "Client", FakeClient)

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        new = "".join(text for at, text in self.events if at <= self.now)
        self.events = [(at, text) for at, text in self.events if at > self.now]
        self.done += new
        return new

    def wait(self, **more):
        return watch.wait_until_ready(
            "http://replayed", log=self, clock=self.clock, sleep=self.sleep,
            say=lambda line: self.lines.append((self.now, line)), **more,
        )  # fmt: skip


def test_a_load_of_36_minutes_with_ten_quiet_ones_is_never_stuck(monkeypatch, tmp_path):
    replay = Replay(slow_load(), monkeypatch)
    assert replay.wait(starts=tmp_path / "starts.json") == "kimi"
    assert 36 * 60 <= replay.now < 37 * 60
    before = [line for at, line in replay.lines if "29 of 64" in line]
    assert before[0] == "loading weights: 29 of 64 shards (45 %), 14 min left for the weights at this rate"
    assert before[-1].endswith("(quiet for 10 min)") and len(before) >= 10  # once a minute, not a hang
    late = next(line for _, line in replay.lines if "48 of 64" in line)
    assert late.endswith("10 min left for the weights at this rate")  # 30 min for 48: the pause counts in the rate
    kept = json.loads((tmp_path / "starts.json").read_text())["/tmp/model tp=2"]
    assert 35 * 60 < kept[0]["weights"] <= 36 * 60 + 5

    again = Replay(slow_load(), monkeypatch)
    again.wait(starts=tmp_path / "starts.json")
    assert any(
        line == "loading weights: 0 of 64 shards (0 %), 36 min left as in earlier starts" for _, line in again.lines
    )


def test_only_silence_of_all_signs_is_stuck(monkeypatch):
    events = slow_load(quiet=(29, 2000.0), minutes=60)
    with pytest.raises(K25Error, match=r"^the server is stuck \(loading weights: 29 of 64 .*moved for 20 min$"):
        Replay(events, monkeypatch).wait(probe=lambda: {"cpu_s": 7.0})
    assert Replay(events, monkeypatch).wait(probe=dict) == "kimi"  # behind ssh nothing but its log can be seen
    for probe in ("cpu_s", "memory_bytes"):
        replay = Replay(events, monkeypatch)
        rate = {"cpu_s": 1.0, "memory_bytes": 1e8}[probe]
        assert replay.wait(probe=lambda r=replay, p=probe, k=rate: {p: int(r.now * k)}) == "kimi"
    with pytest.raises(K25Error, match="stuck"):  # idle threads and the jitter of NVML are no life
        replay = Replay(events, monkeypatch)
        replay.wait(probe=lambda: {"cpu_s": replay.now * 0.005, "memory_bytes": 10**10 + int(replay.now) % 7})


def test_memory_is_told_beside(monkeypatch):
    replay = Replay(slow_load(), monkeypatch)
    replay.wait(probe=lambda: {"memory_bytes": 75_800_000_000})
    assert any("29 of 64 shards (45 %)" in line and "75.8 GB held" in line for _, line in replay.lines)


def test_limit_and_death(monkeypatch):
    with pytest.raises(K25Error, match=r"^not ready after 10 min \(loading weights: .*\): no server answers$"):
        Replay(slow_load(), monkeypatch).wait(limit_s=600)
    replay = Replay([(5.0, GPU[:3000] + "\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n")], monkeypatch)
    with pytest.raises(
        K25Error, match=r"died while starting: torch.OutOfMemoryError: .*; out of GPU memory: nvidia-smi"
    ):
        replay.wait(alive=lambda: replay.now < 60)


def test_a_start_seen_late_is_not_kept(monkeypatch, tmp_path):
    Replay([(0.0, GPU)], monkeypatch).wait(starts=tmp_path / "starts.json")
    assert not (tmp_path / "starts.json").exists()


def test_a_second_start_in_the_same_log():
    state = Startup(0.0)
    state.feed(GPU, 10.0)
    state.feed(CPU[: CPU.index("Starting to load model")], 20.0)
    assert (state.stage, state.version) == ("engine", "0.32.0")


DYING = GPU[:4000] + "\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def test_a_server_that_dies_again_and_again_is_told(monkeypatch):
    events = [(60.0 * n, DYING) for n in range(9)]
    replay = Replay(events, monkeypatch)
    with pytest.raises(K25Error, match=r"^the server dies and is started again and again: torch.OutOfMemoryError"):
        replay.wait()
    assert replay.now < 300
    # what was in the log before we looked does not count
    replay = Replay([(0.0, DYING * 9), (10.0, GPU)], monkeypatch)
    assert replay.wait() == "kimi"


def test_errors_of_earlier_starts_are_not_quoted(monkeypatch):
    assert explain(DYING + CPU).error == "" and "out of GPU memory" in explain(DYING + CPU, back=1).means
    replay = Replay([(0.0, DYING)], monkeypatch)
    with pytest.raises(K25Error, match="not ready after 10 min .*; its log says: torch.OutOfMemoryError"):
        replay.wait(limit_s=600)


def test_a_killed_server_without_a_word_is_explained():
    death = explain(CPU + "k25: the server has ended: the server ended by itself (exit status -9)\n")
    assert death.error.endswith("(exit status -9)") and "out of memory, or somebody killed" in death.means


def test_files_cut_short_or_replaced_are_read_anew(tmp_path):
    path = tmp_path / "log"
    log = watch.LogFile(path)
    assert log.read() == ""
    path.write_text("one\n")
    assert (log.read(), log.read()) == ("one\n", "")
    path.write_text("a\n")
    assert log.read() == "a\n"
    (tmp_path / "new").write_text("replaced")
    (tmp_path / "new").replace(path)
    assert log.read() == "replaced"


def test_commands_are_followed_and_ended(tmp_path):
    log = watch.LogCommand("echo first; sleep 1000 & wait")
    got = ""
    while "first" not in got:
        got += log.read()
    log.close()
    assert log.read() == ""


CORE = (
    "(Worker_TP1 pid=9) ERROR 11-29 21:40:17 [multiproc_executor.py:9] Traceback (most recent call last):\n"
    "(Worker_TP1 pid=9) ERROR 11-29 21:40:17 [multiproc_executor.py:9] {error}\n"
    "(EngineCore pid=8) ERROR 11-29 21:40:18 [core.py:1] Exception: WorkerProc initialization failed due to an "
    "exception in a background process. See stack trace for root cause.\n"
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed: {{}}\n"
)


@pytest.mark.parametrize(
    ("error", "means"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB.", "out of GPU memory"),
        ("RuntimeError: CUDA error: out of memory", "out of GPU memory"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "KV cache"),
        ("ValueError: Free memory on device (10/95 GiB) on startup is less than desired GPU memory", "another process"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("FileNotFoundError: No such file or directory: '/m/model-00029-of-000064.safetensors'", "missing"),
        ("RuntimeError: Cannot find any model weights with `/m`", "missing"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata", "damaged"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error", "NCCL"),
        ("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "NCCL"),
        ("OSError: You are trying to access a gated repo.", "gated"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model x is restricted", "gated"),
        ("OSError: /m is not a local folder and is not a valid model identifier", "not found"),
        ("ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3).", "ranks"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040)", "does not fit"),
        ("RuntimeError: Failed to infer device type, please set VLLM_LOGGING_LEVEL=DEBUG", "fewer GPUs"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "full"),
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "environment"),
    ],
)
def test_known_causes_are_explained(error, means):
    death = explain(GPU[:2000] + "\n" + CORE.format(error=error))
    assert death.error == error and means in death.means and death.advice


def test_usage_errors_of_the_command_line():
    death = explain("usage: vllm [-h]\nvllm: error: unrecognized arguments: --profiler-config {}\n")
    assert death.error == "vllm: error: unrecognized arguments: --profiler-config {}"
    assert "does not know a flag" in death.means
    taken = "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use"
    assert explain(f"INFO: x\n{taken}\n").means == "the port is in use"


def test_unknown_errors_are_quoted_and_none_is_said():
    assert str(explain(CORE.format(error="ValueError: a new one"))) == "ValueError: a new one"
    assert str(explain(CPU)) == "no error in its log"
    assert last_error("") == ""


@given(st.text(max_size=300))
def test_any_log_can_be_read(text):
    state = Startup(0.0)
    state.feed(text, 1.0)
    state.line(2.0)
    explain(text)
    assert state.stage in startup.STAGES
