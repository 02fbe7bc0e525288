"""JupyterLab itself, in a real browser: a notebook is run from its menu, and its figures follow the pickers."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from browser import CHROMIUM, FLAGS, INSTALL

from k25lib.run import PROJECT, Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium: {INSTALL}"),
]
OLDER = "2026-01-01T000000-older"
SAMPLES = PROJECT / "data" / "sample" / "captures"


@pytest.fixture
def lab(tmp_path):
    """JupyterLab's URL, serving the notebooks, with a run that has two captures, and an older one with tables only."""
    shutil.copytree(PROJECT / "data" / "sample" / "run-h200x2", tmp_path / "runs" / OLDER)
    run = Run.create("bench", tmp_path / "runs")
    for name, sample in (("c1", "h200x2-tp2-c1-20steps"), ("c64", "h200x2-tp2-c64")):
        shutil.copytree(SAMPLES / sample, run.path / "captures" / name)
    shutil.copytree(PROJECT / "notebooks", tmp_path / "notebooks")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "K25_RUNS": str(tmp_path / "runs"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    words = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--IdentityProvider.token=",
        f"--notebook-dir={tmp_path / 'notebooks'}",
    ]
    with (tmp_path / "lab.log").open("w") as log:
        command = [sys.executable, "-m", "jupyterlab", *words]
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
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


def test_notebook_06_draws_and_draws_again_what_is_chosen(lab):
    from playwright.sync_api import sync_playwright

    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 6000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{lab}/lab/tree/06_breakdown.ipynb")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        lanes = page.locator(".gtitle", has_text="One decode step of").first
        lanes.wait_for(state="attached", timeout=120_000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
        assert lanes.text_content() == "One decode step of c1, stream by stream"
        run, capture = page.locator(".widget-dropdown select").all()
        assert run.locator("option").all_text_contents()[1:] == [OLDER]
        assert capture.locator("option").all_text_contents() == ["all", "c1", "c64"]
        capture.select_option("c64")
        page.locator(".gtitle", has_text="One decode step of c64").first.wait_for(state="attached", timeout=60_000)
        assert page.get_by_text('capture = "c64"').count() == 1
        labels = page.locator(".js-plotly-plot").first.locator(".ytick text").all_text_contents()
        assert {label.split(",")[0] for label in labels} == {"c64"}
        page.screenshot(path="/tmp/findings/p/lab.png")
        run.select_option(OLDER)
        page.get_by_text(f'run = "{OLDER}", capture = "c64"').wait_for(timeout=60_000)
        waits = page.locator(".jp-RenderedHTMLCommon table").last.locator("tbody tr td:first-child")
        assert set(waits.all_text_contents()) == {"c64"}
        capture.select_option("all")
        page.get_by_text(f'run = "{OLDER}", capture = ""').wait_for(timeout=60_000)
        assert set(waits.all_text_contents()) == {"c1", "c64"}
        browser.close()
    assert errors == []
