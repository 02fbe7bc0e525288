"""One notebook, executed by papermill, with every way of failing seen as a failure."""

import re
import sys
import time

import nbformat
import papermill as pm
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.engines import NBClientEngine, papermill_engines

from k25lib.errors import K25Error, UsageError
from k25lib.settings import check_parameters

ENGINE = "k25"


class NotebookFailed(K25Error):
    """A notebook did not finish; the message says why in one line."""


def declared_parameters(notebook):
    """A notebook's parameters: name -> type name as papermill infers it.

    Raises UsageError for a file that is no notebook, K25Error if it has no such cell.
    """
    try:
        declared = pm.inspect_notebook(str(notebook))
    except Exception as error:  # of nbformat, of JSON, of papermill: whatever the file holds
        raise UsageError(f"{notebook} can't be read as a notebook: {' '.join(str(error).split())[:150]}") from None
    if not declared:
        raise K25Error(f"{notebook} has no cell tagged 'parameters', or an empty one")
    return {name: parameter["inferred_type_name"] for name, parameter in declared.items()}


def checked_parameters(notebook, given, table):
    """`given`, once every name is declared by the notebook and every value has its type; else a UsageError."""
    check_parameters(declared_parameters(notebook), given, table)
    return dict(given)


def execute(source, target, parameters, cell_timeout_s, log, progress=sys.stderr):
    """Execute the notebook `source` into `target`; on failure the copy is `<target>.failed.ipynb` instead,
    and an earlier `target` stays as it is.

    The kernel's stderr goes to the file `log`. Raises NotebookFailed with the reason; SystemExit and
    KeyboardInterrupt pass through after the copy is kept and the kernel has ended.
    """
    part, failed = target.with_suffix(".part.ipynb"), target.with_suffix(".failed.ipynb")
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = False
    papermill_engines.register(ENGINE, _engine(source.stem, progress))
    try:
        with log.open("a", encoding="utf-8") as stderr:
            pm.execute_notebook(
                str(source),
                str(part),
                parameters=parameters,
                engine_name=ENGINE,
                progress_bar=False,
                log_output=False,
                stderr_file=stderr,
                cwd=str(source.parent),
                execution_timeout=cell_timeout_s,
                start_timeout=120,
                autosave_cell_every=30,
                extra_arguments=["--log-level=CRITICAL"],  # the kernel's own words are no progress
            )
        _raise_if_incomplete(part)
        whole = True
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, (NotebookFailed, SystemExit, KeyboardInterrupt)):
            raise
        raise NotebookFailed(_reason(error, cell_timeout_s)) from error
    finally:
        if part.exists():
            part.replace(target if whole else failed)
        if whole:
            failed.unlink(missing_ok=True)


def _engine(name, progress):
    class Progress(NBClientEngine):
        """papermill's own engine, which tells each cell as it starts."""

        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **more):
            code = [n for n, cell in enumerate(nb_man.nb.cells) if cell.cell_type == "code"]
            start = nb_man.cell_start
            began = time.monotonic()

            def cell_start(cell, cell_index, **rest):
                if cell_index in code:
                    words = f"cell {code.index(cell_index) + 1} of {len(code)}, {time.monotonic() - began:.0f} s"
                    print(f"  {name}: {words}", file=progress, flush=True)
                return start(cell, cell_index, **rest)

            nb_man.cell_start = cell_start
            return super().execute_managed_notebook(nb_man, kernel_name, **more)

    return Progress


def _raise_if_incomplete(path):
    """papermill calls a notebook complete whose kernel died, or whose cell called sys.exit(0): look at the cells."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for n, cell in enumerate(cells, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                raise NotebookFailed(
                    f"code cell {n} ended with {output.ename}({output.evalue}): it hides what did not run"
                )
        if cell.source.strip() and cell.execution_count is None:
            raise NotebookFailed(f"code cell {n} of {len(cells)} never ran: the kernel stopped before it")


def _reason(error, cell_timeout_s):
    if isinstance(error, pm.PapermillExecutionError):
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error.evalue)).strip()
        ours = error.ename in {kind.__name__ for kind in _all_errors(K25Error)}  # these messages say all by themselves
        said = text if ours else f"{error.ename}: {text}"
        return f"cell {error.exec_count}: {' '.join(said.split())}"[:500]
    if isinstance(error, CellTimeoutError):
        return f"a cell ran longer than campaign.cell_timeout_s = {cell_timeout_s} s and was stopped"
    if isinstance(error, DeadKernelError):
        return "the kernel died (killed, or out of memory)"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _all_errors(kind):
    return {kind, *(deeper for child in kind.__subclasses__() for deeper in _all_errors(child))}
