"""Small notebooks for the tests of the page: executed by papermill, or written as if they had been."""

import nbformat
import papermill as pm

RAW_FIGURE = """display({"application/vnd.plotly.v1+json": {"data": [], "layout": {"title": "Raw"}}}, raw=True)"""
PLOTLY = "application/vnd.plotly.v1+json"


def execute(path, *cells, fails=False):
    """Execute a notebook of the cells (text that starts with `#` is Markdown) into `path`."""
    source = path.with_suffix(".source.ipynb")
    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(text) if text.startswith("#") else nbformat.v4.new_code_cell(text)
            for text in cells
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    source.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, source)
    try:
        pm.execute_notebook(str(source), str(path), progress_bar=False, log_output=False)
    except pm.PapermillExecutionError:
        assert fails
    finally:
        source.unlink()
    return path


def written(path, *outputs, text="# A notebook"):
    """Write a notebook of `text` and one code cell that has the given outputs, as if it had been executed."""
    cell = nbformat.v4.new_code_cell("show()", execution_count=1, outputs=list(outputs))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text), cell])
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def shown(**data):
    """A display output: `shown(plain=..., html=..., markdown=..., figure=...)`."""
    kinds = {"plain": "text/plain", "html": "text/html", "markdown": "text/markdown", "figure": PLOTLY}
    return nbformat.v4.new_output("display_data", {kinds[name]: value for name, value in data.items()})
