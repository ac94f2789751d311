import functools
import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import open_shards
from lazyshards.errors import FormatError, LayoutError, ShardChangedError, ShardReadError
from lazyshards.formats import function
from lazyshards.testing import assert_same, example_array, index_chains

pytestmark = pytest.mark.usefixtures("on_numpy")


def read(path, start, stop):
    """Read rows of three comma-separated numbers."""
    return np.array([line.split(",") for line in Path(path).read_text().splitlines()[start:stop]], "f4").reshape(-1, 3)


def count(path):
    """Count the lines of a file."""
    return len(Path(path).read_text().splitlines())


def write_text(path, rows):
    """Write rows as comma-separated numbers."""
    path.write_text("".join([",".join(map(repr, row)) + "\n" for row in rows.tolist()]))


TEXT = {"rows": count, "dtype": "f4", "row_shape": (3,)}


@pytest.fixture
def folder(tmp_path):
    """Give a directory with three text files of 4, 0 and 5 rows, and what they hold."""
    whole = np.arange(27, dtype="f4").reshape(9, 3)
    for i, (start, stop) in enumerate(((0, 4), (4, 4), (4, 9))):
        write_text(tmp_path / f"s{i}.txt", whole[start:stop])
    return tmp_path, whole


@pytest.mark.parametrize("rows", [count, [4, 0, 5], np.array([4, 0, 5])], ids=["function", "list", "array"])
def test_rows(folder, rows):
    """The rows of each file are given as a list, or counted by a function of the path."""
    path, whole = folder
    assert_same(open_shards(path, reader=read, **{**TEXT, "rows": rows}).compute(), whole)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_index(tmp_path_factory, data):
    """Any chain of indices gives what NumPy gives."""
    folder = tmp_path_factory.mktemp("text")
    expected = np.arange(27, dtype="f4").reshape(9, 3)
    write_text(folder / "s0.txt", expected[:4])
    write_text(folder / "s1.txt", expected[4:])
    found = open_shards(folder, reader=read, **TEXT)
    for index in data.draw(index_chains(expected.shape)):
        found, expected = found[index], expected[index]
    assert_same(found.compute(), expected)


def test_only_the_rows_wanted_are_asked_for(folder):
    """The function is called for the touched files alone, and for no more than the rows wanted of each."""
    path, whole = folder
    calls = []

    def spy(path, start, stop):
        calls.append((Path(path).name, start, stop))
        return read(path, start, stop)

    assert_same(open_shards(path, reader=spy, **TEXT)[3:6, 1].compute(), whole[3:6, 1])
    assert calls == [("s0.txt", 3, 4), ("s2.txt", 0, 2)]


def test_blocks_are_bounded(folder, monkeypatch):
    """The function is asked for bounded blocks of rows."""
    path, whole = folder
    monkeypatch.setattr(function, "_BLOCK_NBYTES", 30)
    sizes = []

    def spy(path, start, stop):
        sizes.append(stop - start)
        return read(path, start, stop)

    assert_same(open_shards(path, reader=spy, **TEXT).compute(), whole)
    assert sizes == [2, 2, 2, 2, 1]


def test_suffixes_do_not_matter(tmp_path):
    """A function reads files whose suffix belongs to a format, too."""
    write_text(tmp_path / "s0.npy", np.ones((2, 3), "f4"))
    assert_same(open_shards(tmp_path / "s0.npy", reader=read, **TEXT).compute(), np.ones((2, 3), "f4"))


@pytest.mark.parametrize("name", ["reader", "rows", "dtype", "row_shape"])
def test_what_is_lacking_is_named(folder, name):
    """Each of the four is needed."""
    options = {"reader": read, **TEXT}
    del options[name]
    with pytest.raises(TypeError, match=f"needs {name}="):
        open_shards(folder[0], format="function", **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("reader", 3), ("rows", 3), ("rows", [1, 2.5, 3]), ("rows", [4, -1, 5]), ("row_shape", "3"), ("columns", 3)],
    ids=str,
)
def test_options_of_the_wrong_kind(folder, name, value):
    """An option that makes no sense, or is unknown, is a TypeError that names it."""
    with pytest.raises(TypeError, match=name):
        open_shards(folder[0], **{"reader": read, **TEXT, name: value})


def test_rows_of_more_files(folder):
    """A list of rows must be as long as there are files."""
    with pytest.raises(ValueError, match="how many rows 2 files hold, but there are 3 files"):
        open_shards(folder[0], reader=read, **{**TEXT, "rows": [4, 5]})


@pytest.mark.parametrize(
    ("rows", "text"),
    [(lambda path: 1 / 0, "ZeroDivisionError"), (lambda path: "4", "'4' rows")],
    ids=["raises", "text"],
)
def test_rows_that_cannot_be_counted(folder, rows, text):
    """What goes wrong in counting is a fault of each file, all of them reported."""
    with pytest.raises(LayoutError, match=text) as caught:
        open_shards(folder[0], reader=read, **{**TEXT, "rows": rows})
    assert all(name in str(caught.value) for name in ("s0.txt", "s1.txt", "s2.txt"))


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (lambda path, start, stop: read(path, start, stop)[1:], r"shape \(3, 3\), expected float32 of shape \(4, 3\)"),
        (lambda path, start, stop: read(path, start, stop).astype("f8"), "returned float64"),
        (lambda path, start, stop: None, "returned object"),
        (lambda path, start, stop: np.ma.masked_less(read(path, start, stop), 2), "masked array"),
        (lambda path, start, stop: {}[path], "raised KeyError"),
    ],
    ids=["short", "dtype", "none", "masked", "raises"],
)
def test_what_a_function_may_not_do(folder, reader, text):
    """Rows too few, of another type, masked, or an exception are errors that name the file and the function."""
    with pytest.raises(ShardReadError, match=text) as caught:
        open_shards(folder[0], reader=reader, **TEXT).compute()
    assert "s0.txt" in str(caught.value)
    assert "<lambda>" in str(caught.value)


def test_other_byte_order(folder):
    """A function may return either byte order."""
    path, whole = folder
    ds = open_shards(path, reader=lambda *args: read(*args).astype(">f4"), **TEXT)
    assert_same(ds.compute(), whole)


def test_change_is_told(folder):
    """A file that was rewritten since it was opened is an error that names it."""
    path, _ = folder
    ds = open_shards(path, reader=read, **TEXT)
    os.utime(path / "s2.txt", ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"s2\.txt"):
        ds.compute()


def test_astype(folder):
    """What a function returns is cast like anything else."""
    path, whole = folder
    assert_same(open_shards(path, reader=read, **TEXT).astype("f8")[::-2].compute(), whole.astype("f8")[::-2])


def test_other_engines(folder, engine):
    """A function that no other process could import is found by every engine, where it was opened."""
    path, whole = folder
    ds = open_shards(path, reader=lambda *args: read(*args)[:], **TEXT)
    found = ds[1:8].compute(engine=engine, tiles_per_processor=2)
    assert np.array_equal(np.asarray(found.get() if engine == "cupy" else found), whole[1:8])


def test_reads_beyond_one_tile(tmp_path, engine):
    """Several tiles, as tasks of the engine, call the function for the rows of each."""
    path = tmp_path / "s0.txt"
    path.write_text("x")

    def numbers(path, start, stop):
        return np.arange(start, stop, dtype="i8")[:, None] * np.ones(64, "i8")

    ds = open_shards([path], reader=numbers, rows=[10_000], dtype="i8", row_shape=64)
    found = ds.compute(engine=engine)
    assert np.array_equal(np.asarray(found.get() if engine == "cupy" else found), numbers("", 0, 10_000))


def test_pickles_by_name(folder):
    """A dataset whose function is at the top level of a module can travel; one with a lambda only while it is alive."""
    path, whole = folder
    data = pickle.dumps(open_shards(path, reader=read, **TEXT))
    gc.collect()
    assert_same(pickle.loads(data).compute(), whole)  # noqa: S301  # our own
    ds = open_shards(path, reader=lambda *args: read(*args)[:], **TEXT)
    data = pickle.dumps(ds)
    assert_same(pickle.loads(data).compute(), whole)  # noqa: S301  # our own
    del ds
    gc.collect()
    with pytest.raises(FormatError, match="not known in this process"):
        pickle.loads(data)  # noqa: S301  # our own


def test_in_another_process(folder, child):
    """In a process that never opened it, a function is imported by its name, and a lambda is an error that says so."""
    path, _ = folder
    (path / "my_reader.py").write_text(
        "import numpy as np\ndef read(path, start, stop):\n    return np.zeros((stop - start, 3), 'f4')\n"
    )
    out = child(
        """
        import pickle, sys
        sys.path.insert(0, sys.argv[1])
        import my_reader, lazyshards
        options = {"rows": [4, 0, 5], "dtype": "f4", "row_shape": 3, "engine": "numpy"}
        for name, reader in {"known": my_reader.read, "lambda": lambda *args: my_reader.read(*args)}.items():
            ds = lazyshards.open_shards(sys.argv[1] + "/*.txt", reader=reader, **options)
            open(sys.argv[1] + "/" + name, "wb").write(pickle.dumps(ds))
        """,
        path,
    )
    out = child(
        """
        import pickle, sys
        sys.path.insert(0, sys.argv[1])
        print(pickle.load(open(sys.argv[1] + "/known", "rb")).compute().sum())
        try:
            pickle.load(open(sys.argv[1] + "/lambda", "rb"))
        except Exception as exc:
            print(type(exc).__name__, exc)
        """,
        path,
    )
    assert out.startswith("0.0\nFormatError the function __main__.<lambda> that reads this dataset is not known")


def test_functions_are_told_apart(folder):
    """Two functions are two datasets, one function is one, whatever was opened in between."""
    path, _ = folder
    first, again = open_shards(path, reader=read, **TEXT), open_shards(path, reader=read, **TEXT)
    other = open_shards(path, reader=functools.partial(read), **TEXT)
    lambdas = [
        open_shards(path, reader=lambda *args: read(*args)[:], **TEXT),
        open_shards(path, reader=lambda *args: read(*args) + 1, **TEXT),
    ]
    assert first == again
    assert len({ds.fingerprint for ds in (first, other, *lambdas)}) == 4


def test_functions_are_let_go(folder):
    """A function is kept as long as a dataset uses it, and no longer."""
    import weakref

    def mine(path, start, stop):
        return read(path, start, stop)

    ds = open_shards(folder[0], reader=mine, **TEXT)
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is not None
    del ds
    gc.collect()
    assert gone() is None


def test_bound_methods(folder):
    """A method of an object is a function, too."""
    path, whole = folder

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def read(self, path, start, stop):
            return read(path, start, stop) * np.float32(self.factor)

    two, three = Scaled(2), Scaled(3)
    twice = open_shards(path, reader=two.read, **TEXT)
    thrice = open_shards(path, reader=three.read, **TEXT)
    assert_same(twice.compute(), whole * np.float32(2))
    assert_same(thrice.compute(), whole * np.float32(3))


def test_example_array_rows(tmp_path):
    """Rows of no axes and of several are read."""
    for shape in ((), (2, 3)):
        whole = example_array((7, *shape), "i4")
        path = tmp_path / f"{len(shape)}.x"
        path.write_bytes(whole.tobytes())

        def plain(path, start, stop, shape=shape):
            return np.fromfile(path, "i4").reshape(-1, *shape)[start:stop]

        ds = open_shards([path], reader=plain, rows=[7], dtype="i4", row_shape=shape)
        assert_same(ds[2:6].compute(), whole[2:6])
