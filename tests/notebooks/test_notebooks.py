import os
from pathlib import Path

import pytest

import lazyshards

nbclient = pytest.importorskip("nbclient", reason="notebooks are executed with nbclient")
nbformat = pytest.importorskip("nbformat", reason="notebooks are read with nbformat")

ROOT = Path(lazyshards.__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REQUIRED = os.environ.get("LAZYSHARDS_REQUIRE_ENGINES", "").replace(" ", "").split(",")
NOT_A_USERS = ("LAZYSHARDS_ENGINE", "LEGATE_CONFIG", "MPLBACKEND")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    """The notebook runs as a user would run it, on Legate where that is required, and ends with a picture."""
    for name in ("sklearn", "matplotlib", "ipykernel"):
        pytest.importorskip(name)
    environment = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    notebook = nbformat.read(path, as_version=4)
    count = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell("print(ds.engine)"))  # every notebook calls its dataset so
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells[:count] for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
    engine = notebook.cells[-1].outputs[0].text.strip()
    if "legate" in REQUIRED:
        assert engine == "legate"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    """The notebook is valid, and kept without outputs, so that its changes are readable."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
