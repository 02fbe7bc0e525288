"""The report of a run, made from what the run has: document, page, index."""

from k25lib.report.document import write_document
from k25lib.report.index import write_index
from k25lib.report.overview import Sound, overview
from k25lib.report.page import write_page
from k25lib.run import Run, reports_root


def write_report(run, page=True):
    """Write the run's document and, with `page`, its page and the index of all runs. Returns the report's folder."""
    run, folder = Sound(run.path), run.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    facts = overview(run)
    write_document(run, folder / f"{run.file_name}.md", facts)
    if page:
        notebooks = [path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")) if ".part" not in path.name]
        write_page(run, notebooks, folder / "index.html", facts)
        write_index(reports_root(), [r for r in Run.all() if (reports_root() / r.path.name / "index.html").is_file()])
    return folder
