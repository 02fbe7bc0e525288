"""What the project promises of itself: one set of packages, floors, thin notebooks, lean imports."""

import ast
import re
import subprocess
import sys
import tomllib

import nbformat
import papermill as pm
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k25lib.run import PROJECT
from k25lib.settings import NOTEBOOKS

PYPI_NAME = {"pytorch": "torch"}
PROJECT_TABLE = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((PROJECT / "notebooks").glob("*.ipynb"))


def bounds(lines):
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(PYPI_NAME.get(r.name, r.name)): str(r.specifier) for r in parsed}


def conda_environment():
    entries = yaml.safe_load((PROJECT / "environment.yml").read_text())["dependencies"]
    conda = [e for e in entries if isinstance(e, str)]
    pip = [p for e in entries if isinstance(e, dict) for p in e["pip"] if not p.startswith("-")]
    return bounds(conda + pip)


def test_conda_and_pip_users_get_the_same_packages_and_bounds():
    have = conda_environment()
    assert have.pop("python") == PROJECT_TABLE["requires-python"]
    have.pop("pip")
    assert have == bounds(PROJECT_TABLE["dependencies"])


def test_the_lock_pins_every_package_within_its_bounds():
    locked = bounds((PROJECT / "requirements.lock").read_text().splitlines())
    wanted = PROJECT_TABLE["dependencies"] + PROJECT_TABLE["optional-dependencies"]["test"]
    for requirement in map(Requirement, wanted):
        pin = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.removeprefix("=="), prereleases=True), requirement
    assert all(pin.startswith("==") for pin in locked.values())


def test_imports_go_down_the_floors():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"],
        cwd=PROJECT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_there_are_the_six_notebooks():
    assert [p.stem for p in SOURCES] == list(NOTEBOOKS.values())


@pytest.fixture(params=SOURCES, ids=lambda p: p.stem)
def source(request):
    return request.param


def code_cells(path):
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]


def test_a_notebook_is_thin_and_stripped(source):
    cells = code_cells(source)
    assert len(cells) < 20
    assert all(not c.outputs and c.execution_count is None for c in cells)
    assert max(len(c.source.splitlines()) for c in cells) <= 20


def test_every_parameter_has_a_type_a_default_and_a_meaning_that_papermill_reads(source):
    (cell,) = [c for c in code_cells(source) if "parameters" in c.metadata.get("tags", [])]
    written = {node.target.id: node for node in ast.parse(cell.source).body if isinstance(node, ast.AnnAssign)}
    assert len(written) == len(cell.source.splitlines())
    read = pm.inspect_notebook(str(source))
    assert set(read) == set(written)
    for name, parameter in read.items():
        assert parameter["inferred_type_name"] == ast.unparse(written[name].annotation), name
        assert ast.literal_eval(parameter["default"]) == ast.literal_eval(written[name].value), name
        assert len(parameter["help"]) > 5, name
    assert "run" in read


def test_a_notebook_starts_with_its_question(source):
    first = nbformat.read(source, 4).cells[0]
    assert first.cell_type == "markdown"
    assert "?" in first.source


def test_the_breakdown_command_does_not_pay_for_pandas():
    script = (
        "import sys; from k25lib.cli import main\n"
        "try: main(['breakdown', '/nonexistent'])\nexcept SystemExit: pass\n"
        "print([m for m in ('pandas', 'scipy', 'plotly', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_project_holds_no_path_of_one_machine():
    listed = ["ls-files", "k25lib", "notebooks", "README.md", "Makefile", "*.toml", "*.yml"]
    files = subprocess.run(["git", "-C", PROJECT, *listed], capture_output=True, text=True, check=True).stdout.split()
    found = [f for f in files if re.search(r"/(work|farm|root)/", (PROJECT / f).read_text(errors="replace"))]
    assert found == []
