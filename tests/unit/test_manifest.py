import json
import os
import pickle
import shutil
import zipfile

import fsspec
import numpy as np
import pyarrow as pa
import pytest

import lazyshards
from lazyshards import catalog, finding, manifest, manifest_bytes, open_shards
from lazyshards.errors import LayoutError, ShardChangedError, ShardReadError, ShardsNotFoundError
from lazyshards.layout import Layout, Names
from lazyshards.storage import LocalStorage
from lazyshards.testing import RecordingStorage, assert_same, example_array, npy_bytes, write_npy_shards
from lazyshards.verify import verify

pytestmark = pytest.mark.usefixtures("on_numpy")


def recorded(monkeypatch):
    """Make opening use a storage that notes its reads, and return it."""
    storage = RecordingStorage(LocalStorage())
    real = finding.open_storage
    monkeypatch.setattr(finding, "open_storage", lambda *given: (storage, real(*given)[1]))
    return storage


def saved(folder):
    """Return what the manifest of a directory says about itself, and its table."""
    table = pa.ipc.open_file(folder / manifest.NAME).read_all()
    return json.loads(table.schema.metadata[b"lazyshards"]), table


def tampered(folder, described=None, **columns):
    """Write the manifest of a directory again with another description or other columns."""
    told, table = saved(folder)
    for name, values in columns.items():
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    table = table.replace_schema_metadata({b"lazyshards": json.dumps({**told, **(described or {})}).encode()})
    with pa.ipc.new_file(folder / manifest.NAME, table.schema) as writer:
        writer.write_table(table)


@pytest.fixture
def indexed(write):
    """Give a directory of three shards with a manifest, and what the shards hold."""
    path, whole = write((3, 0, 4))
    open_shards(path).save_manifest()
    return path, whole


# Using one --------------------------------------------------------------------------------------------------------


def test_fresh_manifest_saves_the_headers(indexed, monkeypatch):
    """With a fresh manifest opening reads no shard, and gives what it gives without."""
    path, whole = indexed
    plain = open_shards(path, manifest="ignore")
    storage = recorded(monkeypatch)
    ds = open_shards(path)
    assert {os.path.basename(name) for name, _, nbytes in storage.reads if nbytes} == {manifest.NAME}
    assert ds.fingerprint == plain.fingerprint
    assert list(ds.shards) == list(plain.shards)
    assert_same(ds[1:6].compute(), whole[1:6])


def test_repr_says_so(indexed):
    """The repr tells whether a manifest was used, and if not, why."""
    path, _ = indexed
    assert "manifest" not in repr(open_shards(path, manifest="ignore"))
    assert "manifest: its headers were not read again, as no file changed" in repr(open_shards(path))
    np.save(path / "shard_0003.npy", np.zeros((2, 3), "f4"))
    assert "manifest: not used: 1 shard added ('shard_0003.npy')" in repr(open_shards(path))


def add(path):
    """Add a shard."""
    np.save(path / "shard_0003.npy", np.zeros((2, 3), "f4"))
    return "1 shard added ('shard_0003.npy')"


def remove(path):
    """Remove the last shard."""
    (path / "shard_0002.npy").unlink()
    return "1 shard removed ('shard_0002.npy')"


def grow(path):
    """Write a longer shard in the place of one."""
    np.save(path / "shard_0000.npy", np.zeros((9, 3), "f4"))
    return "1 shard changed ('shard_0000.npy')"


def touch(path):
    """Change the time of a shard and nothing else."""
    status = (path / "shard_0000.npy").stat()
    os.utime(path / "shard_0000.npy", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    return "1 shard changed ('shard_0000.npy')"


def swap(path):
    """Put a copy of the same size and time in the place of a shard."""
    shutil.copy2(path / "shard_0000.npy", path / "copy")
    (path / "copy").replace(path / "shard_0000.npy")
    return "1 shard changed ('shard_0000.npy')"


def rename(path):
    """Give two shards each other's name."""
    (path / "shard_0000.npy").rename(path / "other")
    (path / "shard_0002.npy").rename(path / "shard_0000.npy")
    (path / "other").rename(path / "shard_0002.npy")
    return "2 shards changed ('shard_0000.npy', 'shard_0002.npy')"


CHANGES = [add, remove, grow, touch, swap, rename]


@pytest.mark.parametrize("change", CHANGES)
def test_stale_manifest_is_never_served(indexed, change):
    """After any change the default gives what is on disk, and "require" refuses and names what changed."""
    path, _ = indexed
    what = change(path)
    arrays = [np.load(file) for file in sorted(path.glob("*.npy"))]
    assert_same(open_shards(path).compute(), np.concatenate(arrays))
    with pytest.raises(LayoutError) as caught:
        open_shards(path, manifest="require")
    assert f"is stale: {what}; write it again" in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_refresh_writes_it_again(indexed, change):
    """With "refresh" a stale manifest is replaced by a fresh one."""
    path, _ = indexed
    change(path)
    ds = open_shards(path, manifest="refresh")
    assert "manifest: written again" in repr(ds)
    assert open_shards(path, manifest="require") == ds


def test_refresh_writes_a_first_one(write):
    """With "refresh" a directory without a manifest gets one."""
    path, _ = write((3, 4))
    open_shards(path, manifest="refresh")
    assert "as no file changed" in repr(open_shards(path, manifest="require"))


def test_require_without_one(write):
    """Without a manifest "require" says how to write one."""
    path, _ = write((3, 4))
    with pytest.raises(ShardsNotFoundError, match="lazyshards index"):
        open_shards(path, manifest="require")


def test_unknown_policy(write):
    """A policy that is none is refused, and those there are named."""
    path, _ = write((3,))
    with pytest.raises(ValueError, match='"require"'):
        open_shards(path, manifest="maybe")


def test_other_options_are_not_served(write, tmp_path):
    """A manifest made with other options of the format is not used."""
    (tmp_path / "raw").mkdir()
    whole = example_array((12,), "i2")
    whole.tofile(tmp_path / "raw" / "a_0.bin")
    open_shards(tmp_path / "raw", dtype="i2", row_shape=()).save_manifest()
    ds = open_shards(tmp_path / "raw", dtype="i2", row_shape=(3,))
    assert ds.shape == (4, 3)
    assert "made with the options" in repr(ds)
    with pytest.raises(LayoutError, match="made with the options"):
        open_shards(tmp_path / "raw", dtype="i2", row_shape=(3,), manifest="require")


def test_sidecar_that_changed(tmp_path):
    """A manifest of raw shards is stale once the file that describes them changes."""
    np.arange(12, dtype="i2").tofile(tmp_path / "a_0.bin")
    (tmp_path / "meta.json").write_text('{"dtype": "<i2", "shape": [3]}')
    open_shards(tmp_path).save_manifest()
    (tmp_path / "meta.json").write_text('{"dtype": "<i2", "shape": [2]}')
    ds = open_shards(tmp_path)
    assert ds.shape == (6, 2)
    assert "'meta.json', which describes the shards, changed" in repr(ds)


def test_casts_are_chosen_anew(indexed):
    """A manifest holds what the files hold: dtype= is applied to it as to a scan, and refused as there."""
    path, whole = indexed
    open_shards(path, dtype="f8").save_manifest()
    assert open_shards(path, manifest="require").dtype == np.float32
    wide = open_shards(path, dtype="f8", manifest="require")
    assert_same(wide.compute(), whole.astype("f8"))
    assert wide.fingerprint == open_shards(path, dtype="f8", manifest="ignore").fingerprint
    with pytest.raises(LayoutError, match="cannot be cast safely"):
        open_shards(path, dtype="i2")


def test_mixed_dtypes_need_a_cast(tmp_path):
    """Shards of several dtypes that were opened with dtype= are refused without, manifest or not."""
    write_npy_shards(tmp_path, [np.zeros(3, "f4"), np.zeros(2, "i2")])
    open_shards(tmp_path, dtype="f8").save_manifest()
    with pytest.raises(LayoutError, match="has dtype"):
        open_shards(tmp_path)
    with pytest.raises(LayoutError, match="give a dtype="):
        open_shards(tmp_path / manifest.NAME)
    assert open_shards(tmp_path / manifest.NAME, dtype="f8").shape == (5,)


def test_every_way_to_lie(tmp_path):
    """Columns, byte orders, empty shards and odd names come back as they were."""
    arrays = [
        example_array((3, 2, 4), "f4"),
        np.asfortranarray(example_array((5, 2, 4), "f4")),
        example_array((0, 2, 4), "f4"),
        example_array((2, 2, 4), ">f4"),
    ]
    names = ["a 1.npy", "a 2.npy", "a 10.npy", os.fsdecode(b"b\xff\xc3\xa9.npy")]
    for name, array in zip(names, arrays, strict=True):
        with open(tmp_path / name, "wb") as file:
            np.save(file, array)
    plain = open_shards(tmp_path)
    plain.save_manifest()
    ds = open_shards(tmp_path, manifest="require")
    assert list(ds.shards) == list(plain.shards)
    assert ds.fingerprint == plain.fingerprint
    assert_same(ds.compute(), np.concatenate(arrays))
    again = pickle.loads(pickle.dumps(ds))  # noqa: S301  # our own
    assert_same(again[2:9].compute(), np.concatenate(arrays)[2:9])


@pytest.mark.parametrize("format", ["parquet", "arrow", "hdf5", "npz", "safetensors"])
def test_formats(tmp_path, format):
    """Shards of every format that decodes come back as they were, and read the same."""
    whole = example_array((50, 3), "i4")
    for i, part in enumerate(np.split(whole, [20, 20, 35])):
        path = tmp_path / f"shard_{i}"
        if format == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(pa.table(dict(zip("cab", part.T, strict=True))), f"{path}.parquet", row_group_size=7)
        elif format == "arrow":
            table = pa.table(dict(zip("cab", part.T, strict=True)))
            with pa.ipc.new_file(f"{path}.arrow", table.schema) as writer:
                writer.write_table(table, 6)
        elif format == "hdf5":
            import h5py

            with h5py.File(f"{path}.h5", "w") as file:
                file.create_dataset("data", data=part, chunks=(7, 3) if len(part) else None)
        elif format == "npz":
            np.savez_compressed(f"{path}.npz", data=part)
        else:
            head = json.dumps({"data": {"dtype": "I32", "shape": part.shape, "data_offsets": [0, part.nbytes]}})
            path.with_suffix(".safetensors").write_bytes(
                len(head).to_bytes(8, "little") + head.encode() + part.tobytes()
            )
    plain = open_shards(tmp_path)
    assert plain.format == format
    plain.save_manifest()
    for ds in (open_shards(tmp_path, manifest="require"), open_shards(tmp_path / manifest.NAME)):
        assert list(ds.shards) == list(plain.shards)
        assert ds.fingerprint == plain.fingerprint
        assert_same(ds[10:45].compute(), whole[10:45])
    if format != "arrow":
        assert "not read again" in repr(open_shards(tmp_path))


# By its own name --------------------------------------------------------------------------------------------------


def test_opened_by_name_lists_nothing(indexed, monkeypatch):
    """Opened by its own name, the manifest alone is read."""
    path, whole = indexed
    storage = recorded(monkeypatch)
    ds = open_shards(path / manifest.NAME)
    assert storage.paths == {str(path / manifest.NAME)}
    assert ds == open_shards(path, manifest="ignore")
    assert_same(ds.compute(), whole)


def test_opened_by_name_takes_its_options(tmp_path):
    """Opened by its own name, a manifest brings the options of the format along, and refuses others."""
    whole = example_array((12,), "<i2")
    whole.tofile(tmp_path / "a_0.bin")
    open_shards(tmp_path, dtype="<i2", row_shape=(3,)).save_manifest()
    assert_same(open_shards(tmp_path / manifest.NAME).compute(), whole.reshape(4, 3))
    with pytest.raises(LayoutError, match="open its directory to choose others"):
        open_shards(tmp_path / manifest.NAME, dtype="<i2", row_shape=(2,))


def test_opened_by_name_never_reads_stale_rows(indexed):
    """A shard that changed since the manifest is an error when it is read, as one that changed after opening."""
    path, whole = indexed
    np.save(path / "shard_0002.npy", np.zeros((4, 3), "f4"))
    ds = open_shards(path / manifest.NAME)
    assert_same(ds[:3].compute(), whole[:3])
    with pytest.raises(ShardChangedError):
        ds[2:5].compute()


def test_opened_by_name_and_checked(indexed):
    """Opened by name with "require" or "refresh" the directory is listed, as for the directory itself."""
    path, _ = indexed
    add(path)
    with pytest.raises(LayoutError, match="1 shard added"):
        open_shards(path / manifest.NAME, manifest="require")
    assert len(open_shards(path / manifest.NAME, manifest="refresh")) == 9
    assert len(open_shards(path / manifest.NAME, manifest="require")) == 9
    with pytest.raises(ValueError, match="open its directory"):
        open_shards(path / manifest.NAME, manifest="ignore")


def test_moved_directory(indexed, tmp_path):
    """Paths are relative: a directory that is renamed takes its manifest along."""
    path, whole = indexed
    path.rename(tmp_path / "elsewhere")
    assert_same(open_shards(tmp_path / "elsewhere", manifest="require").compute(), whole)


def test_shards_in_subdirectories(tmp_path):
    """A manifest lies in the directory that all shards have in common, and names what is below it."""
    write_npy_shards(tmp_path / "x" / "a", [np.arange(3)])
    write_npy_shards(tmp_path / "x" / "b", [np.arange(4)])
    ds = open_shards(f"{tmp_path}/x/*/*.npy", holes="ignore")
    assert ds.save_manifest() == str(tmp_path / "x" / manifest.NAME)
    assert open_shards(tmp_path / "x" / manifest.NAME) == ds


# A million --------------------------------------------------------------------------------------------------------


class Counting(Names):
    """Names that count how many texts are made."""

    made = 0

    def __getitem__(self, index):
        if not isinstance(index, slice):
            Counting.made += 1
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("all names were made")


@pytest.fixture(params=[1_000, 200_000])
def large(request, tmp_path):
    """Give a dataset that a manifest of many shards describes, none of which is there, and its names."""
    count = request.param
    names = Names.of([f"shard_{i:07d}.npy" for i in range(count)])
    rows = 8 + np.arange(count) % 16
    stamps = np.stack([128 + rows * 8, np.full(count, 10**18), np.arange(count)], 1)
    ends, offsets = np.cumsum(rows), np.full(count, 128)
    root = f"{tmp_path}/"
    layout = Layout("npy", LocalStorage(), (1,), np.dtype("f8"), root, names, ends, stamps, offsets)
    manifest.save(layout)
    return layout


def test_opening_makes_no_object_a_shard(large, monkeypatch):
    """Opening a manifest makes no text and no shard for each file, and reads one file."""
    monkeypatch.setattr(manifest_bytes, "Names", Counting)
    monkeypatch.setattr(Counting, "made", 0)
    storage = recorded(monkeypatch)
    ds = open_shards(large.root + manifest.NAME)
    assert len(ds) == large.rows
    assert Counting.made == 0
    assert len(storage.reads) == 2


def test_small_slices_cost_the_same(large, monkeypatch):
    """Slicing, planning, printing and pickling a plan make a few names, however many shards there are."""
    monkeypatch.setattr(manifest_bytes, "Names", Counting)
    ds = open_shards(large.root + manifest.NAME)
    monkeypatch.setattr(Counting, "made", 0)
    plan = ds[1_000:5_000].plan()
    assert plan.shards < 500
    assert len(pickle.dumps(plan)) < 64_000
    assert ds[[5, len(ds) - 3]].plan().shards == 2
    repr(ds), repr(ds[1_000:5_000]), ds._repr_html_()
    assert Counting.made < 1_000


# Not trusted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../other/x.npy", "/etc/passwd", "a/../../x.npy", "..", ".", "", "a//b", "./a", "a/.", "s3://b/x.npy", "a/.."],
)
def test_paths_cannot_leave_the_root(indexed, name):
    """A path that could mean a file outside the manifest's directory is refused."""
    path, _ = indexed
    tampered(path, path=[b"shard_0000.npy", b"shard_0001.npy", name.encode()])
    with pytest.raises(LayoutError, match="below its own directory"):
        open_shards(path / manifest.NAME)


@pytest.mark.parametrize("prefix", ["../", "/", "/etc/", "a/../../", "..", "s3://b/", "./"])
def test_prefix_cannot_leave_the_root(indexed, prefix):
    """A directory that is not below the manifest's is refused."""
    path, _ = indexed
    tampered(path, {"prefix": prefix})
    with pytest.raises(LayoutError, match="below its own"):
        open_shards(path / manifest.NAME)


@pytest.mark.parametrize(
    "described",
    [
        {"version": 2},
        {"dtypes": ["|O"]},
        {"dtypes": [["f4"]]},
        {"dtypes": []},
        {"row_shape": [-1]},
        {"row_shape": "x"},
        {"fingerprint": "0" * 32},
        {"format": "nonsense"},
        {"beside": 3},
    ],
)
def test_descriptions_that_make_no_sense(indexed, described):
    """A description that is damaged is refused by name and passed over by default."""
    path, whole = indexed
    tampered(path, described)
    with pytest.raises(LayoutError, match=manifest.NAME):
        open_shards(path / manifest.NAME)
    assert_same(open_shards(path).compute(), whole)


@pytest.mark.parametrize(
    "columns",
    [
        {"rows": [3, 0, -4]},
        {"rows": [3, 0, 1 << 62]},
        {"rows": [1 << 62, 1 << 62, 1 << 62]},
        {"offset": [128, 128, -2]},
        {"offset": [128, 128, 1 << 40]},
        {"size": [10, 10, 10]},
        {"rows": [4, 0, 3]},
    ],
)
def test_numbers_that_cannot_be(indexed, columns):
    """Rows that lie outside their file, or are not those that were saved, are refused."""
    path, _ = indexed
    tampered(path, **columns)
    with pytest.raises(LayoutError, match="is damaged"):
        open_shards(path / manifest.NAME)


def test_cut_anywhere(indexed):
    """A manifest cut short at any byte is refused, and passed over by default."""
    path, whole = indexed
    data = (path / manifest.NAME).read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        (path / manifest.NAME).write_bytes(data[:size])
        with pytest.raises(LayoutError):
            open_shards(path / manifest.NAME)
        assert len(open_shards(path)) == len(whole)


@pytest.mark.parametrize(
    "text",
    [
        '[[],{"of":"os.system","":["true"]}]',
        '[[],{"of":"base.Fault","":["a","b",null]}]',
        '[[],{"of":"..os.path","":[]}]',
        '[[],{"of":"parquet.ParquetFormat","":[]}]',
        '[[],{"of":"hdf5_describe.Whole","":["/etc/passwd","x",[]]}]',
        '[["x"],1]',
        "[",
        '[[],{"shared":7}]',
    ],
)
def test_details_run_nothing(text):
    """The text of a detail makes the named tuples of formats and nothing else, and names no file."""
    from lazyshards.details import DetailDecoder

    with pytest.raises(ValueError):
        DetailDecoder([]).decode(text)


# What cannot be saved ---------------------------------------------------------------------------------------------


def test_function_cannot_be_saved(tmp_path):
    """A dataset that a function reads has no manifest, and the error says why."""
    (tmp_path / "a_0.txt").write_text("1 2 3")
    ds = open_shards(f"{tmp_path}/*.txt", reader=lambda *_: np.zeros(3), rows=[3], dtype="f8", row_shape=())
    with pytest.raises(LayoutError, match="read by a function"):
        ds.save_manifest()


def test_remote(monkeypatch):
    """A manifest lies beside remote shards as well; what changed there since is seen in one listing."""
    fs = fsspec.filesystem("memory")
    for i in range(3):
        fs.pipe(f"/manifests/a_{i}.npy", npy_bytes(np.arange(4)))
    assert open_shards("memory://manifests").save_manifest() == f"memory://manifests/{manifest.NAME}"
    with monkeypatch.context() as patch:
        patch.setattr(type(finding.find_format("npy")), "inspect", None)
        ds = open_shards("memory://manifests", manifest="require")
    assert_same(ds[2:6].compute(), np.array([2, 3, 0, 1]))
    fs.pipe("/manifests/a_1.npy", npy_bytes(np.arange(5)))
    assert len(open_shards("memory://manifests")) == 13
    with pytest.raises(LayoutError, match="1 shard changed"):
        open_shards("memory://manifests", manifest="require")


def test_remote_that_cannot_be_written(tmp_path):
    """Where nothing can be written the error names the file and says so."""
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.writestr("a_0.npy", npy_bytes(np.arange(3)))
    with pytest.raises(OSError, match=manifest.NAME):
        open_shards(f"zip://::{tmp_path}/set.zip").save_manifest()


@pytest.mark.parametrize("inner", ["", "deep/array"])
@pytest.mark.parametrize("version", [2, 3])
def test_stores(tmp_path, version, inner, monkeypatch):
    """Zarr stores have a manifest that saves reading their metadata, wherever it is in them, and sees it change."""
    import zarr

    whole = example_array((20, 3), "f4")
    for i, part in enumerate(np.split(whole, [7, 15])):
        store = zarr.create_array(
            str(tmp_path / f"s_{i}.zarr"),
            name=inner or None,
            shape=part.shape,
            chunks=(2, 3),
            dtype="f4",
            zarr_format=version,
        )
        store[:] = part
    options = {"array": inner} if inner else {}
    plain = open_shards(tmp_path, **options)
    plain.save_manifest()
    with monkeypatch.context() as patch:
        patch.setattr(type(finding.find_format("zarr")), "inspect", None)
        for path in (tmp_path, tmp_path / manifest.NAME):
            ds = open_shards(path, **options)
            assert "manifest: " in repr(ds)
            assert list(ds.shards) == list(plain.shards)
            assert ds.fingerprint == plain.fingerprint
            assert_same(ds[5:18].compute(), whole[5:18])
            again = pickle.loads(pickle.dumps(ds))  # noqa: S301  # our own
            assert_same(again.compute(), whole)
    zarr.create_array(
        str(tmp_path / "s_1.zarr"),
        name=inner or None,
        shape=(9, 3),
        chunks=(2, 3),
        dtype="f4",
        zarr_format=version,
        overwrite=True,
    )
    with pytest.raises(LayoutError, match=r"1 shard changed \('s_1\.zarr'\)"):
        open_shards(tmp_path, manifest="require", **options)
    assert len(open_shards(tmp_path, manifest="refresh", missing_chunks="fill", **options)) == 21
    open_shards(tmp_path, missing_chunks="fill", **options).save_manifest(content=True)
    assert verify(tmp_path, missing_chunks="fill", content=True, **options).is_sound


@pytest.mark.parametrize("chunks", [None, (2, 3)])
def test_datasets_of_one_file(tmp_path, chunks, monkeypatch):
    """Several datasets of each HDF5 file have a manifest in the file's directory, checked by the file's stamp."""
    import h5py

    whole = example_array((40, 3), "f4")
    parts = np.split(whole, [7, 15, 15, 30])
    for i, some in enumerate((parts[:2], parts[2:])):
        with h5py.File(tmp_path / f"f_{i}.h5", "w") as file:
            for j, part in enumerate(some):
                file.create_dataset(f"part/{j}", data=part, chunks=chunks if len(part) else None)
    plain = open_shards(tmp_path, dataset="part/*")
    assert len(plain.shards) == 5
    assert plain.save_manifest() == str(tmp_path / manifest.NAME)
    with monkeypatch.context() as patch:
        patch.setattr(type(finding.find_format("hdf5")), "inspect", None)
        for ds in (open_shards(tmp_path, dataset="part/*"), open_shards(tmp_path / manifest.NAME)):
            assert list(ds.shards) == list(plain.shards)
            assert ds.fingerprint == plain.fingerprint
            assert_same(ds[5:38].compute(), whole[5:38])
    assert verify(tmp_path, dataset="part/*", content=True).is_sound
    with h5py.File(tmp_path / "f_1.h5", "a") as file:
        file["part/1"][0] += 1
    with pytest.raises(LayoutError, match=r"1 shard changed \('f_1\.h5'\)"):
        open_shards(tmp_path, manifest="require", dataset="part/*")
    assert {finding.kind for finding in verify(tmp_path, dataset="part/*").findings} == {"changed", "empty"}


def test_one_file_of_datasets(tmp_path):
    """The manifest of several datasets of a single file lies beside that file, and is opened by its name."""
    import h5py

    whole = example_array((12, 2), "i4")
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for i, part in enumerate(np.split(whole, 3)):
            file[f"part/{i}"] = part
    path = open_shards(tmp_path / "all.h5", dataset="part/*").save_manifest()
    assert path == str(tmp_path / manifest.NAME)
    assert_same(open_shards(path).compute(), whole)
    assert_same(open_shards(tmp_path, dataset="part/*", manifest="require").compute(), whole)


def test_places_in_files_cannot_leave_the_root(tmp_path):
    """A manifest in which the place in a file is longer than the file's name is refused."""
    import h5py

    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["part/0"], file["part/1"] = np.arange(3), np.arange(4)
    open_shards(tmp_path / "all.h5", dataset="part/*").save_manifest()
    for inner in ([0, 17], [3, 9], [1, 1], [15, 15], [-1, -1]):
        tampered(tmp_path, inner=inner)
        with pytest.raises(LayoutError, match="damaged"):
            open_shards(tmp_path / manifest.NAME).compute()


def test_refresh_looks_at_what_changed(write, monkeypatch):
    """Of a stale manifest that is refreshed only the shards that are new or changed are looked at, and one more."""
    path, whole = write((3, 4, 5, 6, 7))
    open_shards(path).save_manifest()
    np.save(path / "shard_0003.npy", -whole[12:16])
    np.save(path / "shard_0005.npy", whole[:2])
    looked_at = []
    kind = type(finding.find_format("npy"))
    real = kind.inspect
    monkeypatch.setattr(kind, "inspect", lambda self, paths, *rest: looked_at.extend(paths) or real(self, paths, *rest))
    ds = open_shards(path, manifest="refresh")
    assert [os.path.basename(place) for place in looked_at] == ["shard_0000.npy", "shard_0003.npy", "shard_0005.npy"]
    expected = np.concatenate([whole[:12], -whole[12:16], whole[18:], whole[:2]])
    assert_same(ds.compute(), expected)
    os.unlink(path / "shard_0005.npy")
    looked_at.clear()
    assert_same(open_shards(path, manifest="refresh").compute(), expected[:-2])
    assert [os.path.basename(place) for place in looked_at] == ["shard_0000.npy"]
    assert open_shards(path, manifest="require") == open_shards(path, manifest="ignore")


def test_refresh_refuses_what_does_not_agree(write):
    """A shard that changed into another dtype is told, though the others are not looked at again."""
    path, _ = write((3, 4, 5))
    open_shards(path).save_manifest()
    np.save(path / "shard_0001.npy", np.arange(12).reshape(4, 3))
    with pytest.raises(LayoutError, match=r"shard_0001\.npy.*int64"):
        open_shards(path, manifest="refresh")


def test_part_does_not_replace_the_whole(indexed):
    """The manifest of a directory is not replaced by that of some of its shards, unless the others are gone."""
    path, _ = indexed
    before = (path / manifest.NAME).read_bytes()
    part = open_shards([path / "shard_0000.npy", path / "shard_0002.npy"])
    with pytest.raises(LayoutError, match=r"lists 1 shards that this dataset does not have.*shard_0001\.npy"):
        part.save_manifest()
    assert (path / manifest.NAME).read_bytes() == before
    os.unlink(path / "shard_0001.npy")
    part.save_manifest()
    assert len(open_shards(path, holes="ignore", manifest="require")) == 7


def test_directory_that_cannot_be_written(tmp_path, write):
    """A manifest that cannot be written leaves nothing behind."""
    path, _ = write((3,))
    (path / manifest.NAME).mkdir()
    with pytest.raises(OSError):
        open_shards(path).save_manifest()
    assert sorted(os.listdir(path)) == [manifest.NAME, "shard_0000.npy"]


def test_no_secret(tmp_path):
    """What a manifest holds is names and numbers of the shards: no root, no storage option, no secret."""
    folder = tmp_path / "hunter2"
    write_npy_shards(folder, [np.arange(3)])
    secret = "swordfish"
    url = f"simplecache::file://{folder}/shard_0000.npy"
    options = {"file": {"secret": secret}, "simplecache": {"cache_storage": str(tmp_path / "cache")}}
    ds = open_shards([url], storage_options=options)
    data = manifest.encode(ds._layout, ds._layout.root)
    assert secret.encode() not in data
    assert b"hunter2" not in data


# on_change="refresh" ----------------------------------------------------------------------------------------------


def test_refreshed_shard_is_read_anew(write):
    """A shard that is replaced by one of the same rows is read as it is now; the fingerprint stays."""
    path, whole = write((3, 4), dtype="f4")
    ds = open_shards(path, on_change="refresh")
    before = ds.fingerprint
    new = np.asfortranarray(example_array((4, 3), "f4", seed=9))
    np.save(path / "shard_0001.npy", new)
    assert_same(ds.compute(), np.concatenate([whole[:3], new]))
    assert_same(ds[5].compute(), new[2])
    assert_same(ds.map(lambda rows: rows[:, 0], row_shape=())[3:].compute(), new[:, 0])
    assert_same(next(iter(ds.batches(7))), np.concatenate([whole[:3], new]))
    assert ds.fingerprint == before


def test_refreshed_on_every_engine(write, engine):
    """Every engine reads the shards as they are now, and refuses those that hold something else."""
    path, whole = write((300, 400), dtype="f4")
    ds = open_shards(path, on_change="refresh", engine=engine)
    assert_same(np.asarray(ds.compute()), whole)
    new = example_array((400, 3), "f4", seed=9)
    np.save(path / "shard_0001.npy", new)
    assert_same(np.asarray(ds.compute()), np.concatenate([whole[:300], new]))
    assert_same(np.asarray(ds[299:302].compute()), np.concatenate([whole[299:300], new[:2]]))
    np.save(path / "shard_0001.npy", new[:5])
    with pytest.raises(ShardChangedError, match="holds 5 rows"):
        ds.compute()
    assert_same(np.asarray(open_shards(path, engine=engine).compute()), np.concatenate([whole[:300], new[:5]]))


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((5, 3), "f4"), "holds 5 rows of shape (3,) and dtype <f4, expected 4 rows"),
        (np.zeros((4, 2), "f4"), "rows of shape (2,)"),
        (np.zeros((4, 3), "f8"), "dtype <f8"),
    ],
)
def test_refresh_refuses_other_rows(write, array, what):
    """A shard that is replaced by one of other rows, shape or dtype is an error that names both."""
    path, whole = write((3, 4), dtype="f4")
    ds = open_shards(path, on_change="refresh")
    np.save(path / "shard_0001.npy", array)
    assert_same(ds[:3].compute(), whole[:3])
    with pytest.raises(ShardChangedError) as caught:
        ds.compute()
    assert what in str(caught.value)


def test_refresh_of_a_vanished_shard(write):
    """A shard that is gone is an error that names it."""
    path, _ = write((3, 4))
    ds = open_shards(path, on_change="refresh")
    (path / "shard_0001.npy").unlink()
    with pytest.raises(ShardReadError, match="shard_0001"):
        ds.compute()


def test_replaced_while_it_is_read(write, monkeypatch):
    """A shard replaced in the middle of a compute is read from its start again: never a mixture."""
    path, _ = write((2_000,), row_shape=(8,), dtype="f8")
    ds = open_shards(path, on_change="refresh")
    real, left = catalog.refreshed, [2]

    def replaced_after(layout):
        found = real(layout)
        if left[0]:
            left[0] -= 1
            np.save(path / "new", np.full((2_000, 8), left[0], "f8"))
            (path / "new.npy").replace(path / "shard_0000.npy")
        return found

    monkeypatch.setattr(catalog, "refreshed", replaced_after)
    assert_same(ds.compute(), np.zeros((2_000, 8)))


def test_exported():
    """The name of the file and the policy are what the documentation says."""
    assert manifest.NAME == "_lazyshards.arrow"
    assert "save_manifest" in dir(lazyshards.ShardedDataset)


def test_damaged_manifest_is_passed_over(tmp_path):
    """A manifest that is no Arrow file at all is as good as none: the headers are read, and the repr says why."""
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "_lazyshards.arrow").write_bytes(b"ARROW1\0\0garbagegarbage")
    ds = lazyshards.open_shards(tmp_path, engine="numpy")
    assert ds.to_numpy().tolist() == [0, 1, 2]
    assert "_lazyshards.arrow" in repr(ds)


FULL = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    from lazyshards import open_shards
    folder = Path(sys.argv[1])
    for i in range(300):
        np.save(folder / f"shard_{i}.npy", np.zeros(3))
    ds = open_shards(folder, engine="numpy")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
    try:
        ds.save_manifest()
    except OSError as exc:
        print(exc.errno, exc.filename)
    print(len(list(folder.iterdir())))
"""


def test_full_disk(tmp_path, child):
    """A manifest that does not fit the disk is an error that names it, and leaves nothing behind."""
    assert child(FULL, tmp_path).splitlines() == [f"27 {tmp_path / manifest.NAME}", "300"]
