import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshards import formats, open_shards
from lazyshards.catalog import natural_key, scan
from lazyshards.errors import FormatError, LayoutError, LazyShardsError, ShardReadError, ShardsNotFoundError
from lazyshards.formats import find_format
from lazyshards.testing import assert_same, npy_bytes, write_npy_shards

pytestmark = pytest.mark.usefixtures("on_numpy")


def names(place, **options):
    """Return the names of the shards that are found, in order."""
    return [Path(shard.path).name for shard in scan(place, **options).shards]


def touch(directory, *given):
    """Write one shard of one row under each name."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(given):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(npy_bytes(np.array([i])))
    return directory


# Order ------------------------------------------------------------------------------------------------------------


def test_natural_order(tmp_path):
    """Shard 2 comes before shard 10, in a directory and in a pattern."""
    expected = [f"shard_{i}.npy" for i in range(12)]
    touch(tmp_path, *reversed(expected))
    assert names(tmp_path) == expected
    assert names(tmp_path / "shard_*.npy") == expected
    assert names(str(tmp_path) + "/") == expected


@pytest.mark.parametrize(
    "expected",
    [
        ["run2_part1.npy", "run2_part10.npy", "run10_part2.npy", "run10_part11.npy"],
        ["a1.npy", "a2.npy", "b1.npy", "b10.npy"],
        ["x", "x1", "x2", "x10"],
        ["2024-01-31.npy", "2024-02-01.npy", "2024-10-01.npy"],
        ["v1.2.npy", "v1.10.npy", "v2.0.npy"],
        ["1.npy", "2.npy", "3.npy"],
        ["9_of.npy", "10_of.npy", "11_of.npy"],
        ["part-00000-of-00003.npy", "part-00001-of-00003.npy", "part-00002-of-00003.npy"],
        ["part-1-of-3.npy", "part-2-of-3.npy", "part-3-of-3.npy"],
        ["a.npy"],
        ["train.npy", "validate.npy"],
        ["s-1.npy", "s-2.npy", "s-3.npy"],
        ["s_٠.npy", "s_١.npy"],
    ],
    ids=lambda expected: expected[0],
)
def test_natural_order_of_other_names(tmp_path, expected):
    """Numbers anywhere in names, several of them too, compare as numbers."""
    touch(tmp_path, *reversed(expected))
    assert names(tmp_path) == expected


def test_more_than_ten_thousand_shards_of_width_four(tmp_path):
    """The ten thousandth shard of four digits comes after the 9,999th, not after the thousandth."""
    expected = [f"shard_{i:04d}.npy" for i in range(10_050)]
    first = npy_bytes(np.array([0]))
    for name in expected:
        (tmp_path / name).write_bytes(first)
    assert names(tmp_path) == expected
    assert names(tmp_path / "*.npy", order="name") == sorted(expected)


def test_more_axes_than_numpy_has(tmp_path):
    """A shard of more axes than an array can have is refused when it is opened, and not when it is computed."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 65}, }}\n".encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4))
    with pytest.raises(LayoutError, match="has 65 axes, expected at most the"):
        open_shards(tmp_path)


def test_numbers_beyond_64_bits(tmp_path):
    """Numbers of any length compare as numbers."""
    expected = [f"s_{10**30 + i}.npy" for i in (8, 9, 10)]
    touch(tmp_path, *reversed(expected))
    assert names(tmp_path) == expected


def test_order_by_name(tmp_path):
    """order="name" compares names as text."""
    touch(tmp_path, *[f"shard_{i}.npy" for i in range(12)])
    assert names(tmp_path, order="name") == sorted(f"shard_{i}.npy" for i in range(12))


def test_a_list_keeps_its_order(tmp_path):
    """A list, a tuple and a generator keep the order that they have, repeats and holes included."""
    touch(tmp_path, *[f"shard_{i}.npy" for i in range(12)])
    wanted = [f"shard_{i}.npy" for i in (7, 2, 10, 2, 0)]
    for kind in (list, tuple, iter):
        assert names(kind([tmp_path / name for name in wanted])) == wanted
    assert names([str(tmp_path / name) for name in wanted], order="name") == wanted


def test_pattern_over_directories(tmp_path):
    """A pattern over directories orders by the whole path, and files of one name stay apart."""
    wholes = [np.arange(i, i + 3) for i in range(3)]
    for i, (letter, whole) in enumerate(zip("abc", wholes, strict=True)):
        write_npy_shards(tmp_path / f"train_{letter}", [whole], pattern="data.npy", first=i)
    assert_same(open_shards(tmp_path / "train_*" / "data.npy").compute(), np.concatenate(wholes))
    assert_same(open_shards(tmp_path / "**" / "*.npy").compute(), np.concatenate(wholes))


@given(st.lists(st.text(st.sampled_from("ab019٣²./-"), max_size=8), min_size=2, max_size=6))
def test_natural_keys_always_compare(paths):
    """Any two names compare, and names that are not the same have different keys."""
    keys = sorted(map(natural_key, set(paths)))
    assert len(set(keys)) == len(set(paths))


# Holes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([0, 1, 3], ["shard_0002.npy"]),
        ([0, 5], ["shard_0001.npy", "shard_0002.npy", "shard_0003.npy", "shard_0004.npy"]),
        ([1, 2, 4], ["shard_0003.npy"]),
        ([7, 9], ["shard_0008.npy"]),
        ([9998, 9999, 10001], ["shard_10000.npy"]),
    ],
    ids=str,
)
def test_holes(tmp_path, present, missing):
    """A hole in numbered names is an error that names what is missing, in a directory and in a pattern."""
    touch(tmp_path, *[f"shard_{i:04d}.npy" for i in present])
    for place in (tmp_path, tmp_path / "*.npy"):
        with pytest.raises(LayoutError, match="hole") as caught:
            open_shards(place)
        for name in missing:
            assert name in str(caught.value)


def test_holes_without_leading_zeros(tmp_path):
    """What is missing is named as the others are: without zeros in front."""
    touch(tmp_path, "s9.npy", "s11.npy")
    with pytest.raises(LayoutError, match=r"\bs10\.npy missing"):
        open_shards(tmp_path)


def test_large_holes_are_counted(tmp_path):
    """Of very many missing shards ten are named and the rest counted."""
    touch(tmp_path, "s_0.npy", "s_100.npy")
    with pytest.raises(LayoutError, match="and 89 more") as caught:
        open_shards(tmp_path)
    assert str(caught.value).count("s_1") == 2  # s_1 and s_10


def test_enormous_holes_are_told_at_once(tmp_path):
    """A hole of very many numbers is told without counting through them."""
    touch(tmp_path, "s_0.npy", f"s_{10**18}.npy")
    with pytest.raises(LayoutError, match="more missing"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([0, 1], "part-00002-of-00003"),
        ([1, 2], "part-00000-of-00003"),
        ([1], "part-00000-of-00003"),
        ([1, 3], "part-00002"),
    ],
    ids=str,
)
def test_holes_told_by_the_total(tmp_path, present, missing):
    """A total in the names tells of a missing last or first shard, too, and of one shard of many."""
    touch(tmp_path, *[f"part-{i:05d}-of-00003.npy" for i in present])
    with pytest.raises(LayoutError, match=missing):
        open_shards(tmp_path)


@pytest.mark.parametrize("first", [0, 1, 5, 99])
def test_sequences_may_begin_anywhere(tmp_path, first):
    """A sequence without a hole may begin at any number."""
    expected = [f"s_{i}.npy" for i in range(first, first + 4)]
    touch(tmp_path, *expected)
    assert names(tmp_path) == expected


def test_holes_may_be_ignored(tmp_path):
    """holes="ignore" and a list read what is there."""
    touch(tmp_path, "s_0.npy", "s_5.npy", "s_12.npy")
    expected = ["s_0.npy", "s_5.npy", "s_12.npy"]
    assert names(tmp_path, holes="ignore") == expected
    assert names([tmp_path / name for name in expected]) == expected


def test_one_file_is_no_sequence(tmp_path):
    """One file that is asked for by its name is read, whatever number of whatever total it bears."""
    touch(tmp_path, "part-00003-of-00032.npy")
    assert names(tmp_path / "part-00003-of-00032.npy") == ["part-00003-of-00032.npy"]


def test_numbers_there_twice(tmp_path):
    """Two shards of one number are an error that names both: one of them may be a stale copy."""
    touch(tmp_path, "s_1.npy", "s_01.npy", "s_2.npy")
    with pytest.raises(LayoutError, match="same number") as caught:
        open_shards(tmp_path)
    assert "s_1.npy" in str(caught.value)
    assert "s_01.npy" in str(caught.value)


# What is no shard -------------------------------------------------------------------------------------------------

STRAYS = [
    "_SUCCESS",
    "._SUCCESS.crc",
    ".DS_Store",
    "._shard_0001.npy",
    "Thumbs.db",
    "README.md",
    "shard_0001.npy.crc",
    "shard_0003.npy.tmp",
    "shard_0003.npy.temp4711",
    ".shard_0003.npy.swp",
    "shard_0002.npy~",
    "shard_0003.npy.part",
    "_metadata",
    "checksums.sha256",
    ".hidden.npy",
    "_temporary.npy",
    "#shard_0001.npy#",
]


def test_strays_are_left_out(tmp_path):
    """Markers, hidden files, temporary files, other files and directories beside the shards are left out."""
    _, whole = tmp_path, np.arange(9)
    write_npy_shards(tmp_path, np.split(whole, [3, 5]))
    for name in STRAYS:
        (tmp_path / name).write_bytes(b"\x93NUMPY, but not an array")
    for name in (".ipynb_checkpoints", "__pycache__", "_temporary", "other"):
        shutil.copytree(
            tmp_path, tmp_path / name, ignore=lambda place, found: {n for n in found if "shard_0001" not in n}
        )
    for place in (tmp_path, tmp_path / "*.npy", tmp_path / "shard_*.npy"):
        assert_same(open_shards(place).compute(), whole)


def test_hidden_files_that_are_asked_for(tmp_path):
    """A pattern that begins with a dot or an underscore asks for such files."""
    touch(tmp_path, "_a_0.npy", "_a_1.npy", ".b_0.npy", "c.npy")
    assert names(tmp_path / "_a_*.npy") == ["_a_0.npy", "_a_1.npy"]
    assert names(tmp_path / ".b_*.npy") == [".b_0.npy"]


def test_directories_named_like_shards(tmp_path):
    """A directory named like a shard is an error that names it, or is passed over, and never rows."""
    touch(tmp_path, "s_0.npy", "s_1.npy/inner.txt")
    with pytest.raises(LazyShardsError, match=r"s_1\.npy"):
        open_shards(tmp_path)


def test_subdirectories_are_not_searched(tmp_path):
    """Shards in subdirectories only are an error that tells how to reach them."""
    touch(tmp_path, "inner/s_0.npy")
    with pytest.raises(ShardsNotFoundError, match=r"\*\*/\*\.npy"):
        open_shards(tmp_path)


# What is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nope", "nope/*.npy", "good/x_*.npy", "good/gone.npy", "empty", "other", "good/shard_0.npy/x"]
)
def test_nothing_there(tmp_path, name):
    """Nothing at a path, in a pattern or in a directory is a FileNotFoundError that names it."""
    touch(tmp_path / "good", "shard_0.npy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no shard here")
    with pytest.raises(ShardsNotFoundError) as caught:
        open_shards(tmp_path / name)
    assert name in str(caught.value)


def test_other_files_are_named(tmp_path):
    """An error about a directory without shards says what it does hold."""
    for i in range(8):
        (tmp_path / f"notes_{i}.txt").write_text("no shard here")
    with pytest.raises(ShardsNotFoundError, match=r"notes_0.txt.* and 3 more"):
        open_shards(tmp_path)


def test_missing_files_of_a_list(tmp_path):
    """A list with missing files names all of them."""
    touch(tmp_path, "here.npy")
    with pytest.raises(ShardsNotFoundError, match=r"(?s)2 of 3.*gone\.npy.*lost\.npy"):
        open_shards([tmp_path / name for name in ("gone.npy", "here.npy", "lost.npy")])
    (tmp_path / "torn.npy").write_bytes(b"")
    with pytest.raises(LayoutError, match=r"(?s)gone\.npy.*torn\.npy"):
        open_shards([tmp_path / name for name in ("gone.npy", "here.npy", "torn.npy")])


def test_empty_list():
    """An empty list is an error."""
    for nothing in ([], (), iter(())):
        with pytest.raises(ShardsNotFoundError, match="empty"):
            open_shards(nothing)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(None, TypeError), (5, TypeError), ("", ValueError), ([""], ValueError), ([None], TypeError)],
    ids=repr,
)
def test_what_is_no_path(bad, error):
    """What is no path is refused with the kinds of path that there are."""
    with pytest.raises(error, match="directory, a glob, a file"):
        open_shards(bad)


def test_null_byte_in_a_path(tmp_path):
    """A path that no system can have is one of our errors."""
    with pytest.raises(LazyShardsError):
        open_shards(f"{tmp_path}/a\0b")


@pytest.mark.parametrize("option", ["order", "holes", "on_change", "engine"])
def test_unknown_policies(tmp_path, option):
    """A policy that does not exist is a ValueError that shows what was given."""
    touch(tmp_path, "a.npy")
    with pytest.raises(ValueError, match=f"{option}='nosuch'"):
        open_shards(tmp_path, **{option: "nosuch"})


def test_storage_options_of_a_local_path(tmp_path):
    """Options for URLs are not silently dropped for a path."""
    touch(tmp_path, "a.npy")
    with pytest.raises(ValueError, match="storage_options"):
        open_shards(tmp_path, storage_options={"anon": True})


# Odd paths --------------------------------------------------------------------------------------------------------

NASTY = "run[1]* ?{b} ü 空 #%20&=+"


def test_glob_characters_in_real_paths(tmp_path, monkeypatch):
    """A path that exists is literal: as a directory, a file, a list, a Path, and relative."""
    whole = np.arange(9)
    paths = write_npy_shards(tmp_path / NASTY, np.split(whole, [3, 5]), pattern="part [{}].npy")
    write_npy_shards(tmp_path / NASTY.replace("[1]*", "1x"), [np.zeros(7)], pattern="part [0].npy")
    assert_same(open_shards(str(tmp_path / NASTY)).compute(), whole)
    assert_same(open_shards(tmp_path / NASTY).compute(), whole)
    assert_same(open_shards(paths).compute(), whole)
    assert_same(open_shards(paths[1]).compute(), whole[3:5])
    monkeypatch.chdir(tmp_path)
    assert_same(open_shards(NASTY).compute(), whole)


def test_pattern_below_a_literal_directory(tmp_path):
    """In a pattern, the directories in front that exist are literal."""
    write_npy_shards(tmp_path / "run[1]", [np.arange(3)])
    write_npy_shards(tmp_path / "run1", [np.zeros(9)])
    assert_same(open_shards(tmp_path / "run[1]" / "*.npy").compute(), np.arange(3))


def test_relative_paths_stay_right(tmp_path, monkeypatch):
    """A dataset that was opened by a relative path reads the same after the working directory changed."""
    write_npy_shards(tmp_path / "set", [np.arange(3)])
    monkeypatch.chdir(tmp_path)
    by_directory, by_list, by_glob = open_shards("set"), open_shards(["set/shard_0000.npy"]), open_shards("s*/*.npy")
    monkeypatch.chdir("/")
    for ds in (by_directory, by_list, by_glob):
        assert_same(ds.compute(), np.arange(3))


def test_home_directory(tmp_path, monkeypatch):
    """A tilde is the home directory."""
    write_npy_shards(tmp_path / "set", [np.arange(3)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_same(open_shards("~/set").compute(), np.arange(3))


def test_names_that_are_not_text(tmp_path):
    """A file name that is no UTF-8 is opened and read."""
    path = os.fsencode(tmp_path) + b"/\xff\xfe.npy"
    with open(path, "wb") as file:  # a Path holds no bytes
        np.save(file, np.arange(3))
    ds = open_shards(tmp_path)
    assert_same(ds.compute(), np.arange(3))
    assert repr(ds)
    assert ds.fingerprint


# Links ------------------------------------------------------------------------------------------------------------


def test_links_are_followed(tmp_path):
    """Links to shards and to directories are followed, and a loop beside the shards does not matter."""
    whole = np.arange(9)
    write_npy_shards(tmp_path / "store", np.split(whole, [3, 5]))
    (tmp_path / "links").mkdir()
    for i in range(3):
        (tmp_path / "links" / f"shard_{i:04d}.npy").symlink_to(f"../store/shard_{i:04d}.npy")
    (tmp_path / "whole").symlink_to("links")
    (tmp_path / "store" / "loop").symlink_to(".")
    for name in ("links", "whole", "store"):
        assert_same(open_shards(tmp_path / name).compute(), whole)


def test_dangling_links_are_told(tmp_path):
    """A link to nothing is an error that names it, never fewer rows."""
    write_npy_shards(tmp_path, [np.arange(3), np.arange(2)])
    (tmp_path / "shard_0002.npy").symlink_to(tmp_path / "nowhere.npy")
    for place in (tmp_path, tmp_path / "*.npy", tmp_path / "shard_0002.npy"):
        with pytest.raises(LazyShardsError, match="shard_0002"):
            open_shards(place)


def test_links_in_a_circle_are_told(tmp_path):
    """A link to itself is an error that names it if it is a shard, and does not matter beside the shards."""
    touch(tmp_path, "shard_0.npy")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert names(tmp_path) == ["shard_0.npy"]
    (tmp_path / "shard_1.npy").symlink_to(tmp_path / "shard_1.npy")
    with pytest.raises(ShardReadError, match="shard_1"):
        open_shards(tmp_path)


# Formats ----------------------------------------------------------------------------------------------------------


def test_unknown_format(tmp_path):
    """A format that does not exist is an error that lists those that do."""
    touch(tmp_path, "a.npy")
    with pytest.raises(FormatError, match=r"'nosuch'.*npy"):
        open_shards(tmp_path, format="nosuch")


class OtherFormat(type(find_format("npy"))):
    """Another format, told from the first by its suffix and first bytes."""

    name = "other"
    suffixes = (".oth",)
    magic = (b"OTHER",)


@pytest.fixture
def _two_formats(monkeypatch):
    other = OtherFormat()
    monkeypatch.setitem(formats._FORMATS, "other", other)
    monkeypatch.setitem(formats._BY_SUFFIX, ".oth", other)


@pytest.mark.usefixtures("_two_formats")
def test_mixed_formats(tmp_path):
    """Shards of two formats in one place are an error that names both; naming one reads its own."""
    touch(tmp_path, "s_0.npy", "s_1.npy", "s_2.oth")
    for place in (tmp_path, tmp_path / "s_*", [tmp_path / name for name in ("s_0.npy", "s_2.oth")]):
        with pytest.raises(FormatError, match=r"(?s)npy.*other|other.*npy"):
            open_shards(place)
    assert names(tmp_path, format="npy") == ["s_0.npy", "s_1.npy"]
    assert names(tmp_path, format="other") == ["s_2.oth"]
    assert names(tmp_path / "*.npy") == ["s_0.npy", "s_1.npy"]


@pytest.mark.usefixtures("_two_formats")
def test_mixed_formats_without_suffixes(tmp_path):
    """Shards of two formats whose names tell nothing are told apart by their first bytes."""
    touch(tmp_path, "part-0", "part-1")
    (tmp_path / "part-1").write_bytes(b"OTHER bytes")
    with pytest.raises(FormatError, match=r"(?s)npy.*other|other.*npy"):
        open_shards(tmp_path)


def test_format_for_another_suffix(tmp_path):
    """With the format given, files of any suffix are read; those of its own suffix alone, if there are any."""
    touch(tmp_path / "bin", "a_0.dat", "a_1.dat")
    assert names(tmp_path / "bin", format="npy") == ["a_0.dat", "a_1.dat"]
    touch(tmp_path / "both", "a_0.npy", "a_1.npy", "log.txt")
    assert names(tmp_path / "both", format="npy") == ["a_0.npy", "a_1.npy"]


def test_files_without_a_suffix(tmp_path):
    """Files whose names tell nothing are told by their first bytes, and none of them is passed over."""
    touch(tmp_path, "part-0", "part-1")
    assert names(tmp_path) == ["part-0", "part-1"]
    (tmp_path / "part-1").write_bytes(b"")
    with pytest.raises(LayoutError, match="part-1"):
        open_shards(tmp_path)


def test_one_file_of_no_format(tmp_path):
    """One file of no known format is an error that names it."""
    (tmp_path / "notes").write_text("no shard")
    with pytest.raises(ShardsNotFoundError, match=r"notes.*pass reader=, a function of your own"):
        open_shards(tmp_path / "notes")
    (tmp_path / "all.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(ShardsNotFoundError, match=r"is an archive: .*zip://\*\.npy::file:///"):
        open_shards(tmp_path / "all.zip")
    with pytest.raises(ValueError, match="names no archive"):
        open_shards("zip://all.zip")


def test_a_list_holds_files(tmp_path):
    """A directory in a list is an error that says what to do with several."""
    touch(tmp_path / "a", "0.npy")
    with pytest.raises(ShardsNotFoundError, match=r"concat\(\)"):
        open_shards([tmp_path / "a"])


def test_a_misspelt_option_is_answered(tmp_path):
    """An option that looks like one of open_shards' own is an error that names that one."""
    write_npy_shards(tmp_path, [np.arange(3)])
    with pytest.raises(TypeError, match=r"no option 'ordr': it takes none of its own; did you mean order=\?"):
        open_shards(tmp_path, ordr="name")
    with pytest.raises(TypeError, match=r"it takes none of its own$"):
        open_shards(tmp_path, x=1)


def test_more_than_ten_faults(tmp_path):
    """Ten faults are spelled out, and the message says what lists the others."""
    write_npy_shards(tmp_path, [np.zeros((2, 3 + (i > 12))) for i in range(25)])
    with pytest.raises(LayoutError, match="and 2 more; `lazyshards verify` lists all"):
        open_shards(tmp_path)


def test_dots_in_paths_are_dropped(tmp_path, monkeypatch):
    """A dot that names the same directory is not shown in paths; two are kept, as they may follow a link."""
    write_npy_shards(tmp_path, [np.arange(3)])
    monkeypatch.chdir(tmp_path)
    for path in (".", "./", f"{tmp_path}/././shard_0000.npy"):
        assert open_shards(path).shards[0].path == f"{tmp_path}/shard_0000.npy"


# Agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "found", "expected"),
    [
        (np.zeros((2, 3), "f8"), "float64", "float32"),
        (np.zeros((2, 3), "i4"), "int32", "float32"),
        (np.zeros((2, 4), "f4"), r"\(4,\)", r"\(3,\)"),
        (np.zeros((2, 3, 1), "f4"), r"\(3, 1\)", r"\(3,\)"),
        (np.zeros(6, "f4"), r"\(\)", r"\(3,\)"),
        (np.zeros((0, 4), "f4"), r"\(4,\)", r"\(3,\)"),
        (np.zeros((2, 4), "i8"), r"int64 and rows of shape \(4,\)", r"float32 and \(3,\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 2])
def test_shards_that_do_not_agree(tmp_path, odd, found, expected, at):
    """A shard of another dtype or row shape is named with what it has and what most have, wherever it stands."""
    arrays = [np.zeros((n, 3), "f4") for n in (3, 2, 1)]
    arrays.insert(at, odd)
    write_npy_shards(tmp_path, arrays)
    with pytest.raises(LayoutError, match=rf"(?s)shard_000{at}.*{found}.*{expected}"):
        open_shards(tmp_path)


def test_byte_order_is_no_disagreement(tmp_path):
    """Shards that differ in byte order only are one dataset."""
    whole = np.arange(9, dtype="f4")
    arrays = [part.astype(order + "f4") for part, order in zip(np.split(whole, [3, 5]), "<><", strict=True)]
    assert_same(open_shards(write_npy_shards(tmp_path, arrays)).compute(), whole)


def test_opening_again_sees_what_is_there(tmp_path):
    """Nothing is remembered between two openings: rewritten, added and removed shards are seen."""
    paths = write_npy_shards(tmp_path, [np.arange(3), np.arange(2)])
    assert len(open_shards(tmp_path)) == 5
    np.save(paths[1], np.arange(100, 102))
    assert_same(open_shards(tmp_path).compute(), np.array([0, 1, 2, 100, 101]))
    np.save(tmp_path / "shard_0002.npy", np.arange(4))
    assert len(open_shards(tmp_path)) == 9
    Path(paths[0]).unlink()
    assert len(open_shards(tmp_path)) == 6


def test_more_rows_than_can_be_numbered(tmp_path):
    """Shards of so many empty rows that their numbers do not fit 64 bits are an error, not negative lengths."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976, 0), }".ljust(117) + b"\n"
    for i in range(9):
        (tmp_path / f"s{i}.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header)
    with pytest.raises(LayoutError, match=r"2\*\*63"):
        open_shards(tmp_path)
