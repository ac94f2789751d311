import re
import time
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import lazyshards
from lazyshards.display import picture
from lazyshards.layout import Layout
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage

SIZES = (900, 0, 1_500, 300, 1_200, 800, 1_000, 700, 1_300, 600, 1_100, 600)


def layout_of(sizes, *, names=None, row_shape=(4, 3)):
    """Return a layout whose files do not exist: whoever reads one fails."""
    count = len(sizes)
    return Layout(
        format="npy",
        storage=LocalStorage(),
        row_shape=row_shape,
        dtype=np.dtype("f4"),
        root="/data/",
        names=names or [f"shard_{i}.npy" for i in range(count)],
        ends=np.cumsum(np.array(sizes, np.int64)),
        stamps=np.full((count, 3), 2_048, np.int64),
        offsets=np.full(count, 128, np.int64),
    )


def plan_of(index, layout=None, tiles=4):
    """Return a plan of so many tiles for one processor."""
    layout = layout or layout_of(SIZES)
    selection = select(select_all(layout.rows, layout.row_shape), index)
    return compile_plan(layout, selection, Capacity(1), tiles_per_processor=tiles)


def shapes(svg):
    """Return the texts, and (x, y, width, fill) of the rectangles, of a picture, which must be well-formed."""
    root = ET.fromstring(svg)  # noqa: S314 (our own text)
    texts = [text.text for text in root.findall(".//{*}text")]
    rects = [
        (float(r.get("x")), float(r.get("y")), float(r.get("width")), r.get("fill")) for r in root.findall(".//{*}rect")
    ]
    return texts, rects


def test_picture_is_a_document():
    """to_svg() gives a document with its size and a description, in a colour that reads on light and dark."""
    svg = plan_of(slice(1_000, 5_000)).to_svg()
    root = ET.fromstring(svg)  # noqa: S314 (our own text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (root.get("width"), root.get("viewBox")) == ("720", "0 0 720 112")
    assert root.get("aria-label").startswith("4 tiles of 5 shards; wanted 187.5 KiB")
    assert "color:#7f7f7f" in root.get("style")


def test_picture_gives_each_tile_its_rows_bytes_and_requests():
    """Each tile has a line: its rows to the scale of the shards, the bytes and requests that it reads."""
    plan = plan_of(slice(1_000, 5_000))
    texts, rects = shapes(plan.to_svg())
    marks = [(x, y, width) for x, y, width, fill in rects if fill == picture.MARK and x < 480]
    scale = 378 / 4_800  # the grid over the rows of the five shards touched
    assert [x for x, _, _ in marks] == pytest.approx([92 + (100 + 1_000 * i) * scale for i in range(4)], abs=0.01)
    assert [width for _, _, width in marks] == pytest.approx([1_000 * scale] * 4, abs=0.01)
    assert len({y for _, y, _ in marks}) == 4
    requests = [str(reads[0]) for reads in plan.tile_reads]
    assert texts[4:-1] == [text for i in range(4) for text in (str(i), "46.9 KiB", requests[i])]
    bars = [width for x, _, width, _ in rects if x == 480]
    assert bars == [92.0] * 4


def test_picture_is_honest_about_amplification():
    """A column of each third row reads far more than is wanted, and picture, text and property say how much."""
    plan = plan_of((slice(None, None, 3), 2, slice(0, 1)), tiles=1)
    assert plan.read_amplification == pytest.approx(plan.bytes_read / plan.nbytes)
    assert plan.read_amplification > 30
    assert f"{plan.read_amplification:.2f} bytes for each one wanted" in plan.to_svg()


@pytest.mark.parametrize(
    ("index", "tiles"),
    [(slice(None), 500), (slice(None, None, -7), 40), (np.arange(10_000)[::-1].copy(), 100), (5, 1), ([9_999, 0], 2)],
)
def test_picture_is_bounded(index, tiles):
    """However many tiles there are, the picture has sixteen lines, each within its grid; its sums are the plan's."""
    plan = plan_of(index, tiles=tiles)
    texts, rects = shapes(plan.to_svg())
    lines = min(16, plan.tile_count)
    assert len([1 for x, *_ in rects if x == 480]) == lines
    assert all(x >= 92 and x + width <= 470.5 for x, _, width, _ in rects if x < 480)
    assert all(width >= 1 for x, _, width, _ in rects if x < 480)
    requests = [int(text.replace(",", "")) for text in texts[6:-1:3]]
    assert sum(requests) == plan.requests
    assert len(plan.to_svg()) < 200_000


def test_picture_of_nothing():
    """A plan without rows has a picture and HTML that say so."""
    for index in (slice(5, 5), (slice(None), slice(0, 0))):
        plan = plan_of(index)
        assert "nothing is read" in plan.to_svg()
        assert "nothing is read" in plan._repr_html_()


def test_html_holds_the_numbers():
    """The HTML has what the text has: shards, tiles, bytes, amplification, requests, stages; and the picture."""
    plan = plan_of(slice(1_000, 5_000, 2))
    root = ET.fromstring(plan._repr_html_())  # noqa: S314 (our own text)
    keys = ["".join(cell.itertext()) for cell in root.iter("th")]
    values = ["".join(cell.itertext()) for cell in root.iter("td")]
    facts = dict(zip(keys, values, strict=True))
    assert facts["shards touched"] == "5"
    assert facts["tiles"] == "4"
    assert facts["bytes read"].startswith(f"{plan.bytes_read:,}  (")
    assert facts["amplification"].startswith("2.00 bytes")
    assert facts["requests"] == f"{plan.requests:,}"
    assert facts["read"] == "plain bytes by positional reads through blocks"
    assert root.find(".//{*}svg") is not None


def test_million_shards_are_quick_and_short():
    """A plan of 1,000,000 shards is shown without counting all of its reads, and says so."""
    count = 1_000_000
    layout = layout_of(np.full(count, 1_000), names=[f"shard_{i:07}.npy" for i in range(count)])
    plan = plan_of(slice(3, None), layout, tiles=1_000)
    start = time.perf_counter()
    html = plan._repr_html_()
    # Counting takes a hundred times as long: this tells one from none, not fast from slow.
    assert time.perf_counter() - start < 5
    assert "not counted for so many reads" in html
    assert "tile_reads" not in vars(plan)
    assert len(html) < 60_000
    assert re.search(r">1\.00 M shards, 1\.00 G rows<", html)


def test_names_cannot_become_markup():
    """Names of shards in a picture are text."""
    plan = plan_of(slice(None), layout_of((5, 5), names=["<script>x</script>.npy", '"&.npy']))
    for text in (plan.to_svg(), plan._repr_html_()):
        assert "<script" not in text
        assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("view", "stages"),
    [
        (lambda ds: ds, ["read: plain bytes by positional reads straight into the result"]),
        (lambda ds: ds[::2], ["read: plain bytes by positional reads through blocks"]),
        (lambda ds: ds[:, 1], ["read: plain bytes by positional reads through blocks"]),
        (
            lambda ds: ds.astype("f8"),
            ["read: plain bytes by positional reads through blocks", "convert: float32 to float64"],
        ),
        (
            lambda ds: ds.map(abs).astype("f8"),
            [
                "read: plain bytes by positional reads straight into the result",
                "map: builtins.abs, on blocks of up to 60 rows",
                "convert: float32 to float64",
            ],
        ),
        (lambda ds: ds[:0], []),
    ],
)
def test_stages_are_said_in_order(opened, view, stages):
    """The stages of a plan are what its leaves do, in order; a profile finds the same names at work."""
    part = view(opened((40, 0, 20))[0])
    plan = part.plan()
    assert [f"{name}: {text}" for name, text in plan.stages] == stages
    done = [each.name for each in part.profile().work if each.name not in {"other", "convert"}]
    assert done == [name for name, _ in plan.stages if name != "convert"]


def test_stages_of_other_sources(tmp_path):
    """Columns are transposed, encoded shards decoded, foreign bytes swapped: the stages say so."""
    np.save(tmp_path / "a.npy", np.asfortranarray(np.zeros((30, 3))))
    assert [name for name, _ in lazyshards.open_shards(tmp_path / "a.npy", engine="numpy").plan().stages] == [
        "read",
        "convert",
    ]
    np.save(tmp_path / "b.npy", np.zeros((30, 3), ">f4"))
    swapped = lazyshards.open_shards(tmp_path / "b.npy", engine="numpy").plan().stages
    assert swapped[-1] == ("convert", "bytes swapped to this machine's order")
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros((30, 3)))
    assert ("decode", "by npz") in lazyshards.open_shards(tmp_path / "c.npz", engine="numpy").plan().stages


def test_amplification_counts_stored_bytes(opened):
    """A cast does not count as reading less, and a row that is wanted twice is read once."""
    ds, _ = opened((40, 25))
    assert ds.astype("f8").plan().read_amplification == 1
    assert ds.map(lambda rows: rows[:, :1], row_shape=(1,)).plan().read_amplification == 1
    assert ds[[3] * 30].plan().read_amplification == pytest.approx(1 / 30)
    assert ds[:0].plan().read_amplification == 1
