"""The command itself: whatever ends it, one line says so and the exit code tells."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k25lib import cli
from k25lib.errors import K25Error
from k25lib.run import PROJECT

SHAPES = ["shapes", str(PROJECT / "data" / "reference" / "kimi-k2.5" / "config.json"), "--tp", "8", "--json"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PROJECT)}


def command(*words, **more):
    return subprocess.Popen([sys.executable, "-m", "k25lib", *words], env=ENVIRONMENT, text=True, **more)


@pytest.fixture
def running(monkeypatch):
    """Make `k25` run this function in place of a command; returns `main`."""

    def make(function):
        parser = argparse.ArgumentParser()
        parser.set_defaults(run=lambda args: function())
        monkeypatch.setattr(cli, "parser", lambda: parser)
        return cli.main([])

    return make


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (K25Error("say this"), 1, "k25: say this\n"),
        (
            OSError(28, "No space left on device", "/x"),
            1,
            "k25: No space left on device (/x): make room, or set K25_RUNS",
        ),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "k25: Permission denied (/x): set K25_RUNS and K25_REPORTS",
        ),
        (OSError(30, "Read-only file system", "/x"), 1, "k25: Read-only file system (/x): set K25_RUNS"),
        (IsADirectoryError(21, "Is a directory", "/x"), 1, "k25: Is a directory (/x)\n"),
        (BrokenPipeError(), 0, ""),
        (KeyboardInterrupt(), 130, "k25: interrupted; what was measured so far is kept\n"),
    ],
)
def test_whatever_ends_a_command_is_one_line(running, capsys, error, code, line):
    def fail():
        raise error

    assert running(fail) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == bool(line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_interrupt_with_its_own_exit_code(running, number):
    before = signal.getsignal(number)
    kept = []

    def measure():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            kept.append("rows")

    assert (running(measure), kept) == (128 + number, ["rows"])
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_so(running):
    """As nohup starts a command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert running(lambda: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_amid_the_output_waits_for_its_end(running, capsys, monkeypatch):

    def shown(*words, **more):
        os.kill(os.getpid(), signal.SIGINT)
        sys.stdout.write(" ".join(words))

    monkeypatch.setattr(cli, "print", lambda *words, flush=False, file=None: shown(*words), raising=False)
    with pytest.raises(KeyboardInterrupt):
        cli.print_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_a_full_disk_below_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        process = command(*SHAPES, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("k25: No space left on device") and err.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error():
    process = command(*SHAPES, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(60), err) == (0, "")
