# make bench            a whole campaign on the embedded server (real vLLM on the CPU), then its report
# make bench URL=...    the same on a server that runs already
# make test             every test; make test-fast: those that need no server and no browser
# make setup            the environment alone
# make lab              JupyterLab on the notebooks
# All set-up (venv + pip) happens here; a second call is quick.

URL ?=
ARGS ?=
BIN := .venv/bin

.PHONY: setup bench test test-fast check lab lock clean

setup: .venv/.run

bench: .venv/.run
	@$(BIN)/k25 run $(if $(URL),--url $(URL)) $(ARGS)

lab: .venv/.run
	@$(BIN)/jupyter lab notebooks

test: .venv/.test
	@sh .ci/chromium.sh
	@sh .ci/sshd.sh
	@$(BIN)/k25 serve --install
	@$(BIN)/python -m pytest

test-fast: .venv/.test
	@$(BIN)/python -m pytest -m "not slow"

check: .venv/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/nbstripout --verify --keep-id --extra-keys "metadata.papermill cell.metadata.papermill cell.metadata.execution" notebooks/*.ipynb

# The one lock file: what a fresh environment gets today, without the build tags of one machine's torch.
lock:
	@rm -rf .venv-lock && sh .ci/setup.sh .venv-lock "[test]" unlocked
	@.venv-lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock
	@rm -rf .venv-lock

.venv/.run: pyproject.toml requirements.lock
	@sh .ci/setup.sh .venv ""
	@touch $@

.venv/.test: pyproject.toml requirements.lock
	@sh .ci/setup.sh .venv "[test]"
	@touch .venv/.run $@

clean:
	rm -rf .venv .venv-vllm .cache
