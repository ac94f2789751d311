import ast
import importlib
import json
import pkgutil
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import lazyshards

ROOT = Path(lazyshards.__file__).parent

LAYERS = [
    {"errors", "hints", "native", "progress", "atomic", "_version"},
    {"selection", "storage", "functions"},
    {"elementwise"},
    {"layout", "hashing"},
    {"access", "arithmetic", "details", "tiling"},
    {"display", "recording", "stages"},
    {"plan", "formats", "profiling"},
    {"holders"},
    {"manifest_bytes"},
    {"leaf", "manifest", "samplers"},
    {"unfinished"},
    {"finding", "looking"},
    {"catalog"},
    {"engines", "adapters"},
    {"ahead", "warming"},
    {"quality"},
    {"batches"},
    {"source", "bundle", "reductions"},
    {"writers"},
    {"writing"},
    {"persistence", "where", "workable"},
    {"dataset"},
    {"joined", "opening"},
    {"mixture"},
    {"verify"},
    {"__init__"},
    {"demo", "doctor", "launch", "testing"},
    {"commands"},
    {"cli"},
]
"""What a module belongs to may import what stands above it here, and its own kind; nothing below, nothing beside."""

HEAVY = {
    "legate": {"engines.legate", "engines.exchange", "engines.bringup"},
    "cupynumeric": {"engines.legate", "engines.bringup"},
    "cupy": {"engines.cupy", "engines.staging"},
    "kvikio": {"engines.staging"},
    "h5py": {"formats.hdf5*", "writers.hdf5", "engines.bringup"},  # bringup: h5py must be imported before Legate is
    "hdf5plugin": {"formats.hdf5*"},
    "pyarrow": {"formats.arrow*", "formats.parquet*", "formats.tables", "manifest_bytes", "writers.tables"},
    "isal": {"formats.codecs"},
    "deflate": {"formats.codecs"},
    "zarr": {"writers.zarr"},
    "numcodecs": {"formats.codecs", "formats.zarr_codecs"},
    "fsspec": {"storage.listing", "storage.mounts", "storage.readers", "storage.remote", "storage.transfers"},
    "s3fs": {"storage.remote"},
    "aiohttp": {"storage.readers", "storage.redirects"},
    "torch": {"adapters.torch"},
    "dask": {"adapters.dask"},
    "tqdm": {"commands", "progress"},
    "xxhash": {"hashing"},
    "hypothesis": {"testing"},
    "pytest": {"testing"},
}
"""Who alone may import what is slow to import, or may be missing."""


def module_name(path):
    """Return the dotted name of a module below the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def group(module):
    """Return what of LAYERS a module belongs to."""
    return module.split(".")[0]


def layer(module):
    """Return where a module stands in LAYERS, or None."""
    return next((i for i, groups in enumerate(LAYERS) if group(module) in groups), None)


def own(name):
    """Return the module of the package that a dotted name means, or None."""
    while name.startswith("lazyshards."):
        inner = name.removeprefix("lazyshards.")
        if inner in MODULES:
            return inner
        name = name.rpartition(".")[0]
    return "__init__" if name == "lazyshards" else None


def imports(module, *, top_only=False):
    """Yield the dotted names that a module imports, by statement or by name."""
    tree = ast.parse(MODULES[module].read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")):
                yield node.args[0].value


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    """A module imports only what stands below it in the layers, or is of its own kind."""
    at = layer(module)
    assert at is not None, f"{module} has no layer: say in LAYERS where it stands"
    for name in imports(module):
        target = own(name)
        if target is not None and group(target) != group(module):
            assert layer(target) < at, f"{module} imports {target}, which does not stand below it"


def test_no_import_goes_in_a_circle():
    """No module imports itself by way of others when it is loaded."""
    graph = defaultdict(set)
    for module in MODULES:
        graph[module] = {own(name) for name in imports(module, top_only=True)} - {None, module}
    done, path = set(), []

    def visit(module):
        assert module not in path, f"imports in a circle: {' -> '.join([*path, module])}"
        if module not in done:
            path.append(module)
            for target in sorted(graph[module]):
                visit(target)
            path.pop()
            done.add(module)

    for module in MODULES:
        visit(module)


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_have_one_home(module):
    """What is slow to import, or may be missing, is imported only by the module that was made for it."""
    for name in imports(module):
        library = name.split(".")[0]
        homes = HEAVY.get(library, {"*"})
        assert any(fnmatchcase(module, home) for home in homes), f"{module} imports {library}"


@pytest.mark.parametrize("module", MODULES)
def test_only_known_libraries(module):
    """Nothing is imported but Python's own, NumPy, this package and what HEAVY lists."""
    known = {*sys.stdlib_module_names, "numpy", "lazyshards", *HEAVY}
    assert {name.split(".")[0] for name in imports(module)} <= known


@pytest.mark.parametrize("module", MODULES)
def test_no_relative_imports(module):
    """Every import names its whole path."""
    tree = ast.parse(MODULES[module].read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("module", MODULES)
def test_module_is_explained(module):
    """Every module has a docstring and a name that says what is in it."""
    tree = ast.parse(MODULES[module].read_text())
    assert ast.get_docstring(tree)
    assert not {"utils", "util", "helpers", "helper", "misc", "common"} & set(module.split("."))


def sort_key(name):
    """Constants first, then classes, then the rest, as the linter sorts."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"_version"}))
def test_all_is_sorted_and_exists(module):
    """Every module says in a sorted __all__ what others may use, and each name is bound in it, once."""
    tree = ast.parse(MODULES[module].read_text())
    named = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    assert len(named) == 1, f"{module} has {len(named)} __all__"
    (names,) = named
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {ast.unparse(target) for target in targets}
    assert names == sorted(set(names), key=sort_key)
    assert set(names) <= bound
    assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize("module", MODULES)
def test_others_use_public_names_only(module):
    """What one module takes from another by import is in the other's __all__, or is a module."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lazyshards.")):
            continue
        target = node.module.removeprefix("lazyshards.")
        for alias in node.names:
            if f"{target}.{alias.name}" not in MODULES and alias.name != "__version__":
                assert not alias.name.startswith("_"), f"{module} imports {node.module}.{alias.name}"


def test_import_is_light(child):
    """``import lazyshards`` imports no library but NumPy and starts nothing."""
    out = child("""
        import json, sys
        import lazyshards
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
    """)
    found = set(json.loads(out))
    assert not found & set(HEAVY)
    assert not {name for name in found if name.startswith("asyncio")}


def test_import_is_quick(child):
    """``import lazyshards`` loads few of Python's modules beyond NumPy's: loading them is what takes the time."""
    out = child("""
        import sys, numpy
        before = set(sys.modules)
        import lazyshards
        print(len([name for name in set(sys.modules) - before if not name.startswith("lazyshards")]))
    """)
    assert int(out) < 80


def test_import_starts_no_thread(child):
    """``import lazyshards`` starts no thread, and neither does opening or slicing."""
    out = child(
        """
        import sys, threading
        import numpy as np, lazyshards
        np.save("shard_0.npy", np.zeros((5, 2)))
        ds = lazyshards.open_shards("shard_0.npy", engine="numpy")
        ds[1:3].plan(), repr(ds)
        print(threading.active_count())
        """
    )
    assert int(out) == 1


def test_modules_are_found():
    """What this file parses is the package: a module that is added is checked."""
    found = {
        info.name.removeprefix("lazyshards.") for info in pkgutil.walk_packages(lazyshards.__path__, "lazyshards.")
    }
    assert found <= set(MODULES)
    assert importlib.import_module("lazyshards.layout").__file__ == str(MODULES["layout"])
