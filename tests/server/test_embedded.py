"""The life and every death of an embedded server, against a stand-in for vLLM; the slow test has the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k25lib.client import Client
from k25lib.errors import K25Error
from k25lib.server import embedded, supervisor
from k25lib.server.embedded import Embedded

CALLER = """
import sys, time
from k25lib.server.embedded import Embedded
with Embedded(sys.argv[1]) as server:
    print(server.folder, flush=True)
    time.sleep(1000)
"""


def first_line(log):
    return json.loads(log.read_text().splitlines()[0])


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def assert_nothing_left(state):
    assert supervisor.session(state["pid"]) == []
    assert not Path(f"/dev/shm/k25-test-{state['pid']}").exists()
    assert not Path(state["temporary"]).exists()


def read_state(folder):
    return json.loads((Path(folder) / "state.json").read_text())


def test_life(fake_vllm):
    stages = []
    server = Embedded(fake_vllm, extra_args=["--seed", "7"])
    assert not server.is_alive()
    with server.start(stages.append):
        assert stages[0] == "writing the tiny Kimi-K2.5 (random weights)" and stages[-1].startswith("ready: ")
        assert Client(server.url).ready() == "tiny-kimi-k2.5" == server.model
        assert server.is_alive() and server.why_died() == ""
        assert (server.tp, server.traces.is_dir(), server.config.is_file()) == (2, True, True)
        argv = first_line(server.log)["argv"]
        assert argv[-2:] == ["--seed", "7"]
        assert json.loads(argv[argv.index("--profiler-config") + 1])["torch_profiler_dir"] == str(server.traces)
        state = read_state(server.folder)
        assert server.pid == state["pid"] and Path(f"/proc/{server.pid}").exists()
        assert Path(f"/dev/shm/k25-test-{server.pid}").exists()
    assert not server.is_alive() and server.why_died() == "it was told to"
    assert_nothing_left(state)
    server.stop()  # harmless


def test_starts_again_in_its_folder_and_at_its_port(fake_vllm):
    server = Embedded(fake_vllm).start()
    before = (server.url, server.traces, server.log, server.pid)
    server.stop()
    server.start()
    assert (server.url, server.traces, server.log) == before[:3] and server.pid != before[3]
    with pytest.raises(K25Error, match="runs already"):
        server.start()
    server.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ends_with_its_caller(fake_vllm, number):
    with subprocess.Popen([sys.executable, "-c", CALLER, fake_vllm], stdout=subprocess.PIPE, text=True) as caller:
        folder = caller.stdout.readline().strip()
        caller.send_signal(number)
    wait_until(lambda: "ended" in read_state(folder))
    assert_nothing_left(read_state(folder))


def test_ends_with_a_caller_killed_while_starting(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "slow")
    caller = subprocess.Popen([sys.executable, "-c", CALLER, fake_vllm])
    states = fake_vllm / "cache" / "servers"
    wait_until(lambda: any(read_state(s.parent).get("shared_memory") for s in states.glob("*/state.json")))
    caller.kill()
    caller.wait()
    (folder,) = states.iterdir()
    wait_until(lambda: "ended" in read_state(folder))
    assert_nothing_left(read_state(folder))


def test_ends_if_its_supervisor_is_killed_and_the_next_start_cleans_up(fake_vllm):
    server = Embedded(fake_vllm).start()
    wait_until(lambda: read_state(server.folder)["shared_memory"])
    state = read_state(server.folder)
    os.kill(state["supervisor"], signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{state['pid']}").exists())
    assert not server.is_alive() and server.why_died() == "its supervisor was killed"
    with Embedded(fake_vllm):
        pass
    assert_nothing_left(state)


def test_a_server_killed_under_us_is_cleaned_up_behind(fake_vllm):
    server = Embedded(fake_vllm).start()
    wait_until(lambda: read_state(server.folder)["shared_memory"])
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_alive())
    assert server.why_died() == "the server ended by itself (exit status -9)"
    assert_nothing_left(read_state(server.folder))


def test_a_server_deaf_to_sigterm_is_killed(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    monkeypatch.setattr(embedded, "GRACE_S", 0.5)
    server = Embedded(fake_vllm).start()
    state = read_state(server.folder)
    assert len(supervisor.session(state["pid"])) == 2
    server.stop()
    assert_nothing_left(state)


def test_stopped_before_it_has_begun(fake_vllm):
    server = Embedded(fake_vllm)
    server._launch(server.install(), 1)
    server.stop()  # the supervisor may not even have written its name
    assert not server.is_alive()


def test_why_a_start_failed(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "die")
    server = Embedded(fake_vllm)
    with pytest.raises(
        K25Error,
        match=r"^embedded server: the server died while starting: ValueError: no room for the cache; its log is .*log$",
    ):
        server.start()
    assert server.why_died() == "ValueError: no room for the cache"


def test_a_port_lost_between_look_and_bind_is_replaced(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "port")
    stages = []
    with Embedded(fake_vllm).start(stages.append) as server:
        ports = [s.rpartition(" ")[2] for s in stages if s.startswith("starting vLLM on port")]
        assert len(set(ports)) == 2 and server.url.endswith(ports[1])


def test_environment_is_clean(fake_vllm, monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") or str(Path(__file__).parents[2]))
    monkeypatch.setenv("K25_API_KEY", "not-in-files")
    with Embedded(fake_vllm, profiler=False) as server:
        seen = first_line(server.log)
        assert "VLLM_PORT" not in seen["env"] and "PYTHONPATH" not in seen["env"]
        assert seen["env"]["VLLM_API_KEY"] == "not-in-files"
        assert "--profiler-config" not in seen["argv"]
        assert "not-in-files" not in (server.folder / "state.json").read_text()


def test_shared_memory_of_others_stays(tmp_path):
    files = [Path(f"/dev/shm/k25-test-{os.getpid()}-{n}") for n in range(3)]
    try:
        for file in files:
            file.write_bytes(b"x" * 4096)
        inodes = {file.name: file.stat().st_ino for file in files}
        inodes[files[1].name] += 1  # another file under that name
        hold = "import mmap,sys,time\nf=open(sys.argv[1],'r+b')\nm=mmap.mmap(f.fileno(),0)\n"
        hold += "print(1,flush=True)\ntime.sleep(99)"
        with subprocess.Popen([sys.executable, "-c", hold, files[2]], stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            assert supervisor.shared_memory([other.pid]) == {files[2].name: inodes[files[2].name]}
            supervisor.remove_shared_memory(inodes)
            assert [file.exists() for file in files] == [False, True, True]
            other.kill()
        supervisor.remove_shared_memory({files[2].name: inodes[files[2].name], "k25-test-gone": 1})
        assert not files[2].exists()
    finally:
        for file in files:
            file.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_real_one(tmp_path):
    root = Path(__file__).parents[2]
    before = set(Path("/dev/shm").iterdir())
    with Embedded(root).start(print) as server:
        assert Client(server.url).ready() == server.model
        assert len(supervisor.shared_memory(supervisor.session(server.pid))) >= 2
        state = read_state(server.folder)
    assert supervisor.session(state["pid"]) == []
    assert not set(Path("/dev/shm").iterdir()) - before
