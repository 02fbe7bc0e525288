"""The embedded server: real vLLM on the CPU with a tiny Kimi-K2.5, for a machine where no server is named."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from k25lib.client import key_of_environment, profiler_config
from k25lib.errors import K25Error, UsageError
from k25lib.redaction import redact
from k25lib.server import process, startup, supervisor, vllm_cpu
from k25lib.server.watch import LogFile, wait_until_ready

MODEL = "tiny-kimi-k2.5"
TP = 2
KEEP_FOLDERS = 5
GRACE_S = 15.0  # a CPU server ends within 2.5 s of SIGTERM, unless it is writing a trace
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a first profiled request takes 0.16 s instead of 4 s
    "CUDA_VISIBLE_DEVICES": "",
}


class Embedded:
    """One embedded server. `start()` returns when it can make tokens; it ends with `stop()`, with the block that it
    is the context of, and when the process that started it ends, however that ends.

    Known after `start()`: `url`, `model`, `tp`, `python`, `config` (config.json), `traces` (the profiler's folder),
    `log`, `pid`. A second `start()` keeps the folder, and the port if it is still free.
    """

    model, tp = MODEL, TP

    def __init__(self, root, profiler=True, extra_args=(), port=0):
        self.root = Path(root).resolve()
        self.profiler, self.extra_args, self.asked_port = profiler, list(extra_args), port
        self.url = self.python = self.config = self.traces = self.log = self.folder = None
        self._process, self._log_start = None, 0

    @property
    def pid(self):
        """The process of vLLM; None before it has one."""
        return self._state().get("pid")

    def start(self, on_stage=None, limit_s=900.0):
        """Make what is missing, start the server, wait until it has made a token, and return self.

        `on_stage` is called with one line of text at each change. Raises K25Error with the reason if it can't be.
        """
        on_stage = on_stage or (lambda text: None)
        if self.is_alive():
            raise K25Error(f"the embedded server runs already at {self.url}")
        if not 0 <= self.asked_port < 65536:
            raise UsageError(f"port {self.asked_port} is none: give one from 1 to 65535, or none for a free one")
        model = self.install(on_stage)
        self._sweep()
        last_port = int(self.url.rpartition(":")[2]) if self.url else 0
        for attempt in range(3):
            port = self.asked_port or _free_port(last_port if attempt == 0 else 0)
            if self.asked_port and not _is_free(port):
                raise K25Error(f"port {port} is in use: give another one, or none for a free one")
            on_stage(f"starting vLLM on port {port}")
            try:
                self._launch(model, port)
                self._wait(on_stage, limit_s)
                return self
            except _PortTaken:  # by another program, between our look and vLLM's bind
                continue
            except BaseException:
                self.stop()
                raise
        raise K25Error("no free port could be kept for the embedded server: try again, or give --port")

    def install(self, on_stage=None):
        """Make what is missing, vLLM's environment and the tiny model, and return the model's folder."""
        on_stage = on_stage or (lambda text: None)
        self.python = vllm_cpu.interpreter(self.root, on_stage)
        model = vllm_cpu.tiny_model(self.root, self.python, on_stage)
        self.config = model / "config.json"
        return model

    def stop(self):
        """End the server and wait until nothing of it is left. Harmless if it has ended."""
        if self.is_alive():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._state()["grace_s"] + 10)

    def is_alive(self):
        """True while the server's processes live (that it makes tokens is `Client.ready`'s to say)."""
        return self._process is not None and self._process.poll() is None

    def why_died(self):
        """The last error of the server's log in one line, or how it ended; '' while it lives."""
        if self.is_alive():
            return ""
        error = redact(startup.last_error(self._own_log()))
        return error or self._state().get("ended") or "its supervisor was killed"

    def __enter__(self):
        return self if self.is_alive() else self.start()

    def __exit__(self, *_):
        self.stop()

    def _launch(self, model, port):
        if self.folder is None:
            self.folder = _servers(self.root) / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S.%f}-{os.getpid()}"
            self.traces, self.log = self.folder / "traces", self.folder / "serve.log"
            self.traces.mkdir(parents=True)
        self.url = f"http://127.0.0.1:{port}"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        state = {"log": str(self.log), "owner": os.getpid(), "grace_s": GRACE_S, "shared_memory": {}}
        (self.folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        command = self.command(model, port, self.traces if self.profiler else None)
        words = [sys.executable, supervisor.__file__, str(self.folder), *command, *self.extra_args]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, env=self.environment(), cwd=self.folder,
            )  # fmt: skip

    def command(self, model, port, traces=None):
        """The words that start vLLM with the tiny model at `port`, its profiler writing to `traces` if given."""
        command = [
            self.python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", port, "--tensor-parallel-size", TP, "--max-model-len", 2048,
            "--max-num-seqs", 64, "--enforce-eager", "--language-model-only", "--kv-cache-memory-bytes", 1 << 27,
        ]  # fmt: skip
        config = profiler_config(traces) | {"torch_profiler_record_shapes": True}
        return [str(word) for word in command + (["--profiler-config", json.dumps(config)] if traces else [])]

    def environment(self):
        """The environment that vLLM is started with."""
        caches = vllm_cpu.cache_dir(self.root)
        key = key_of_environment()
        return {
            **vllm_cpu.clean_environment(),
            **_SETTINGS,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpu) for cpu in _cpus(TP)),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "VLLM_CONFIG_ROOT": str(caches / "vllm"),
            "HF_HOME": str(caches / "huggingface"),
            **({"VLLM_API_KEY": key} if key else {}),
        }

    def _wait(self, on_stage, limit_s):
        starting = {
            "log": LogFile(self.log, self._log_start),
            "alive": self.is_alive,
            "probe": lambda: process.activity(self._process.pid),
            "starts": vllm_cpu.cache_dir(self.root) / "starts.json",
        }
        try:
            wait_until_ready(self.url, **starting, say=on_stage, limit_s=limit_s, every_s=0.2)
        except K25Error as error:
            if not self.asked_port and re.search(r"[Aa]ddress already in use", self._own_log()):
                raise _PortTaken from None
            raise K25Error(f"embedded server: {error}; its log is {self.log}") from None
        on_stage(f"ready: {self.model} at {self.url}")

    def _state(self):
        return _read(self.folder / "state.json") if self.folder else {}

    def _own_log(self):
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", errors="replace")

    def _sweep(self):
        """Clean up behind servers whose supervisor was killed; keep the folders of the newest dead ones only."""
        dead = []
        for path in sorted(_servers(self.root).glob("*/state.json"), reverse=True):
            state = _read(path)
            starting = "supervisor" not in state and supervisor.start_time(state.get("owner")) is not None
            if path.parent == self.folder or starting or _runs(state):
                continue
            dead.append(path.parent)
            if "supervisor" in state and "ended" not in state:
                supervisor.remove_shared_memory(state["shared_memory"])
                shutil.rmtree(state["temporary"], ignore_errors=True)
        for folder in dead[KEEP_FOLDERS:]:
            shutil.rmtree(folder, ignore_errors=True)


class _PortTaken(Exception):
    pass


def _servers(root):
    return vllm_cpu.cache_dir(root) / "servers"


def _read(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _runs(state):
    """Whether the supervisor that this state names lives (its pid alone could be another process by now)."""
    return "supervisor" in state and supervisor.start_time(state["supervisor"]) == state["supervisor_start"]


def _is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port(wanted=0):
    if wanted and _is_free(wanted):
        return wanted
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _cpus(count):
    """`count` CPUs that this process may use, of different cores where there are enough."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text(encoding="ascii") if siblings.exists() else cpu, cpu)
    picked = list(cores.values())
    picked += [cpu for cpu in allowed if cpu not in picked]
    return [picked[n % len(picked)] for n in range(count)]
