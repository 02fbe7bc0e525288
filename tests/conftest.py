"""What all tests share: one real server for the whole session, and CI's rule that nothing is skipped."""

import os
import signal

import pytest


def pytest_configure():
    """A shell's background jobs inherit SIGINT as ignored, and their children too: tests that send it need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def served():
    """The embedded server: real vLLM on the CPU with the tiny Kimi-K2.5, started once."""
    from k25lib.run import PROJECT
    from k25lib.server.embedded import Embedded

    with Embedded(PROJECT) as server:
        yield server


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Runs and reports of this test go to its own folder."""
    monkeypatch.setenv("K25_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("K25_REPORTS", str(tmp_path / "reports"))
    return tmp_path


def pytest_sessionfinish(session, exitstatus):
    """With K25_NO_SKIP (CI) a skipped test fails the session."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("K25_NO_SKIP") and reporter and reporter.stats.get("skipped"):
        reporter.write_line("K25_NO_SKIP is set and tests were skipped", red=True)
        session.exitstatus = exitstatus or 1
