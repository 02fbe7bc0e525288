"""The server of a campaign, restarted: with its profiler and back, under nsys, found again, one campaign at a time."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from k25lib import capture as capture_module
from k25lib.campaign import servers
from k25lib.campaign.runner import Runner
from k25lib.campaign.servers import Controlled, External, Unavailable, alone, with_profiler
from k25lib.capture import Load, capture
from k25lib.client import Client, ProfilerMissing
from k25lib.errors import K25Error, UsageError
from k25lib.run import Run
from k25lib.server import control as control_module
from k25lib.server import process
from k25lib.server.control import Control
from k25lib.server.watch import wait_until_ready
from k25lib.settings import Server, Settings


@pytest.fixture
def running(vllm, tmp_path, monkeypatch):
    """A stand-in server that runs, and how it is controlled: (settings, control)."""
    monkeypatch.setenv("K25_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    command, url = vllm
    control = {"command": command, "log": str(tmp_path / "log")}
    keeper = Control(control, allowed=True, say=str)
    keeper.bring_up(url, every_s=0.05)
    Path("port-was-taken").unlink(missing_ok=True)
    yield Server(url=url, busy_wait_s=0), control
    keeper.stop()


@pytest.fixture(autouse=True)
def quick_and_idle(monkeypatch):
    monkeypatch.setattr(Client, "running", lambda _: (0, 0))
    monkeypatch.setattr(control_module, "wait_until_ready", partial(wait_until_ready, every_s=0.05))


def argv(settings):
    return process.find(process.port_of(settings.url))["argv"]


def test_the_whole_round_and_back_after_a_first_start_that_fails(running, monkeypatch, capsys):
    settings, control = running
    monkeypatch.setenv("FAKE_VLLM", "port")  # the next start finds its port taken
    server = Controlled(settings, control)
    assert "stacks" not in server.up() and server.mode == "normal"
    server.free()
    assert process.find(process.port_of(settings.url)) is None
    server.free()
    facts = server.up(profiler=True)
    assert (facts["stacks"], facts["traces"], facts["python"]) == (False, server.traces, sys.executable)
    config = json.loads(argv(settings)[argv(settings).index("--profiler-config") + 1])
    assert config["torch_profiler_dir"] == server.traces and config["torch_profiler_with_stack"] is False
    server.up(profiler=True)
    server.close()
    assert "--profiler-config" not in argv(settings)
    said = [line.split(": ")[1].split(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said.count("restarting") == 2
    told = [word for word in said if word in ("running", "the")]
    assert told == ["running", "running", "the", "running", "running", "running"]


def test_back_to_normal_after_a_failure_in_a_notebook(running, tmp_path, capsys):
    settings, control = running
    tree = {"server": {"url": settings.url}, "control": control}
    run = Run.create("x", tmp_path / "runs", settings=tree, server={"tp": 2})
    with pytest.raises(ProfilerMissing), with_profiler(run, settings.url):
        pytest.fail("the server has no profiler")
    said = capsys.readouterr().err
    assert said.count("with allow_restart = True this would run") == 4 and "--profiler-config" in said
    with pytest.raises(RuntimeError), with_profiler(run, settings.url, allow_restart=True) as known:
        assert (known["tp"], Client(settings.url).has_profiler()) == (2, True)
        raise RuntimeError
    assert not Client(settings.url).has_profiler()


def test_a_server_that_died_is_started_again(running):
    settings, control = running
    server = Controlled(settings, control)
    os.kill(process.find(process.port_of(settings.url))["pid"], 9)
    while server.control.running():
        pass
    assert server.died() == "its process has gone; look at its log"
    server.up()
    assert Client(settings.url).ready() == "tiny-kimi-k2.5"


def test_a_server_that_can_not_be_put_back_is_told(running, monkeypatch, capsys):
    settings, control = running
    server = Controlled(settings, control)
    server.free()
    monkeypatch.setenv("FAKE_VLLM", "die")
    with pytest.raises(K25Error, match="died while starting: ValueError: no room for the cache"):
        server.close()
    assert f"not put back; by hand: cd . && {{ nohup setsid {control['command']}" in capsys.readouterr().err


@pytest.mark.parametrize("act", [lambda server: server.free(), lambda server: server.up(profiler=True)])
def test_a_stop_that_takes_too_long_is_made_good(running, monkeypatch, act):
    settings, control = running
    stop = control_module.presets()["process"]["stop"]
    server = Controlled(settings, {**control, "stop": f"test -e asked || {{ touch asked; exit; }}; {stop}"})
    first = process.find(process.port_of(settings.url))["pid"]
    with monkeypatch.context() as short, pytest.raises(K25Error, match="was told to stop, and still runs after 0 s"):
        short.setattr(control_module, "STOP_LIMIT_S", 0.0)
        act(server)
    server.close()
    assert (server.mode, Client(settings.url).ready()) == ("normal", "tiny-kimi-k2.5")
    assert process.find(process.port_of(settings.url))["pid"] != first and "--profiler-config" not in argv(settings)


def test_a_server_that_did_not_stop_in_time_is_not_taken_for_stopped(running, monkeypatch):
    settings, control = running
    stop = control_module.presets()["process"]["stop"]
    server = Controlled(settings, {**control, "stop": f"test -e asked || {{ touch asked; exit; }}; {stop}"})
    with monkeypatch.context() as short, pytest.raises(K25Error, match="still runs"):
        short.setattr(control_module, "STOP_LIMIT_S", 0.0)
        server.free()
    server.free()
    assert process.find(process.port_of(settings.url)) is None


@pytest.mark.parametrize(
    ("number", "ends"),
    [(signal.SIGTERM, SystemExit(143)), (signal.SIGHUP, SystemExit(129)), (signal.SIGINT, KeyboardInterrupt())],
)
def test_a_signal_waits_until_the_server_is_put_back(running, places, monkeypatch, capsys, number, ends):
    settings, control = running
    server = Controlled(settings, control)
    server.free()
    start = server.normal.bring_up
    monkeypatch.setattr(server.normal, "bring_up", lambda *a, **k: (signal.raise_signal(number), start(*a, **k)))
    run = Run.create("x", settings={}, title="x", phases={})
    with pytest.raises(type(ends)) as caught:
        Runner(run, [], Settings(), server, say=str).go()
    assert (caught.value.args, Client(settings.url).ready()) == (ends.args, "tiny-kimi-k2.5")
    assert (run.report_dir / "index.html").is_file() and run.manifest["server_error"] == ""
    assert f"{signal.Signals(number).name} waits until the server is put back" in capsys.readouterr().err


def test_a_second_ctrl_c_leaves_the_server_and_says_how_it_is_started(running, places, monkeypatch, capsys):
    settings, control = running
    server = Controlled(settings, control)
    server.free()

    def twice(*_, **__):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server.normal, "bring_up", twice)
    with pytest.raises(KeyboardInterrupt):
        Runner(Run.create("x", settings={}, title="x", phases={}), [], Settings(), server, say=str).go()
    assert f"not put back; by hand: cd . && {{ nohup setsid {control['command']}" in capsys.readouterr().err


def test_what_a_control_runs_hears_no_ctrl_c_of_the_terminal():
    told = Control({"command": "x", "log": "l"}).run(["sh", "-c", "cut -d' ' -f5 /proc/$$/stat"]).stdout
    assert int(told) != os.getpgrp()


def test_the_deep_dive(running, tmp_path, monkeypatch):
    settings, control = running
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("nsys.py")} "$@"\n')
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nsys.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(capture_module, "send", lambda *_, **__: [{"tpot_ms": 1.0}])
    monkeypatch.setattr(capture_module, "SETTLE_S", {"nsys": 0.2})
    server, said = Controlled(settings, control, "nsys"), []
    traces = server.up(profiler=True)["traces"]

    def take(name, **more):
        where, load = tmp_path / "captures" / name, Load(concurrency=1, requests=1, input_tokens=8, output_tokens=4)
        return capture(settings.url, "m", traces, where, load, profiler="nsys", world_size=2, say=said.append, **more)

    record = take("c1")
    files = [(file["file"], file["rank"], file["fault"]) for file in record["files"]]
    assert files == [("k25.1.sqlite", 0, ""), ("k25.1.sqlite", 1, "")]
    assert (record["ranks"], record["missing_ranks"], record["profiler"]) == ([0, 1], [], "nsys")
    assert sorted(p.name for p in (tmp_path / "captures" / "c1").iterdir()) == [
        "capture.json", "k25.1.nsys-rep", "k25.1.sqlite", "nsys-calls",
    ]  # fmt: skip
    nsys.unlink()  # where the reports are looked at, there may be none
    record = take("c2")
    report = tmp_path / "captures" / "c2" / "k25.2.nsys-rep"
    database = report.with_suffix(".sqlite")
    assert said[-1] == (
        f"nsys is not here: where it is, run `nsys export --type sqlite --output {database} {report}`, "
        f"then `k25 breakdown {database}`"
    )
    assert [(file["file"], file["fault"]) for file in record["files"]] == [("k25.2.nsys-rep", "")]
    server.close()
    assert "nsys" not in argv(settings) and "--profiler-config" not in argv(settings)


def test_gpus_of_another_machine_are_not_measured_here(monkeypatch):
    elsewhere = External(Server(url="http://192.0.2.1:8000"))
    with pytest.raises(Unavailable, match="is on another machine: set server.python to .*ssh"):
        elsewhere.free()
    External(Server(url="http://192.0.2.1:8000", python="ssh host python3"), gpus_are_free=True).free()


@pytest.mark.parametrize(
    ("url", "python", "cards", "free"),
    [
        ("http://192.0.2.1:8000", "ssh host python3", [], False),
        ("http://127.0.0.1:8000", "ssh host python3", [], False),  # through a tunnel
        ("http://127.0.0.1:8000", "/venv/bin/python", [], True),
        ("http://127.0.0.1:8000", "", [], True),
        ("http://127.0.0.1:8000", "/venv/bin/python", [{}], False),
    ],
)
def test_gpus_that_a_server_holds_are_not_measured_unasked(monkeypatch, url, python, cards, free):
    monkeypatch.setattr(servers, "gpus", lambda: cards)
    server = External(Server(url=url, python=python))
    if not free:
        with pytest.raises(Unavailable, match=f"the server at {url} holds the GPUs: .* with --gpus-are-free it runs"):
            server.free()
    server.gpus_are_free = not free
    assert server.free() is None


def test_a_secret_that_the_run_did_not_keep_starts_nothing():
    with pytest.raises(UsageError, match="held a secret"):
        Controlled(Server(url="http://127.0.0.1:1"), {"command": "vllm serve m --api-key ***", "log": "l"})


def test_a_second_campaign_waits_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("K25_RUNS", str(tmp_path))
    script = "from k25lib.campaign.servers import alone\nwith alone('http://127.0.0.1:8000/v1'): print('in')"
    with alone("localhost:8000"):
        second = subprocess.Popen(
            [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        said = second.stderr.readline()
        with alone("localhost:8001"):  # another server
            assert second.poll() is None
    assert f"another campaign measures it (process {os.getpid()}): waiting for its end" in said
    assert second.communicate()[0] == "in\n"
