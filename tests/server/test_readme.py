"""What the README gives to copy: a unit, a compose file, a [control] table."""

import re
import shlex
import shutil
import subprocess
import tomllib

import yaml

from k25lib.cli import parser
from k25lib.run import PROJECT
from k25lib.server.control import Control

BLOCKS = re.findall(r"^```\n(.*?)^```$", (PROJECT / "README.md").read_text(), re.S | re.M)


def block(words):
    (found,) = [text for text in BLOCKS if words in text]
    return found


def check_command(words):
    args = parser().parse_args(words[1:])
    assert (args.run.__name__, args.url, args.wait) == ("run_campaign", "http://127.0.0.1:8000", 7200.0)
    return args


def test_the_unit(tmp_path):
    text = block("[Service]")
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])
    assert command[0].endswith("/bin/k25")
    check_command(command)
    if verify := shutil.which("systemd-analyze"):
        unit = tmp_path / "k25.service"
        unit.write_text(text.replace(command[0], "/bin/true").replace("/opt/k25", "/"))
        done = subprocess.run([verify, "verify", unit], capture_output=True, text=True)
        ours = [line for line in done.stderr.splitlines() if "k25.service" in line]
        assert (done.returncode, ours) == (0, [])


def test_the_compose_file():
    tree = yaml.safe_load(block("services:"))
    assert set(tree) == {"services", "volumes"} and set(tree["volumes"]) == {"traces"}
    for service in tree["services"].values():
        assert (
            set(service) <= {"image", "command", "volumes", "network_mode"} and "traces:/traces" in service["volumes"]
        )
    args = check_command(shlex.split(tree["services"]["k25"]["command"]))
    assert tree["services"]["k25"]["network_mode"] == "service:vllm" and args.set == ["server.traces=/traces"]
    config = shlex.split(tree["services"]["vllm"]["command"])[-1]
    assert config in block("vllm serve MODEL").replace("/abs/dir", "/traces")


def test_the_control_table():
    control = Control(tomllib.loads(block("[control]"))["control"])
    assert control.command("stop") == "docker stop -t 60 vllm"
    assert control.profiled("/traces").command("start") == "docker start vllm-profiled"
