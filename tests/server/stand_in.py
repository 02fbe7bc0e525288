"""A stand-in for docker, systemctl and journalctl: records its words, keeps "running" in a file, answers as they do.

FOLDER/calls has one JSON list a call; FOLDER/running exists while the server runs; FOLDER/fail: the next start fails.
"""

import json
import sys
import time
from pathlib import Path

folder, name, *words = sys.argv[1:]
folder = Path(folder)
with (folder / "calls").open("a") as file:
    file.write(json.dumps([name, *words]) + "\n")
running = folder / "running"
verb = words[0]
if name == "journalctl" or verb == "logs":
    print("(APIServer pid=1) INFO Application startup complete", flush=True)
    if "--follow" in words:
        time.sleep(1000)
elif verb == "start":
    if (folder / "fail").exists():
        (folder / "fail").unlink()
        sys.exit("Job for vllm.service failed because the control process exited with error code.")
    running.touch()
elif verb == "stop":
    running.unlink(missing_ok=True)
elif verb == "inspect":
    running = str(running.exists()).lower()
    asked = words[words.index("--format") + 1]
    print({"{{.Config.Image}}": "vllm/vllm-openai:v0.26.0"}.get(asked, f"{running} {4242 if running == 'true' else 0}"))
elif verb == "is-active":
    sys.exit(0 if running.exists() else 3)
elif verb == "show":
    print(4242)
elif verb == "exec":
    print("  --profiler-config PROFILER_CONFIG" if "--help=all" in words else f"ran {words[2:]}")
else:
    sys.exit(f"{name}: unknown command {verb}")
