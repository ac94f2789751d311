"""Files that refer to others, written by h5py to mislead: nothing is made up, and nothing is read that may not be."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from lazyshards import LayoutError, ShardChangedError, ShardReadError, open_shards
from lazyshards.formats import find_format
from lazyshards.formats.base import Fault
from lazyshards.storage import LocalStorage
from lazyshards.testing import assert_same, example_array

h5py = pytest.importorskip("h5py")

WHOLE = example_array((4, 3), "f4")


@pytest.fixture
def folder(tmp_path):
    """Give a directory with a source, ``s.h5``."""
    write(tmp_path / "s.h5", WHOLE)
    return tmp_path


def write(path, array, **options):
    """Write one dataset, ``x``."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, **options)
    return path


def source(name="s.h5", dataset="x", shape=WHOLE.shape):
    """Return a virtual source."""
    return h5py.VirtualSource(name, dataset, shape)


def columns(name="s.h5", dataset="x"):
    """Return a layout that the library must put together: the columns of a source as rows."""
    layout = h5py.VirtualLayout(WHOLE.shape[::-1], "f4")
    for column in range(3):
        layout[column] = source(name, dataset)[:, column]
    return layout


def mapped(path, *maps, shape=WHOLE.shape, dtype="f4", fillvalue=None):
    """Write a virtual dataset, ``data``, of targets and sources."""
    layout = h5py.VirtualLayout(shape, dtype)
    for target, origin in maps:
        layout[target] = origin
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=fillvalue)
    return path


def fault(path, **options):
    """Return what is said of a file that cannot be opened."""
    (found,) = find_format("hdf5").inspect([str(path)], LocalStorage(), options)
    assert isinstance(found, Fault), found
    return str(found)


# What is mapped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "maps",
    [[(np.s_[:3], np.s_[:3])], [(np.s_[:, :2], np.s_[:, :2])], [(np.s_[::2], np.s_[::2])], []],
    ids=["short", "narrow", "every other", "nothing"],
)
def test_holes(folder, maps):
    """Elements that nothing is mapped to are at fault; those of a dataset that declares a fill value are read."""
    pairs = [(target, source()[origin]) for target, origin in maps]
    assert "not all was written" in fault(mapped(folder / "a.h5", *pairs))
    expected = np.full(WHOLE.shape, 5, "f4")
    for target, origin in maps:
        expected[target] = WHOLE[origin]
    ds = open_shards(mapped(folder / "a.h5", *pairs, fillvalue=5))
    assert_same(ds.compute(), expected)
    assert_same(ds[1:3, 1].compute(), expected[1:3, 1])


@pytest.mark.parametrize("fillvalue", [None, 5])
@pytest.mark.parametrize(
    "maps",
    [
        [(np.s_[:2], np.s_[:2]), (np.s_[:2], np.s_[2:])],
        [(np.s_[:, :1], np.s_[:, :1])] * 3,
        [(np.s_[::2], np.s_[::2]), (np.s_[::2], np.s_[1::2])],
        [(np.s_[:3], np.s_[:3]), (np.s_[:2], np.s_[:2])],
    ],
    ids=["rows", "columns", "every other", "too many"],
)
def test_holes_beside_what_is_mapped_twice(folder, maps, fillvalue):
    """They are at fault in any case: the library counts what is mapped, and would return whatever is in memory."""
    pairs = [(target, source()[origin]) for target, origin in maps]
    assert "mapped more than once" in fault(mapped(folder / "a.h5", *pairs, fillvalue=fillvalue))


@pytest.mark.parametrize(
    "maps",
    [
        [(np.s_[::2], np.s_[::2]), (np.s_[1::2], np.s_[1::2])],
        [(np.s_[:, 1:], np.s_[:, 1:]), (np.s_[:, :1], np.s_[:, :1])],
        [(np.s_[:3], np.s_[:3]), (np.s_[1:], np.s_[1:])],
    ],
    ids=["every other", "columns", "overlapping"],
)
def test_odd_mappings_that_cover_all(folder, maps):
    """Mappings that interleave, or overlap, and leave nothing out are read."""
    path = mapped(folder / "a.h5", *[(target, source()[origin]) for target, origin in maps])
    assert_same(open_shards(path).compute(), WHOLE)


def test_numbered_sources(folder):
    """A mapping that numbers its source files goes on as long as there are files: it is refused."""
    write(folder / "s-0.h5", WHOLE)
    space = h5py.h5s.create_simple(WHOLE.shape, (h5py.h5s.UNLIMITED, 3))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (4, 1), (4, 3))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_virtual(space, b"s-%b.h5", b"x", h5py.h5s.create_simple(WHOLE.shape))
    whole = h5py.h5s.create_simple(WHOLE.shape, (h5py.h5s.UNLIMITED, 3))
    with h5py.File(folder / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.IEEE_F32LE, whole, plist)
    assert "unlimited size" in fault(folder / "a.h5")


def test_percent_signs_in_names(folder):
    """A percent sign is written twice: the file that is checked is the one that the library would open."""
    write(folder / "a%b.h5", WHOLE)
    write(folder / "a%%b.h5", -WHOLE)
    path = mapped(folder / "a.h5", (np.s_[:], source("a%%b.h5")))
    assert_same(open_shards(path).compute(), WHOLE)
    (folder / "a%b.h5").unlink()
    assert "a%b.h5', which cannot be read: No such file" in fault(path)


# What the sources are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "./data", "/data", "data/.", "soft"])
@pytest.mark.parametrize("file_name", [".", "a.h5"])
def test_own_source(tmp_path, name, file_name):
    """A virtual dataset that is its own source, however that is spelled, is at fault and soon known to be."""
    mapped(tmp_path / "a.h5", (np.s_[:], source(file_name, name)))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["soft"] = h5py.SoftLink("/data")
    began = time.process_time()
    message = fault(tmp_path / "a.h5", dataset="data")
    assert "own source" in message or "without end" in message
    assert time.process_time() - began < 1


def test_circle_within_a_file(tmp_path):
    """Two virtual datasets that are each other's source are at fault."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, other in (("a", "b"), ("b", "a")):
            layout = h5py.VirtualLayout(WHOLE.shape, "f4")
            layout[:] = source(".", other)
            file.create_virtual_dataset(name, layout)
    assert "without end" in fault(tmp_path / "a.h5", dataset="a")


def test_each_source_is_described_once(tmp_path):
    """Datasets that refer to one below by two names take time that grows with their number, not with its power."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x0"] = WHOLE
        for i in range(1, 14):
            file[f"y{i - 1}"] = h5py.SoftLink(f"/x{i - 1}")
            layout = h5py.VirtualLayout(WHOLE.shape, "f4")
            layout[:2], layout[2:] = source(".", f"x{i - 1}")[:2], source(".", f"y{i - 1}")[2:]
            file.create_virtual_dataset(f"x{i}", layout)
    ds = open_shards(tmp_path / "a.h5", dataset="x13")
    assert_same(ds.compute(), WHOLE)
    assert len(ds.shards[0].source.detail.pieces) == 2


def test_named_by_its_own_file(folder):
    """A source may name the very file that it is in, which stays open."""
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = WHOLE
        layout = h5py.VirtualLayout(WHOLE.shape, "f4")
        layout[:] = source("a.h5")
        file.create_virtual_dataset("virtual", layout)
    ds = open_shards(folder / "a.h5", dataset="*")
    assert_same(ds.compute(), np.concatenate([WHOLE, WHOLE]))


@pytest.mark.parametrize(("stored", "wanted"), [("f8", "f4"), (">f4", "f4"), ("i2", "f8"), ("u1", "i4")])
@pytest.mark.parametrize("turned", [False, True])
def test_source_of_another_type(tmp_path, stored, wanted, turned):
    """Values of another type that the dataset's can hold are converted, as the library does."""
    array = np.arange(12).reshape(3, 4).astype(stored)
    write(tmp_path / "s.h5", array)
    pairs = [(column, source(shape=(3, 4))[:, column]) for column in range(4)] if turned else []
    shape = (4, 3) if turned else (3, 4)
    path = mapped(tmp_path / "a.h5", *(pairs or [(np.s_[:], source(shape=(3, 4)))]), shape=shape, dtype=wanted)
    assert_same(open_shards(path).compute(), (array.T if turned else array).astype(wanted))


@pytest.mark.parametrize(("stored", "wanted"), [("f8", "i2"), ("S3", "f4"), ("c8", "f4"), ("i4", "u4")])
def test_source_of_a_type_that_does_not_fit(tmp_path, stored, wanted):
    """Values that would be cut off, as the library does without a word, are at fault when opened."""
    write(tmp_path / "s.h5", np.full(WHOLE.shape, 3).astype(stored))
    assert "expected a type" in fault(mapped(tmp_path / "a.h5", (np.s_[:], source()), dtype=wanted))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_source_with_fewer_rows(tmp_path, rows, turned):
    """A source that has less than is mapped of it is at fault: the library would make up the rest."""
    write(tmp_path / "s.h5", WHOLE[:rows])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = columns()
        if not turned:
            layout = h5py.VirtualLayout(WHOLE.shape, "f4")
            layout[:] = source()
        file.create_virtual_dataset("data", layout)
    assert "s.h5', which has shape" in fault(tmp_path / "a.h5")


def test_source_that_grew(folder):
    """Of a source with more rows than are mapped, the mapped ones are read."""
    path = mapped(folder / "a.h5", (np.s_[:], source()[:]))
    write(folder / "s.h5", np.concatenate([WHOLE, WHOLE]))
    assert_same(open_shards(path).compute(), WHOLE)
    path = mapped(folder / "b.h5", (np.s_[:], source(shape=(8, 3))[2:6]))
    assert_same(open_shards(path).compute(), np.concatenate([WHOLE[2:], WHOLE[:2]]))


def test_source_that_was_not_written(tmp_path):
    """Rows of a source that were never written are at fault, as they are in a shard."""
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("x", WHOLE.shape, "f4", chunks=(1, 3))[:2] = 1
    path = mapped(tmp_path / "a.h5", (np.s_[:], source()))
    assert "s.h5', which has the dataset 'x' of which not all was written" in fault(path)


def test_source_with_a_missing_filter(tmp_path):
    """A source whose filter is not installed is at fault when opened, by the filter's number."""
    space, plist = h5py.h5s.create_simple((4, 3)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 3))
    plist.set_filter(32768, h5py.h5z.FLAG_OPTIONAL, (1,))
    with h5py.File(tmp_path / "s.h5", "w") as file:
        data = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, plist)
        data.write_direct_chunk((0, 0), b"unknown", 0)
    assert "filter 32768" in fault(mapped(tmp_path / "a.h5", (np.s_[:], source())))


@pytest.mark.parametrize("kind", ["virtual", "raw"])
def test_pipes_and_directories(tmp_path, kind):
    """A pipe or a directory in the place of another file is at fault, and never waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        path = tmp_path / "a.h5"
        if kind == "virtual":
            mapped(path, (np.s_[:], source(name)))
        else:
            with h5py.File(path, "w") as file:
                file.create_dataset("data", WHOLE.shape, "f4", external=[(name, 0, 48)])
        assert f"{name}', which" in fault(path)


# Where they are -------------------------------------------------------------------------------------------------


def test_source_that_was_replaced(folder):
    """Another file moved into the place of a source after opening is noticed."""
    path = mapped(folder / "a.h5", (np.s_[:], source()))
    ds = open_shards(path)
    os.replace(write(folder / "new.h5", -WHOLE), folder / "s.h5")
    with pytest.raises(ShardChangedError, match=r"s\.h5"):
        ds.compute()


@pytest.mark.parametrize("turned", [False, True])
def test_file_between(folder, turned):
    """A file that only leads on to the next is known by its stamp as well."""
    mapped(folder / "middle.h5", (np.s_[:], source()))
    with h5py.File(folder / "a.h5", "w") as file:
        layout = columns("middle.h5", "data")
        if not turned:
            layout = h5py.VirtualLayout(WHOLE.shape, "f4")
            layout[:] = source("middle.h5", "data")
        file.create_virtual_dataset("data", layout)
    ds = open_shards(folder / "a.h5")
    assert_same(ds.compute(), WHOLE.T if turned else WHOLE)
    os.utime(folder / "middle.h5", ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"middle\.h5"):
        ds.compute()


def test_link_between_that_changed(folder):
    """A file with the external link that led to a source is noticed when it changes: it may lead elsewhere now."""
    with h5py.File(folder / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("s.h5", "/x")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("data", columns("link.h5"))
    ds = open_shards(folder / "a.h5")
    assert_same(ds.compute(), WHOLE.T)
    os.utime(folder / "link.h5", ns=(1, 1))
    with pytest.raises(ShardChangedError, match=r"link\.h5"):
        ds.compute()


@pytest.mark.parametrize("turned", [False, True])
def test_outside_by_way_of_a_file_inside(tmp_path, turned):
    """A file inside the directory that leads out of it is refused wherever it stands in the row, unless allowed."""
    root = tmp_path / "root"
    root.mkdir()
    write(tmp_path / "s.h5", WHOLE)
    mapped(root / "middle.h5", (np.s_[:], source("../s.h5")))
    with h5py.File(root / "link.h5", "w") as file:
        file["data"] = h5py.ExternalLink(str(tmp_path / "s.h5"), "/x")
    for name in ("middle.h5", "link.h5"):
        with h5py.File(root / "a.h5", "w") as file:
            layout = columns(name, "data")
            if not turned:
                layout = h5py.VirtualLayout(WHOLE.shape, "f4")
                layout[:] = source(name, "data")
            file.create_virtual_dataset("data", layout)
        assert "outside the dataset's directory" in fault(root / "a.h5")
        ds = open_shards(root / "a.h5", allow_external=True)
        assert_same(ds.compute(), WHOLE.T if turned else WHOLE)


def test_library_would_look_in_the_working_directory(tmp_path, monkeypatch):
    """External storage is found beside its file; where the library would read it, from elsewhere, it is refused."""
    root, here = tmp_path / "root", tmp_path / "here"
    for place, array in ((root, WHOLE), (here, -WHOLE)):
        place.mkdir()
        (place / "raw.bin").write_bytes(array.tobytes())
    monkeypatch.chdir(here)
    with h5py.File(root / "raw.h5", "w") as file:
        file.create_dataset("x", WHOLE.shape, "f4", external=[("raw.bin", 0, 48)])
    assert_same(open_shards(root / "raw.h5").compute(), WHOLE)
    assert_same(open_shards(mapped(root / "a.h5", (np.s_[:], source("raw.h5")))).compute(), WHOLE)
    with h5py.File(root / "a.h5", "w") as file:
        file.create_virtual_dataset("data", columns("raw.h5"))
    assert "working directory" in fault(root / "a.h5")


def test_library_would_be_sent_elsewhere(folder, monkeypatch):
    """With HDF5_VDS_PREFIX the library would read other sources than were checked: what it must read is refused."""
    (folder / "other").mkdir()
    write(folder / "other" / "s.h5", -WHOLE)
    with h5py.File(folder / "odd.h5", "w") as file:
        file.create_virtual_dataset("data", columns())
    path = mapped(folder / "a.h5", (np.s_[:], source()))
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(folder / "other"))
    assert "HDF5_VDS_PREFIX" in fault(folder / "odd.h5")
    assert_same(open_shards(path).compute(), WHOLE)


def test_shards_with_no_directory_in_common(tmp_path, monkeypatch):
    """Shards of which nothing but the root directory is common allow no file outside each one's own directory."""
    from lazyshards.formats import hdf5

    write(tmp_path / "s.h5", WHOLE)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = mapped(tmp_path / "a" / "0.h5", (np.s_[:], source("../s.h5")))
    second = mapped(tmp_path / "b" / "1.h5", (np.s_[:], source("inside.h5")))
    write(tmp_path / "b" / "inside.h5", WHOLE)
    paths = [str(first), str(second)]
    found = find_format("hdf5").inspect(paths, LocalStorage(), {})
    assert not any([isinstance(item, Fault) for item in found])
    monkeypatch.setattr(hdf5, "_common_folder", lambda paths: "/")
    found = find_format("hdf5").inspect(paths, LocalStorage(), {})
    assert "outside the dataset's directory" in str(found[0])
    assert not isinstance(found[1], Fault)


def test_locked_source(folder):
    """A source that is being written is at fault, named, as a shard is."""
    path = mapped(folder / "a.h5", (np.s_[:], source()))
    with h5py.File(folder / "s.h5", "r+"):
        assert "s.h5', which is open for writing in this process" in fault(path)
    ds = open_shards(path)
    Path(folder / "s.h5").unlink()
    with pytest.raises(ShardReadError, match=r"a\.h5.*s\.h5"):
        ds.compute()
    with pytest.raises(LayoutError, match=r"s\.h5"):
        open_shards(path)
