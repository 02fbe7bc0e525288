"""One notebook, and each way that it can fail: none may look like a success."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time

import nbformat
import pytest

from k25lib.campaign.execute import NotebookFailed, checked_parameters, execute
from k25lib.errors import K25Error, UsageError


def notebook(path, *cells, parameters='run: str = ""  # run\nn: int = 1  # a number'):
    """Write a notebook with a parameters cell and these code cells."""
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    )
    book.cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    book.cells += [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells]
    nbformat.write(book, path)
    return path


def run_notebook(tmp_path, *cells, timeout_s=60, **parameters):
    source = notebook(tmp_path / "02_x.ipynb", *cells)
    target = tmp_path / "out" / "02_x.ipynb"
    execute(source, target, parameters, timeout_s, tmp_path / "02_x.log", progress=io.StringIO())
    return target


def outputs(path):
    return [o.get("text", "") for c in nbformat.read(path, 4).cells if c.cell_type == "code" for o in c.outputs]


def test_a_good_notebook_gets_its_parameters_and_its_stderr_goes_to_the_log(tmp_path):
    target = run_notebook(tmp_path, "import sys; print(n + 1); print('aside', file=sys.stderr)", n=41)
    assert "42\n" in outputs(target)
    assert (tmp_path / "02_x.log").read_text().strip() == "aside"
    assert sorted(p.name for p in target.parent.iterdir()) == ["02_x.ipynb"]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["1/0", "print('never')"], "cell 2: ZeroDivisionError: division by zero"),
        (["from k25lib.errors import K25Error\nraise K25Error('say\\nthis')"], "cell 2: say this"),
        (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "print('never')"], "the kernel died"),
        (["import sys; sys.exit(0)", "print('never')"], "SystemExit"),
        (["import sys; sys.exit(0)"], "SystemExit"),
        (["import sys; sys.exit(3)"], "SystemExit"),
        (["import os; os._exit(0)", "1"], "the kernel died"),
    ],
)
def test_every_way_of_failing_is_a_failure_with_its_reason(tmp_path, cells, reason):
    with pytest.raises(NotebookFailed) as error:
        run_notebook(tmp_path, *cells)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["02_x.failed.ipynb"]


def test_a_cell_that_takes_too_long_is_stopped(tmp_path):
    with pytest.raises(NotebookFailed, match=r"cell_timeout_s = 1 s"):
        run_notebook(tmp_path, "import time; time.sleep(60)", timeout_s=1)


def test_an_unknown_kernel_does_not_overwrite_an_earlier_result(tmp_path):
    target = run_notebook(tmp_path, "print('first')")
    source = notebook(tmp_path / "02_x.ipynb", "print('second')")
    book = nbformat.read(source, 4)
    book.metadata.kernelspec.name = "no-such-kernel"
    nbformat.write(book, source)
    with pytest.raises(NotebookFailed, match="no-such-kernel"):
        execute(source, target, {}, 60, tmp_path / "log", progress=sys.stderr)
    assert "first\n" in outputs(target)


def test_a_second_try_that_succeeds_leaves_no_failed_copy(tmp_path):
    with pytest.raises(NotebookFailed):
        run_notebook(tmp_path, "1/0")
    target = run_notebook(tmp_path, "1")
    assert sorted(p.name for p in target.parent.iterdir()) == ["02_x.ipynb"]


def test_parameters_are_checked_before_a_kernel_starts(tmp_path):
    source = notebook(tmp_path / "n.ipynb", "1")
    assert checked_parameters(source, {"n": 3}, "macro") == {"n": 3}
    with pytest.raises(UsageError, match=r"unknown parameter 'm' in macro.* There are: run, n"):
        checked_parameters(source, {"m": 3}, "macro")
    with pytest.raises(UsageError, match="macro.n must be int"):
        checked_parameters(source, {"n": "3"}, "macro")
    bare = notebook(tmp_path / "bare.ipynb", "1", parameters="")
    with pytest.raises(K25Error, match="parameters"):
        checked_parameters(bare, {}, "macro")


@pytest.mark.parametrize(
    "content",
    ["", '{"cells": [', "[]", "{}", "\xff", '{"nbformat": 9}', '{"cells": [], "metadata": {}, "nbformat": 4}'],
)
def test_a_file_that_is_no_notebook_is_one_line(tmp_path, content):
    path = tmp_path / "02_x.ipynb"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match="02_x.ipynb can't be read as a notebook: ") as error:
        checked_parameters(path, {}, "macro")
    assert "\n" not in str(error.value)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow  # a kernel that sleeps is given 5 s to end
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_keep_the_half_and_leave_no_orphan(tmp_path, sent):
    """The runner's own process gets the signal while a cell runs, with a child of the kernel beside it."""
    pids = tmp_path / "pids"
    notebook(
        tmp_path / "02_x.ipynb",
        "print('measured')",
        f"""
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "300"])
        pathlib.Path({str(pids)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(300)
        """,
    )
    script = f"""
        import pathlib
        from k25lib.campaign.execute import execute
        from k25lib.campaign.runner import _signals_as_exit
        here = pathlib.Path({str(tmp_path)!r})
        with _signals_as_exit():
            execute(here / "02_x.ipynb", here / "out" / "02_x.ipynb", {{}}, 600, here / "log")
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(sent)
    process.wait(timeout=60)
    assert process.returncode != 0
    half = tmp_path / "out" / "02_x.failed.ipynb"
    assert "measured\n" in outputs(half)
    kernel, child = map(int, pids.read_text().split())
    deadline = time.monotonic() + 20
    while (alive(kernel) or alive(child)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(kernel)
    assert not alive(child)
