"""What a log, a config.json and a process tell of a server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k25lib.server.chosen import chosen, flags, profiler
from k25lib.server.identity import discover, keep_config

LOG = """\
(APIServer pid=1) INFO 11-29 21:48:01 [api_utils.py:273] non-default args: {'model': '/m', 'tensor_parallel_size': 8}
(EngineCore pid=2) INFO Initializing a V1 LLM engine (v0.25.1) with config: model='/m'
ERROR died
(APIServer pid=1672) INFO 11-29 21:48:01 [api_utils.py:273] non-default args: {'model': '/m', 'hf_overrides': \
{'num_hidden_layers': 61}, 'tensor_parallel_size': 2, 'profiler_config': ProfilerConfig(profiler='torch', \
torch_profiler_dir='/tmp/prof', ignore_frontend=True)}
(EngineCore pid=1786) INFO 11-29 21:48:22 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: model='/m'
(Worker pid=1896) INFO 11-29 21:48:43 [pynccl.py:113] vLLM is using nccl==2.28.9
(Worker pid=1896) INFO Using ['PYNCCL'] all-reduce backends (in dispatch order) for group 'tp:0' out of: ['X'].
(Worker_TP0 pid=1896) INFO [cuda.py:482] Using FLASH_ATTN_MLA attention backend out of potential backends: ['FLASHMLA'].
(Worker_TP0 pid=1896) INFO [selector.py:174] Using FLASH_ATTN MLA prefill backend.
(Worker_TP0 pid=1896) INFO [int_wna16.py:206] Using 'MARLIN' WNA16 MoE backend.
(Worker_TP0 pid=1896) INFO GPU KV cache size: 648,032 tokens
"""


def test_a_log_tells_what_was_chosen_by_the_last_start():
    assert chosen(LOG) == {
        "vLLM version": "0.26.0",
        "NCCL": "2.28.9",
        "MoE backend": "MARLIN",
        "attention backend": "FLASH_ATTN_MLA",
        "MLA prefill backend": "FLASH_ATTN",
        "all-reduce backends": "['PYNCCL']",
        "KV cache tokens": "648,032",
    }
    found = flags(LOG)
    assert (found["tensor_parallel_size"], found["hf_overrides"]) == (2, {"num_hidden_layers": 61})
    assert found["profiler_config"].startswith("ProfilerConfig(")
    assert profiler(LOG) == {"traces": "/tmp/prof"}
    assert profiler(LOG.replace("ignore_", "torch_profiler_with_stack=True, ignore_"))["stacks"] is True


@pytest.mark.parametrize("log", ["", "non-default args: {'a': ", "non-default args: {broken", "no words of ours"])
def test_a_log_that_tells_nothing_or_breaks_off_gives_nothing_wrong(log):
    assert chosen(log) == {}
    assert profiler(log) == {}
    assert set(flags(log)) <= {"arguments"}


def test_the_kept_config_has_the_overrides_in_it(tmp_path):
    config = {"architectures": ["X"], "num_hidden_layers": 6, "text_config": {"hidden_size": 8, "vocab_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    overrides = {"num_hidden_layers": 61, "text_config": {"vocab_size": 32}}
    kept = keep_config(tmp_path / "config.json", {"hf_overrides": overrides}, tmp_path / "kept.json")
    expected = {"architectures": ["X"], "num_hidden_layers": 61, "text_config": {"hidden_size": 8, "vocab_size": 32}}
    assert json.loads(Path(kept).read_text()) == expected
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_a_process_is_found_by_its_port(tmp_path):
    """Interpreter as it was called, log, and the profiler's folder from its arguments, relative to where it runs."""
    script = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    words = ["--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": "traces"})]
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        server = subprocess.Popen([sys.executable, "-c", script, *words], stdout=output, cwd=tmp_path)
    try:
        while not log.read_text().strip():
            assert server.poll() is None
        url = f"http://127.0.0.1:{log.read_text().strip()}"
        traces = {"traces": str(tmp_path / "traces"), "stacks": True}  # vLLM's default
        assert discover(url) == {"python": sys.executable, "log": str(log), **traces}
        assert discover(url.replace("127.0.0.1", "192.0.2.1")) == {}
    finally:
        os.kill(server.pid, 9)
        server.wait()
    assert discover(url) == {}
