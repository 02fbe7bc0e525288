"""Control of servers: real processes here and over a real sshd, stand-ins recorded for docker and systemd."""

import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port

from k25lib.client import Client
from k25lib.errors import K25Error, UsageError
from k25lib.server import control as control_module
from k25lib.server import process
from k25lib.server.control import Control, presets
from k25lib.server.supervisor import start_time

HERE = Path(__file__).parent


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """docker, systemctl and journalctl that record; returns a function that reads the calls."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("docker", "systemctl", "journalctl"):
        (binaries / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} {HERE / "stand_in.py"} {tmp_path} {name} "$@"\n'
        )
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def read_until(log, words):
    text, deadline = "", time.monotonic() + 20
    while words not in text:
        assert time.monotonic() < deadline, text
        text += log.read()
        time.sleep(0.02)
    return text


def test_process(tmp_path, vllm):
    command, url = vllm
    said = []
    control = Control({"command": command, "log": str(tmp_path / "the log")}, allowed=True, say=said.append)
    assert not control.running()
    (tmp_path / "the log").write_text("an earlier start\n")
    assert control.bring_up(url, every_s=0.05) == "tiny-kimi-k2.5"
    assert control.running() and f"nohup setsid {command} >> " in said[0]
    for start in (control.start, lambda: control.bring_up(url)):
        with pytest.raises(K25Error, match="runs already"):
            start()
    log = (tmp_path / "the log").read_text()
    assert log.startswith("an earlier start\n")
    first = json.loads(log.splitlines()[1])
    assert first["env"]["MARKED"] == "yes" and first["argv"][:2] == ["serve", "a model"]
    assert control.run(["echo", "two words"]).stdout == "two words\n"
    assert control.python() == sys.executable
    signs = process.activity(control.pid)
    assert signs["cpu_s"] >= 0 and signs["memory_bytes"] > 1_000_000
    control.stop()
    assert not control.running()
    control.stop()


def test_found_by_port_and_restarted_as_it_was(tmp_path, vllm, monkeypatch):
    command, url = vllm
    log, port = tmp_path / "found.log", int(url.rpartition(":")[2])
    subprocess.run(
        ["sh", "-c", f"{command} > found.log 2>&1 &"], check=True, cwd=tmp_path, env={**os.environ, "OF_IT": "1"}
    )
    wait_ready(url)
    found = process.find(port)
    assert (found["cwd"], found["log"], found["argv"][2:4]) == (str(tmp_path), str(log), ["serve", "a model"])
    assert process.environment(found["pid"])["OF_IT"] == "1"
    signs = process.activity(found["pid"])
    assert signs["cpu_s"] >= 0 and signs["memory_bytes"] > 1_000_000

    control = Control.of_url(url, allowed=True, say=lambda _: None)
    assert control.running()
    control.stop()
    assert process.find(port) is None
    assert control.bring_up(url, every_s=0.05) == "tiny-kimi-k2.5"
    again = process.find(port)
    assert again["pid"] != found["pid"] and (again["argv"], again["cwd"]) == (found["argv"], found["cwd"])
    assert process.environment(again["pid"])["OF_IT"] == "1"
    assert len(log.read_text().splitlines()) == 2  # the old log goes on
    control.stop()


def test_a_pid_that_another_process_has_now_is_not_the_server(tmp_path):
    control = Control({"command": "vllm serve m", "log": str(tmp_path / "log")}, allowed=True)
    (tmp_path / "log.pid").write_text(f"{os.getpid()} 12345\n")
    assert not control.running()
    (tmp_path / "log.pid").write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
    assert control.running()


def wait_ready(url):
    deadline = time.monotonic() + 20
    while True:
        try:
            return Client(url).ready()
        except K25Error:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_nothing_found_at_a_port():
    with pytest.raises(K25Error, match=r"^no process of this machine .* say in \[control\]"):
        Control.of_url(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("found", "words"),
    [({"unit": "vllm.service"}, 'preset = "systemd" and control.unit = "vllm.service"'),
     ({"container": "abcdef123456"}, 'preset = "docker" and control.container = "abcdef123456"')],
)  # fmt: skip
def test_a_kept_process_is_left_to_its_keeper(monkeypatch, found, words):
    base = {"pid": 1, "argv": ["vllm"], "cwd": "/", "log": "", "unit": "", "container": ""}
    monkeypatch.setattr(process, "find", lambda port: {**base, **found})
    with pytest.raises(K25Error, match=words):
        Control.of_url("http://127.0.0.1:8000")


def test_a_start_that_fails_the_first_time_is_tried_again(tmp_path, vllm, monkeypatch):
    command, url = vllm
    monkeypatch.setenv("FAKE_VLLM", "port")
    monkeypatch.chdir(tmp_path)
    said = []
    control = Control({"command": command, "log": str(tmp_path / "log")}, allowed=True, say=said.append)
    assert control.bring_up(url, every_s=0.05) == "tiny-kimi-k2.5"
    assert any("Address already in use; the port is in use" in line and "trying again" in line for line in said)
    control.stop()
    monkeypatch.setenv("FAKE_VLLM", "die")
    with pytest.raises(K25Error, match="died while starting: ValueError: no room for the cache"):
        control.bring_up(url, every_s=0.05)


def test_another_server_is_not_taken_for_the_one_that_is_started(tmp_path, vllm, monkeypatch):
    command, url = vllm
    monkeypatch.setattr(control_module, "SILENT_LIMIT_S", 0.1)
    keeper = Control({"command": command, "log": str(tmp_path / "log")}, allowed=True, say=str)
    keeper.bring_up(url, every_s=0.05)
    other = Control({"command": command, "log": str(tmp_path / "another log")}, allowed=True, say=str)
    with pytest.raises(K25Error, match=f"^a server still answers at {url}, and it is not the one of .control.$"):
        other.bring_up(url)
    keeper.stop()


def test_nothing_is_restarted_unless_allowed(tmp_path):
    settings = {"command": "vllm serve m --api-key s3cret", "log": str(tmp_path / "log")}
    control = Control(settings)
    with pytest.raises(K25Error, match=r"^the server is not restarted without --allow-restart; it would run: cd"):
        control.start()
    said = []
    dry = Control(settings, dry=True, say=said.append)
    profiled = dry.profiled("/traces")
    dry.stop()
    assert profiled.bring_up("http://127.0.0.1:1") == ""
    words = [re.sub(r"(nohup|kill -TERM|--help=all|would look|--profiler-config)|.", r"\1", x) for x in said]
    assert words == ["would look--profiler-config--help=all", "kill -TERM", "nohup--profiler-config"]
    assert not list(tmp_path.iterdir()) and "s3cret" not in "".join(said)


def test_docker(stand_ins):
    settings = {"preset": "docker", "container": "my vllm", "profiling": {"container": "profiled"}}
    control = Control(settings, allowed=True, say=lambda _: None)
    assert not control.running()
    log = control.start()
    assert "startup complete" in read_until(log, "complete")
    log.close()
    assert control.running()
    assert control.run(["vllm", "--version"]).stdout == "ran ['vllm', '--version']\n"
    assert control.python() == "docker run --rm -i --gpus all --ipc host --entrypoint python3 vllm/vllm-openai:v0.26.0"
    assert control.pid == 4242
    control.stop()
    profiled = control.profiled("/traces")
    profiled.start().close()
    profiled.stop()
    calls = stand_ins()
    assert ["docker", "start", "my vllm"] in calls and ["docker", "stop", "-t", "60", "my vllm"] in calls
    assert ["docker", "start", "profiled"] in calls and ["docker", "stop", "-t", "60", "profiled"] in calls
    logs = next(call for call in calls if call[1] == "logs")
    assert logs[2:4] == ["--follow", "--since"] and abs(int(logs[4]) - time.time()) < 60 and logs[5] == "my vllm"


def test_systemd(stand_ins, tmp_path):
    control = Control({"preset": "systemd", "unit": "vllm.service"}, allowed=True, say=lambda _: None)
    (tmp_path / "fail").touch()
    with pytest.raises(K25Error, match=r"^failed \(exit status 1\): Job for vllm.service failed"):
        control.start()
    log = control.start()
    read_until(log, "complete")
    log.close()
    assert control.running()
    control.stop()
    calls = stand_ins()
    assert ["systemctl", "start", "vllm.service"] in calls and ["systemctl", "stop", "vllm.service"] in calls
    journal = next(call for call in calls if call[0] == "journalctl")
    assert journal[1:3] == ["--unit", "vllm.service"] and journal[-1].startswith("@")
    with pytest.raises(UsageError, match=r"^set control.profiling: .* --profiler-config"):
        control.profiled("/traces")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "k8s"}, "'k8s' is unknown: there are process, systemd, docker"),
        ({"preset": "docker"}, "control.container is not set: preset docker .a docker container"),
        ({"command": "vllm serve m"}, "control.log is not set"),
        ({"preset": "systemd", "unti": "x"}, "no key 'unti': there are preset, via, profiling, command"),
    ],
)
def test_bad_settings_are_told(settings, words):
    with pytest.raises(UsageError, match=words):
        Control(settings)


def test_the_profiler_flag_is_looked_up_before_any_restart(tmp_path):
    def control(command, **more):
        return Control({"command": command, "log": str(tmp_path / "log"), **more}, say=lambda _: None)

    with pytest.raises(K25Error, match="no --profiler-config: .* VLLM_TORCH_PROFILER_DIR=/t"):
        control("echo serve m").profiled("/t")  # an old version: its help does not have the flag
    with pytest.raises(K25Error, match=r"help can't be read \(.*not found\)"):
        control("no-such-vllm serve m").profiled("/t")
    with pytest.raises(UsageError, match="no `vllm serve"):
        control("./start.sh").profiled("/t")
    told = control("./start.sh", profiling={"command": "./start.sh prof"}).profiled("/t").command("start")
    assert "setsid ./start.sh prof >>" in told
    for flag in ("""--profiler-config '{"profiler": "torch"}'""", "--profiler-config.profiler=torch"):
        already = control(f"vllm serve m {flag}")
        assert already.profiled("/t") is already


def test_the_server_under_nsys(tmp_path, monkeypatch):
    nsys, vllm = tmp_path / "nsys", tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\necho --profiler-config\n")
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = {
        "command": "vllm serve m --profiler-config.profiler=torch --api-key s3cret",
        "log": str(tmp_path / "log"),
    }
    control = Control(settings, say=lambda _: None)
    with pytest.raises(
        K25Error, match=r"^nsys is not where the server runs: .* by `nsys profile .*k25 breakdown FILE"
    ) as e:
        control.profiled("/t", "nsys")
    whole = (
        "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none "
        "--capture-range=cudaProfilerApi --capture-range-end=repeat --cuda-graph-trace=node -o /t/k25-STAMP "
        """vllm serve m --api-key {} --profiler-config '{{"profiler": "cuda"}}'"""
    )
    assert f"`{whole.format('***')}`" in re.sub(r"/k25-\d{8}T\d{6} ", "/k25-STAMP ", str(e.value))
    nsys.write_text("#!/bin/sh\n")
    nsys.chmod(0o755)
    assert f"setsid {whole.format('s3cret')} >>" in re.sub(
        r"/k25-\d{8}T\d{6} ", "/k25-STAMP ", control.profiled("/t", "nsys").command("start")
    )
    unit = Control({"preset": "systemd", "unit": "vllm"})
    with pytest.raises(UsageError, match=r"under `nsys profile .* -o /t/k25` and with --profiler-config '.*cuda"):
        unit.profiled("/t", "nsys")


def test_presets_are_whole():
    for preset in presets().values():
        assert {"about", "start", "stop", "running", "mark", "logs", "exec", "python"} == set(preset)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """`ssh` to a real sshd on loopback, for this user: the words to put before a command."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if not sshd:
        pytest.skip("no sshd: apt-get install openssh-server")
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "config"], stderr=subprocess.DEVNULL)
    options = (
        f"-p {port} -i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    words = f"ssh -o BatchMode=yes {options} {getpass.getuser()}@127.0.0.1"
    deadline = time.monotonic() + 10
    while subprocess.run([*shlex.split(words), "true"], capture_output=True).returncode:
        assert time.monotonic() < deadline, "sshd does not let us in"
        time.sleep(0.1)
    yield words
    server.terminate()
    server.wait()


@pytest.mark.slow  # a dozen logins
def test_over_ssh(ssh, tmp_path, vllm):
    command, url = vllm
    settings = {"command": command, "log": str(tmp_path / "remote log"), "via": ssh}
    control = Control(settings, allowed=True, say=lambda _: None)
    assert not control.running()
    assert control.bring_up(url, every_s=0.05) == "tiny-kimi-k2.5"
    assert control.running() and control.run(["echo", "a 'quoted' word"]).stdout == "a 'quoted' word\n"
    assert control.python() == f"{ssh} {sys.executable}" and control.pid is None
    profiled = control.profiled("/tr aces")
    control.stop()
    profiled.bring_up(url, every_s=0.05)
    argv = process.find(int(url.rpartition(":")[2]))["argv"]
    assert json.loads(argv[argv.index("--profiler-config") + 1])["torch_profiler_dir"] == "/tr aces"
    log = (tmp_path / "remote log").read_text()
    assert len(log.splitlines()) == 2 and json.loads(log.splitlines()[0])["argv"][:2] == ["serve", "a model"]
    control.stop()
    assert not control.running()


def test_a_host_that_can_not_be_reached_is_told(tmp_path):
    via = f"ssh -o BatchMode=yes -o ConnectTimeout=2 -p {free_port()} 127.0.0.1"
    control = Control({"command": "vllm serve m", "log": str(tmp_path / "l"), "via": via}, allowed=True, say=str)
    for action in (control.running, control.stop, control.start):  # nobody takes it for a server that does not run
        with pytest.raises(K25Error, match="host can't be reached: .*Connection refused"):
            action()
