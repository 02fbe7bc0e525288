"""What a run was measured on: machine, GPUs, topology, clocks, versions. What can't be found out is left out."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "pandas", "plotly", "papermill")


def machine():
    """The machine: CPU, memory (bytes), kernel, Python and package versions; `gpus` (an empty list without), and with
    GPUs `driver`, `cuda` and `topology` as NVML and nvidia-smi tell them."""
    cards = gpus()
    return {
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "gpus": cards,
        **({**_driver(), "topology": _topology()} if cards else {}),
    }


def gpus():
    """The GPUs of this machine as NVML tells them: name, memory, clocks, power limit, throttle reasons of each; an
    empty list on a machine without."""
    return _nvml(lambda nvml: [_gpu(nvml, n) for n in range(nvml.nvmlDeviceGetCount())]) or []


def _driver():
    def ask(nvml):
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return {"driver": nvml.nvmlSystemGetDriverVersion(), "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}

    return _nvml(ask) or {}


def _nvml(ask):
    """What `ask(pynvml)` returns; None on a machine without NVIDIA GPUs."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return ask(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _gpu(nvml, index):
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function, *arguments):
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None  # a virtual or older GPU does not tell everything

    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    power_limit_mw = ask(nvml.nvmlDeviceGetPowerManagementLimit)
    return {
        "index": index,
        "name": ask(nvml.nvmlDeviceGetName),
        "memory_bytes": memory and memory.total,
        "memory_used_bytes": memory and memory.used,
        "sm_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "sm_max_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        "memory_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "power_limit_w": power_limit_mw and power_limit_mw / 1000,
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
    }


def _topology():
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    matrix = done.stdout.split("Legend:")[0]
    return re.sub(r"\x1b\[[0-9;]*m", "", matrix).strip()


def _cpu_name():
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _memory_bytes():
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None
