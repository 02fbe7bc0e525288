"""JupyterLab itself, in a real browser: a notebook is opened, run from its menu, and its figures are drawn."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from browser import CHROMIUM, FLAGS, INSTALL

from k25lib.run import PROJECT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium: {INSTALL}"),
]
CAPTURE = PROJECT / "data" / "sample" / "captures" / "h200x2-tp2-c1-20steps"


@pytest.fixture
def lab(tmp_path):
    """JupyterLab's URL, serving notebook 06 set to the sample capture."""
    book = nbformat.read(PROJECT / "notebooks" / "06_breakdown.ipynb", as_version=4)
    (cell,) = [c for c in book.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source += f"\ncapture = {str(CAPTURE)!r}"
    nbformat.write(book, tmp_path / "06_breakdown.ipynb")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "K25_RUNS": str(tmp_path / "runs"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    words = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--IdentityProvider.token=",
        f"--notebook-dir={tmp_path}",
    ]
    with (tmp_path / "lab.log").open("w") as log:
        command = [sys.executable, "-m", "jupyterlab", *words]
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/lab", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "lab.log").read_text()[-500:]
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_notebook_06_runs_and_draws_in_jupyterlab(lab):
    from playwright.sync_api import sync_playwright

    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{lab}/lab/tree/06_breakdown.ipynb")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_selector(".js-plotly-plot .main-svg", state="attached", timeout=120_000)
        assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
        browser.close()
    assert errors == []
