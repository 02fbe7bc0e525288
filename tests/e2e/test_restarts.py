"""A campaign that restarts a real server by itself: normal, stopped, with its profiler, normal again."""

import json
import os
import shlex
import sys

import pytest
from ports import free_port
from test_campaign import PHASES, SMALL, k25, only_run, states

from k25lib.client import Client
from k25lib.run import PROJECT
from k25lib.server.control import Control
from k25lib.server.embedded import Embedded

pytestmark = pytest.mark.slow

KEY = "a-key-that-nobody-may-read"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Real vLLM that asks for a key: (url, campaign file); the first start with a profiler fails."""
    folder = tmp_path_factory.mktemp("server")
    embedded = Embedded(PROJECT)
    port = free_port()
    python, _, _, *words = embedded.command(embedded.install(), port)
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in embedded.environment().items()]
    program = folder / "vllm"
    program.write_text(
        "#!/bin/sh\n" + "".join(exports) + "unset PYTHONPATH VLLM_API_KEY\n"
        f'case "$*" in *--help=all*) ;; *--profiler-config*) [ -e {folder}/failed ] || {{ touch {folder}/failed; '
        'echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB"; exit 1; };; esac\n'
        f'exec {python} -m vllm.entrypoints.cli.main "$@"\n'
    )
    program.chmod(0o755)
    url, log = f"http://127.0.0.1:{port}", str(folder / "serve.log")
    control = {"command": shlex.join([str(program), *words, "--api-key", KEY]), "log": log}
    campaign = folder / "campaign.toml"
    campaign.write_text(
        f"[server]\nurl = {json.dumps(url)}\ntraces = {json.dumps(str(folder / 'traces'))}\n[control]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in control.items())
    )
    keeper = Control(control, allowed=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K25_API_KEY", KEY)
        keeper.bring_up(url)
        yield url, campaign
    keeper.stop()


def test_a_campaign_restarts_its_server_and_puts_it_back(server, tmp_path):
    url, campaign = server
    dry = k25(tmp_path, "run", "--campaign", campaign, "--allow-restart", "--dry-run", *SMALL)
    would = [line.split(" ", 2)[2] for line in dry.stdout.splitlines() if line.startswith("would run")]
    assert [("kill -TERM" in line, "--profiler-config" in line) for line in would] == [
        (True, False), (False, True), (True, False), (False, False),
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()

    done = k25(tmp_path, "run", "--campaign", campaign, "--allow-restart", *SMALL)
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0
    run = only_run(tmp_path)
    assert states(run) == dict.fromkeys(PHASES, "ok")
    ran = [line.split("running: ")[1] for line in done.stderr.splitlines() if line.startswith("  server: running: ")]
    assert [line for line in ran if "kill" not in line] == [would[1], would[1], would[3]]
    assert "died while starting: torch.OutOfMemoryError" in done.stderr and "trying again" in done.stderr
    lines = done.stderr.splitlines()
    order = ["02_macro: ok", "kill -TERM", "03_micro_gemm: running", "04_nccl: ok", "in the profiling"]
    order += ["05_profiler_capture: running", "06_breakdown: ok", "in the normal"]
    at = [next(n for n, line in enumerate(lines) if words in line) for words in order]
    assert at == sorted(at)
    records = run.manifest["captures"].values()
    assert [record["ranks"] for record in records] == [[0, 1], [0, 1]]
    assert not run.manifest["server_error"] and len(run.table("gemm")) and len(run.table("breakdown"))
    assert not Client(url).has_profiler() and Client(url).ready() == "tiny-kimi-k2.5"

    texts = [dry.stdout, dry.stderr, done.stdout, done.stderr]
    texts += [path.read_bytes().decode(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    texts += [path.read_text() for path in (tmp_path / "reports").rglob("*") if path.is_file()]
    assert len(texts) > 20 and not [text for text in texts if KEY in text]


def test_a_capture_under_nsys(server, tmp_path, monkeypatch):
    """The deep dive on the same server; nsys is a stand-in."""
    url, campaign = server
    nsys = tmp_path / "nsys"
    nsys.write_text(f'#!/bin/sh\nexec {sys.executable} {PROJECT / "tests" / "server" / "nsys.py"} "$@"\n')
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--only", "01,05,06", "--set", "capture.profiler=nsys", *SMALL]
    done = k25(tmp_path, "run", "--campaign", campaign, "--allow-restart", *words)
    assert done.returncode == 0, done.stderr
    records = only_run(tmp_path).manifest["captures"]
    assert [record["ranks"] for record in records.values()] == [[0, 1], [0, 1]]
    names = {name: {f["file"].split(".", 1)[1] for f in record["files"]} for name, record in records.items()}
    assert names == {"c1": {"1.sqlite"}, "c8": {"2.sqlite"}}
    assert states(only_run(tmp_path))["06_breakdown"] == "ok"
    assert not Client(url).has_profiler()
