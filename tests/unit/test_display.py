import re
import time
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import lazyshards
from lazyshards import display, open_shards
from lazyshards.display import picture, shards
from lazyshards.layout import Layout
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage
from lazyshards.testing import write_npy_shards

SIZES = (900, 0, 1_500, 300, 1_200, 800, 1_000, 700, 1_300, 600, 1_100, 600)


def layout_of(sizes, *, root="/data/", names=None, row_shape=(4, 3), dtype="f4"):
    """Return a layout whose files do not exist: whoever reads one fails."""
    count = len(sizes)
    return Layout(
        format="npy",
        storage=LocalStorage(),
        row_shape=row_shape,
        dtype=np.dtype(dtype),
        root=root,
        names=names or [f"shard_{i}.npy" for i in range(count)],
        ends=np.cumsum(np.array(sizes, np.int64)),
        stamps=np.full((count, 3), 2_048, np.int64),
        offsets=np.full(count, 128, np.int64),
    )


LAYOUT = layout_of(SIZES)
WHOLE = select_all(LAYOUT.rows, LAYOUT.row_shape)


def text_of(index, layout=LAYOUT):
    """Return the text of what an index selects."""
    return display.dataset_text(layout, select(select_all(layout.rows, layout.row_shape), index), "numpy")


def html_of(index, layout=LAYOUT):
    """Return the HTML of what an index selects."""
    return display.dataset_html(layout, select(select_all(layout.rows, layout.row_shape), index), "numpy")


def rectangles(html):
    """Return (x, width, fill) of every rectangle; the HTML must be well-formed for it."""
    root = ET.fromstring(html)  # noqa: S314 (our own text)
    return [(float(r.get("x")), float(r.get("width")), r.get("fill")) for r in root.findall(".//{*}rect")]


def test_first_line_says_what_it_is():
    """The first line gives shape, dtype, size, shards and engine."""
    line = text_of(slice(1_000, 5_000)).splitlines()[0]
    assert line == "<ShardedDataset (4000, 4, 3) float32, 187.5 KiB, 12 npy shards, engine numpy>"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (slice(None), "all 10,000 rows"),
        (slice(1_000, 5_000), "rows 1,000 to 5,000 of 10,000 (in 5 of 12 shards)"),
        (slice(5_000, 10, -7), "rows 16 to 5,001 of 10,000, every 7th, backwards (in 6 of 12 shards)"),
        (slice(None, None, 2), "rows 0 to 9,999 of 10,000, every 2nd (in 11 of 12 shards)"),
        (slice(None, None, 11), "rows 0 to 10,000 of 10,000, every 11th (in 11 of 12 shards)"),
        (slice(None, None, -1), "rows 0 to 10,000 of 10,000, backwards (in 11 of 12 shards)"),
        (slice(5, 5), "no rows of 10,000 (in 0 of 12 shards)"),
        (3, "row 3 of 10,000, its axis dropped (in 1 of 12 shards)"),
        (-1, "row 9,999 of 10,000, its axis dropped (in 1 of 12 shards)"),
        ([1, 9_000, 1, 2], "4 rows by index, between 1 and 9,000 of 10,000 (in 2 of 12 shards)"),
        ((slice(None), 1), "all 10,000 rows; axis 1 at 1 of 4, dropped"),
        ((..., slice(0, 2)), "all 10,000 rows; axis 2: 0 to 2 of 3"),
        ((..., slice(0, 0)), "all 10,000 rows; axis 2: none of 3"),
        ((0, 3, slice(None, None, -1)), "axis 1 at 3 of 4, dropped; axis 2: 0 to 3 of 3, backwards"),
    ],
)
def test_selection_is_said_in_words(index, words):
    """What is selected of what is said in words, in text and in HTML."""
    assert words in text_of(index)
    assert words in html_of(index)


def test_table_gives_rows_global_rows_and_size():
    """A line of the table holds the shard's name, rows, global rows and file size, and the rows wanted of it."""
    lines = [line.split() for line in text_of(slice(1_000, 5_000)).splitlines()[3:]]
    assert lines[0] == ["shard", "rows", "global", "rows", "file", "size", "wanted"]
    assert lines[1] == ["shard_2.npy", "1,500", "900", "to", "2,400", "2.0", "KiB", "1,400"]
    assert [int(line[-1].replace(",", "")) for line in lines[2:]] == [300, 1_200, 800, 300]


@pytest.mark.parametrize(
    "index", [slice(None), slice(None, None, 7), slice(9_000, 100, -3), [5, 1, 9_999, 1], slice(950, 1_000)]
)
def test_wanted_rows_add_up(index):
    """The rows wanted of the shards touched are all rows of the selection."""
    layout = layout_of((100, 0, 850, 9_050))
    selection = select(select_all(layout.rows, layout.row_shape), index)
    numbers, known = shards.touched(layout, selection.rows)
    wanted = [shards.wanted_rows(selection.rows, *layout.start_stop(int(i))) for i in numbers]
    assert known
    assert sum(wanted) == len(selection.rows)
    assert all(wanted)


def test_table_is_short():
    """A table of many shards has eight lines, with dots in the middle that count those left out."""
    lines = text_of(slice(None)).splitlines()[4:]
    assert len(lines) == 8
    assert lines[4].strip() == "… 5 more …"
    assert lines[-1].split()[0] == "shard_11.npy"


def test_million_shards_are_quick_and_short():
    """Text and HTML of 1,000,000 shards are bounded in size, and made without a walk over the shards."""
    count = 1_000_000
    names = [f"shard_{i:07}.npy" for i in range(count)]
    layout = layout_of(np.full(count, 1_000), names=names)
    everything = select_all(layout.rows, layout.row_shape)
    random = np.random.default_rng(0).integers(0, layout.rows, 300_000)
    for index in (slice(None), slice(10**6, 10**9, 7), random, random[:1_000]):
        selection = select(everything, index)
        start = time.perf_counter()
        text = display.dataset_text(layout, selection, "numpy")
        html = display.dataset_html(layout, selection, "numpy", 1_000_000)
        # A walk in Python takes a hundred times as long: this tells one from none, not fast from slow.
        assert time.perf_counter() - start < 10
        assert len(text) < 2_000
        assert len(html) < 60_000
        assert len(rectangles(html)) <= 2 * picture.MOST_GROUPS + picture.MOST_BINS


def test_lanes_are_to_scale():
    """Each shard's rectangle is as wide as it has rows, empty ones have none, and the mark lies where the rows do."""
    bars = rectangles(html_of(slice(1_000, 5_000)))
    grey = [bar for bar in bars if bar[2] == "currentColor"]
    marks = [bar for bar in bars if bar[2] != "currentColor"]
    assert [width + 1 for _, width, _ in grey] == pytest.approx([rows * 0.0608 for rows in SIZES if rows], abs=0.02)
    assert marks == [(112 + 60.8, 243.2, picture.MARK)]


@pytest.mark.parametrize(("tile_rows", "widths"), [(1_000, [152] * 4), (1_500, [228, 228, 152]), (9_000, [608])])
def test_tiles_are_to_scale_of_the_result(tile_rows, widths):
    """The tiles fill the lane of the result, each as wide as it has rows; the last may be narrower."""
    html = display.dataset_html(LAYOUT, select(WHOLE, slice(5_000, 1_000, -1)), "numpy", tile_rows)
    tiles = rectangles(html)[-len(widths) :]
    assert [width + 1 for _, width, _ in tiles] == pytest.approx(widths)
    assert f">{len(widths)} tile{'s' * (len(widths) > 1)}</text>" in html


def test_tiles_wait_for_their_engine(opened, monkeypatch):
    """A repr starts no engine: before, the tiles are left out; those of an engine that runs are those of the plan."""
    ds, _ = opened((30_000, 0, 50_000), row_shape=(8,))
    assert f">{ds.plan().tile_count} tile" in ds._repr_html_()
    monkeypatch.setattr("lazyshards.dataset.running_engine", lambda name: None)
    assert " tile" not in ds._repr_html_()


@pytest.mark.parametrize("index", [[0, 9_999], slice(0, None, 9_999), 9_999])
def test_single_rows_are_seen(index):
    """A single wanted row is still marked, inside the bar, where it lies."""
    marks = [bar for bar in rectangles(html_of(index)) if bar[2] != "currentColor"]
    assert all(width >= 1 and 112 <= x <= 719 for x, width, _ in marks)
    assert max(x for x, _, _ in marks) > 716


def test_html_escapes_names():
    """Names from the disk cannot become markup."""
    evil = "<script>alert('1')</script>&.npy"
    html = html_of(slice(None), layout_of((5, 5), names=[evil, "b.npy"]))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    ET.fromstring(html)  # noqa: S314


def test_html_has_no_colour_but_the_mark():
    """Text and shards take the colour of the notebook's theme, so that they are seen on light and on dark."""
    html = html_of(slice(1_000, 5_000))
    assert set(re.findall(r"#[0-9a-fA-F]{3,6}\b", html)) == {picture.MARK}
    assert "currentColor" in html


def test_odd_names_are_printable():
    """Line feeds, escape codes and bytes that are no text are shown as escapes, on one line."""
    text = text_of(slice(None), layout_of((1, 1), names=["a\n\x1b[31mb.npy", "c\udcff.npy"]))
    assert "a\\n\\x1b[31mb.npy" in text
    assert "c\\udcff.npy" in text
    text.encode()


def test_long_names_are_cut():
    """A long name is cut in the middle, so that the table keeps its width."""
    text = text_of(slice(None), layout_of((1, 1), names=["x" * 200 + "_0.npy", "x" * 200 + "_1.npy"]))
    assert max(map(len, text.splitlines())) < 120
    assert "_1.npy" in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/set/a.npy", "s3://bucket/set/a.npy"),
        ("s3://key:secret@bucket/a.npy", "s3://***@bucket/a.npy"),
        ("s3://key:sec/ret@bucket/a.npy", "s3://***@bucket/a.npy"),
        ("https://user@host:8080/a.npy", "https://***@host:8080/a.npy"),
        ("https://host:8080/me@home/a.npy", "https://host:8080/me@home/a.npy"),
        ("https://host/a.npy?X-Amz-Signature=secret&b=/c", "https://host/a.npy?***"),
        ("simplecache::https://u:secret@host/a.npy", "simplecache::https://***@host/a.npy"),
        ("'s3://k:secret@b/x' vanished", "'s3://***@b/x' vanished"),
        ("/data/what?/me@home.npy", "/data/what?/me@home.npy"),
    ],
)
def test_secrets_are_hidden(url, shown):
    """User, password and query of a URL are replaced; the rest, and every path of this machine, stays."""
    assert display.hide_secrets(url) == shown


def test_reprs_hide_secrets():
    """No repr of a dataset on a URL, nor of an engine's trouble with one, shows what stands in it."""
    roots = ["s3://key:secret@bucket/set/", "https://host/secret-free/"]
    names = [["a.npy", "b.npy"], ["a.npy?token=secret/1", "a.npy?token=secret/2"]]
    for root, both in zip(roots, names, strict=True):
        layout = layout_of((5, 5), root=root, names=both)
        selection = select_all(10, (4, 3))
        trouble = "legate (https://u:secret@host/x?secret failed)"
        for show in (display.dataset_text, display.dataset_html):
            shown = show(layout, selection, trouble).replace("secret-free", "")
            assert "secret" not in shown
            assert "a.npy" in shown


def test_plan_text_holds_the_numbers():
    """Each number of the plan stands in its text, for a person, aligned."""
    capacity = Capacity(workers=2, result_nbytes=1 << 30)
    plan = compile_plan(LAYOUT, select(WHOLE, slice(1_000, 5_000)), capacity, tiles_per_processor=2)
    lines = display.plan_text(plan, "legate", capacity, len(LAYOUT)).splitlines()
    facts = {line[:16].strip(): line[16:] for line in lines}
    assert facts == {
        "engine": "legate, 2 processors",
        "result": "(4000, 4, 3) float32",
        "shards touched": "5 of 12",
        "tiles": "4",
        "rows a tile": "1,000",
        "bytes wanted": "192,000  (187.5 KiB)",
        "bytes read": "192,000  (187.5 KiB)",
        "amplification": "1.00 bytes read for each byte wanted, as stored",
        "requests": f"{plan.requests:,}",
        "busiest": "93.8 KiB in 4 requests, 1.00 times the mean",
        "peak memory": "187.5 KiB  (result 187.5 KiB, scratch 0 B, of 1.0 GiB free)",
        "stages": "read     plain bytes by positional reads straight into the result",
    }


def test_plan_of_nothing_has_text():
    """A plan without rows says so in numbers."""
    capacity = Capacity(workers=2)
    text = display.plan_text(compile_plan(LAYOUT, select(WHOLE, slice(0, 0)), capacity), "numpy", capacity)
    assert re.search(r"tiles +0\n", text)
    assert "peak memory     0 B" in text


def test_reprs_of_no_rows():
    """A dataset of empty shards has its reprs, without a bar."""
    layout = layout_of((0, 0))
    assert "all 0 rows" in text_of(slice(None), layout)
    assert "<svg" not in html_of(slice(None), layout)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1_023, "1,023 B"),
        (1_024, "1.0 KiB"),
        (1_024_100, "1.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 60, "1.0 EiB"),
    ],
)
def test_size_text(nbytes, text):
    """Sizes are given in the binary unit that keeps them short."""
    assert display.size_text(nbytes) == text


def test_explain_prints_the_plan(tmp_path, monkeypatch, capsys):
    """explain() prints the plan of the dataset's own engine and how many of its shards are touched."""
    for i in range(3):
        np.save(tmp_path / f"s{i}.npy", np.zeros((10, 2)))
    lazyshards.open_shards(tmp_path, engine="numpy")[5:15].explain()
    assert "shards touched  2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "show",
    [
        lambda ds: np.sqrt((ds[:, ::2] - np.arange(2)) / np.linspace(1, 2, 2)).clip(0, 9).astype("f4", "unsafe"),
        lambda ds: ds[::-7, 1:3].persist(),
        lambda ds: ds.block_plan(),
        lambda ds: ds.plan(),
        lambda ds: ds.profile(limit=True),
        lambda ds: ds.stats(),
        lambda ds: ds.batches(3, shuffle=True, seed=0),
        lambda ds: ds.batches(3, shuffle=True, seed=0).quality(),
    ],
)
def test_texts_fit_terminals(tmp_path, show):
    """What is shown as text is at most 100 columns wide."""
    write_npy_shards(tmp_path / "set", np.split(np.arange(400.0).reshape(100, 4), [30]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        shown = repr(show(open_shards("set", engine="numpy")))
    lines = [line for line in shown.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 100, shown


def test_quality_shows_a_table(tmp_path):
    """The quality of an order is a line for each number, as text and as HTML."""
    write_npy_shards(tmp_path / "set", [np.arange(400.0).reshape(100, 4)])
    quality = open_shards(tmp_path / "set", engine="numpy").batches(3).quality()
    assert repr(quality).splitlines()[:2] == ["<ShuffleQuality, by 32 batches>", "  rank correlation  +1.000"]
    assert "<th" in quality._repr_html_()
    assert "+1.000" in quality._repr_html_()
