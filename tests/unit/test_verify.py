import json
import os
import sys

import numpy as np
import pytest

from lazyshards import open_shards
from lazyshards import verify as module
from lazyshards.cli import main
from lazyshards.errors import FormatError, ShardsNotFoundError
from lazyshards.manifest import NAME
from lazyshards.testing import write_npy_shards
from lazyshards.verify import verify

pytestmark = pytest.mark.usefixtures("on_numpy")


def kinds(report):
    """Return what was found, as pairs of kind and file name."""
    return [(finding.kind, os.path.basename(finding.path)) for finding in report.findings]


def overwrite(path, at, data):
    """Change bytes of a file, and leave its size and time as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# What is found ----------------------------------------------------------------------------------------------------


def test_sound(write):
    """A dataset that is as it should be is sound, and says how large it is; empty shards are noted."""
    path, _ = write((3, 0, 4))
    for content in (False, True):
        report = verify(path, content=content)
        assert report.is_sound
        assert (report.shards, report.rows, report.read) == (3, 7, 3 * content)
        assert kinds(report) == [("empty", "shard_0001.npy")]
        assert not report.findings[0].is_fault


def test_everything_at_once(tmp_path):
    """All faults of all kinds are reported by one call, in the order of the shards."""
    arrays = [np.full((5, 2), i, "f4") for i in range(8)]
    write_npy_shards(tmp_path, arrays)
    open_shards(tmp_path).save_manifest(content=True)
    shard = [tmp_path / f"shard_{i:04d}.npy" for i in range(10)]
    os.truncate(shard[1], 140)
    np.save(shard[2], np.zeros((5, 3), "f4"))
    shard[3].unlink()
    overwrite(shard[4], 128, b"\1")
    shard[6].write_bytes(b"nonsense")
    os.link(shard[7], shard[8])
    np.save(shard[9], np.full((5, 2), 5, "f4"))
    report = verify(tmp_path, content=True)
    assert not report.is_sound
    assert sorted(kinds(report)) == sorted(
        [
            ("hole", ""),
            ("damaged", "shard_0001.npy"),
            ("changed", "shard_0002.npy"),
            ("drift", "shard_0002.npy"),
            ("changed", "shard_0003.npy"),
            ("content", "shard_0004.npy"),
            ("damaged", "shard_0006.npy"),
            ("changed", "shard_0008.npy"),
            ("duplicate", "shard_0008.npy"),
            ("changed", "shard_0009.npy"),
            ("duplicate", "shard_0009.npy"),
        ]
    )
    assert "holds the same bytes as" in next(
        finding.text for finding in report.findings if finding[:2] == ("duplicate", str(shard[9]))
    )


def test_holes_that_are_meant(write):
    """A hole is no fault if it is said to be none."""
    path, _ = write((3, 4, 5))
    (path / "shard_0001.npy").unlink()
    assert kinds(verify(path)) == [("hole", "")]
    assert verify(path, holes="ignore").is_sound


def test_overlapping_list(write):
    """A file that a list has twice is a fault."""
    path, _ = write((3, 4))
    files = [path / "shard_0000.npy", path / "shard_0001.npy", path / "shard_0000.npy"]
    assert kinds(verify(files)) == [("duplicate", "shard_0000.npy")]


def test_hash_of_what_the_stamp_hides(write):
    """A byte that changed without a trace in size or time is found by its hash, with the manifest's algorithm."""
    path, _ = write((3, 4))
    open_shards(path).save_manifest(content=True)
    overwrite(path / "shard_0001.npy", 130, b"\7\7")
    assert verify(path).is_sound
    report = verify(path, content=True)
    assert kinds(report) == [("content", "shard_0001.npy")]
    assert "expected" in report.findings[0].text


def test_rows_that_cannot_be_decoded(tmp_path):
    """A shard whose header is fine and whose rows are not is found by reading them."""
    for i in range(3):
        np.savez_compressed(tmp_path / f"a_{i}.npz", data=np.random.default_rng(i).random(5_000))
    overwrite(tmp_path / "a_1.npz", 9_000, bytes(64))
    assert verify(tmp_path).is_sound
    report = verify(tmp_path, content=True)
    assert kinds(report) == [("unreadable", "a_1.npz")]
    assert report.read == 2


def test_link_to_nothing(write):
    """A shard that cannot be opened at all is a fault of that shard."""
    path, _ = write((3, 4))
    (path / "shard_0002.npy").symlink_to("nowhere")
    assert kinds(verify(path)) == [("unreadable", "shard_0002.npy")]


def test_vanished_while_it_is_read(write, monkeypatch):
    """A shard that vanishes after it was listed is a fault of that shard."""
    path, _ = write((3, 4, 5))
    real = module._read_rows

    def remove_and_read(shard, found):
        if shard.path.endswith("0001.npy"):
            os.unlink(shard.path)
        real(shard, found)

    monkeypatch.setattr(module, "_read_rows", remove_and_read)
    assert kinds(verify(path, content=True)) == [("unreadable", "shard_0001.npy")]


def test_damaged_manifest(write):
    """A manifest that is damaged is a fault of its own; the shards are looked at without it."""
    path, _ = write((3, 4))
    (path / NAME).write_bytes(b"ARROW1 and nothing else")
    assert kinds(verify(path)) == [("manifest", NAME)]


def test_manifest_by_its_name(write):
    """Asked for by its own name, what a manifest lists is looked at."""
    path, _ = write((3, 4))
    open_shards(path).save_manifest()
    assert verify(path / NAME).is_sound
    (path / "shard_0001.npy").unlink()
    assert ("unreadable", "shard_0001.npy") in kinds(verify(path / NAME))


def test_nothing_there(tmp_path):
    """Where there is nothing to look at it is said so, as by opening."""
    with pytest.raises(ShardsNotFoundError):
        verify(tmp_path / "nothing")
    np.save(tmp_path / "a_0.npy", np.zeros(3))
    np.savez(tmp_path / "a_1.npz", np.zeros(3))
    with pytest.raises(FormatError):
        verify(tmp_path)


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_jobs(write, jobs):
    """Any number of jobs finds the same; none at all is refused."""
    path, _ = write((3, 4, 0, 9))
    open_shards(path).save_manifest(content=True)
    overwrite(path / "shard_0003.npy", 130, b"\7\7")
    assert kinds(verify(path, content=True, jobs=jobs)) == [("empty", "shard_0002.npy"), ("content", "shard_0003.npy")]
    with pytest.raises(ValueError, match="1 or more"):
        verify(path, content=True, jobs=0)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("change", ["rewritten", "removed", "added"])
def test_contents_of_stores(tmp_path, version, change):
    """A chunk that was rewritten, lost or added since the manifest is found by its content, and by nothing else."""
    zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    for i in range(2):
        rows = np.arange(12.0, dtype="f4").reshape(6, 2) + 100 * i
        store = zarr.create_array(
            str(tmp_path / f"s_{i}.zarr"), shape=(6, 2), chunks=(2, 2), dtype="f4", zarr_format=version
        )
        store[:] = rows
    open_shards(tmp_path, missing_chunks="fill").save_manifest(content=True)
    assert verify(tmp_path, missing_chunks="fill", content=True).is_sound
    name = "1.0" if version == 2 else "c/1/0"
    chunk, other = (tmp_path / f"s_{i}.zarr" / name for i in (1, 0))
    if change == "removed":
        chunk.unlink()
    elif change == "added":
        chunk.with_name("9").write_bytes(b"")
    else:
        chunk.write_bytes(other.read_bytes())
    assert len(open_shards(tmp_path, manifest="require", missing_chunks="fill")) == 12
    assert kinds(verify(tmp_path, missing_chunks="fill")) == []
    assert kinds(verify(tmp_path, missing_chunks="fill", content=True)) == [("content", "s_1.zarr")]


def test_contents_of_datasets_in_one_file(tmp_path):
    """Datasets that share a file have its hash, which is no duplicate; a change of it is found for each of them."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    for i in range(2):
        with h5py.File(tmp_path / f"f_{i}.h5", "w") as file:
            for j in range(3):
                file.create_dataset(f"part/{j}", data=np.full((4, 2), 10.0 * i + j))
    open_shards(tmp_path, dataset="part/*").save_manifest(content=True)
    report = verify(tmp_path, dataset="part/*", content=True)
    assert (report.is_sound, report.read) == (True, 6)
    path = tmp_path / "f_1.h5"
    before = path.stat()
    with h5py.File(path, "a") as file:
        file["part/2"][0] += 1
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [kind for kind, _ in kinds(verify(tmp_path, dataset="part/*", content=True))] == ["content"] * 3


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Rows are read a block at a time, however long a shard is."""
    write_npy_shards(tmp_path, [np.zeros((100, 4), "f8")])
    monkeypatch.setattr(module, "_BLOCK_NBYTES", 320)
    blocks = []
    real = module.fill
    monkeypatch.setattr(module, "fill", lambda out, *rest: (blocks.append(len(out)), real(out, *rest)))
    assert verify(tmp_path, content=True).read == 1
    assert blocks == [10] * 10


# Resuming ---------------------------------------------------------------------------------------------------------


def test_resume(write, tmp_path, monkeypatch):
    """What was found sound and did not change since is not read again; a line cut off by a kill does no harm."""
    path, _ = write((3, 4, 5))
    journal = tmp_path / "journal"
    overwrite(path / "shard_0000.npy", 6, b"\1")
    assert verify(path, content=True, resume=journal).read == 3
    journal.write_text(journal.read_text()[:-20])
    np.save(path / "shard_0000.npy", np.ones((3, 3), "f4"))
    looked = []
    real = module._read_rows
    monkeypatch.setattr(module, "_read_rows", lambda shard, found: (looked.append(shard.path[-8:]), real(shard, found)))
    assert verify(path, content=True, resume=journal).read == 3
    assert sorted(looked) == ["0000.npy", "0002.npy"]
    looked.clear()
    assert verify(path, content=True, resume=journal).read == 3
    assert not looked


def test_resume_forgets_no_fault(write, tmp_path):
    """A shard that was at fault is looked at again, and found again."""
    path, _ = write((3, 4))
    open_shards(path).save_manifest(content=True)
    overwrite(path / "shard_0001.npy", 130, b"\7\7")
    for _ in range(2):
        assert kinds(verify(path, content=True, resume=tmp_path / "journal")) == [("content", "shard_0001.npy")]


def test_a_journal_that_cannot_be_written(write, child):
    """Where the disk is full the error names the file that could not be written."""
    path, _ = write((3, 4))
    code = """
        import resource, signal, sys
        from lazyshards.cli import main
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        sys.stderr = sys.stdout
        print(main(["verify", sys.argv[1], "--content", "--resume", "journal"]))
    """
    assert child(code, path).splitlines()[-2:] == ["lazyshards: error: [Errno 27] File too large: 'journal'", "1"]


# The command ------------------------------------------------------------------------------------------------------


def test_command(write, capsys):
    """The command exits with 0 if all is well and with 1 if not, and prints a line for each finding."""
    path, _ = write((3, 0, 4))
    assert main(["verify", str(path), "--content", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"note: empty: '{path}/shard_0001.npy' holds no rows",
        "3 shards, 7 rows, 3 read to the end: sound",
    ]
    os.truncate(path / "shard_0002.npy", 130)
    assert main(["verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"damaged: '{path}/shard_0002.npy' is truncated")
    assert lines[-1] == "3 shards, 3 rows: 1 fault"


def test_command_for_programs(write, capsys, tmp_path):
    """With --json the whole report is one JSON value."""
    path, _ = write((3, 4))
    os.truncate(path / "shard_0001.npy", 130)
    assert main(["verify", str(path), "--json", "--content", "--resume", str(tmp_path / "journal")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_sound"] is False
    assert (report["shards"], report["rows"], report["read"]) == (2, 3, 1)
    assert [(found["kind"], found["is_fault"]) for found in report["findings"]] == [("damaged", True)]


def test_command_shows_progress(write, capsys, monkeypatch):
    """On a terminal a bar counts the shards that were read."""
    path, _ = write((3, 4))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["verify", str(path), "--content"]) == 0
    assert "2/2" in capsys.readouterr().err


def test_index_command(write, capsys):
    """The command writes a manifest, says where, and takes options of the format."""
    path, _ = write((3, 4))
    assert main(["index", str(path), "--content"]) == 0
    assert capsys.readouterr().out == f"{path}/{NAME}: 2 shards, 7 rows\n"
    assert "not read again" in repr(open_shards(path, manifest="require"))
    np.zeros(12, "i2").tofile(path.parent / "a_0.bin")
    option = ["--option", "row_shape=[3]", "--option", "dtype=<i2"]
    assert main(["index", str(path.parent / "a_0.bin"), *option]) == 0
    assert len(open_shards(path.parent / NAME)) == 4
    assert main(["index", str(path), "--option", "nonsense"]) == 2
