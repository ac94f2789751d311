"""What is shown in a notebook, in a real browser: measured, photographed, and looked at as pixels.

``LAZYSHARDS_SCREENSHOTS=folder`` keeps the pictures, to be looked at by a person.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from lazyshards import display, open_shards, zip_shards
from lazyshards.layout import Layout
from lazyshards.plan import Capacity, compile_plan
from lazyshards.selection import select, select_all
from lazyshards.storage import LocalStorage
from lazyshards.testing import write_npy_shards

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"),
    pytest.mark.slow,
    pytest.mark.usefixtures("on_numpy"),
]

THEMES = {
    "light": ("white", "rgba(0, 0, 0, 0.87)", "#f5f5f5"),
    "dark": ("#111", "rgba(255, 255, 255, 1)", "#212121"),
}
"""Ground, text, and ground of even lines of tables, as JupyterLab's themes have them."""

PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: {ground} }}
.out {{ color: {text}; font: 14px/1.6 system-ui, sans-serif; padding: 5px 8px; box-sizing: border-box;
  width: {width}px; border-bottom: 1px solid #8888 }}
/* What JupyterLab does to the tables and pictures of an output. */
.out table {{ border-collapse: collapse; border-spacing: 0; border: none; color: {text}; font-size: 13px;
  table-layout: fixed; margin-left: auto; margin-bottom: 1em; margin-right: auto }}
.out td, .out th, .out tr {{ vertical-align: middle; padding: 0.5em; line-height: normal; white-space: normal;
  max-width: none; border: none; text-align: right }}
.out th {{ font-weight: bold }}
.out tbody tr:nth-child(odd) {{ background: {ground} }}
.out tbody tr:nth-child(even) {{ background: {even} }}
.out svg {{ max-width: 100%; height: auto }}
</style>{outputs}<pre id="measured"></pre><script>
document.querySelectorAll("details").forEach(each => each.open = true)
const box = each => {{
  const found = each.getBoundingClientRect()
  return [found.left, found.top + scrollY, found.right, found.bottom + scrollY]
}}
const measured = [...document.querySelectorAll(".out")].map(out => ({{
  name: out.id, box: box(out), overflow: out.scrollWidth - out.clientWidth, panel: box(out.firstElementChild),
  cells: [...out.querySelectorAll("td, th, summary")].map(box),
  scrolled: [...out.querySelectorAll("div")].map(each => each.scrollWidth - each.clientWidth),
  tags: [...new Set([...out.querySelectorAll("*")].map(each => each.tagName.toLowerCase()))],
  pictures: [...out.querySelectorAll("svg")].map(picture => ({{
    box: box(picture), texts: [...picture.querySelectorAll("text")].map(box),
    shapes: [...picture.querySelectorAll("rect, polygon")].map(box),
  }})),
}}))
document.querySelector("#measured").textContent = JSON.stringify(measured)
document.querySelector("#measured").style.display = "none"
</script>"""

HOSTILE = "<script>document.body.innerHTML=''</script>&\"'" + "long" * 40 + ".npy"


def layout_of(sizes, *, root="/data/set/", names=None, row_shape=(4, 3), dtype="f4"):
    """Return a layout whose files do not exist."""
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


def dataset(layout, index, tile_rows=None):
    """Return the HTML of what an index selects."""
    selection = select(select_all(layout.rows, layout.row_shape), index)
    return display.dataset_html(layout, selection, "numpy", tile_rows)


def plan(layout, index, workers=4, **more):
    """Return a plan of what an index selects."""
    return compile_plan(layout, select(select_all(layout.rows, layout.row_shape), index), Capacity(workers), **more)


def outputs(folder):
    """Return the HTML of all that there is to see, by name."""
    some = layout_of((900, 0, 1_500, 300, 1_200, 800, 1_000, 700, 1_300, 600, 1_100, 600))
    million = layout_of(np.full(1_000_000, 1_000), names=[f"shard_{i:07}.npy" for i in range(1_000_000)])
    hostile = layout_of((50, 0, 70), names=[HOSTILE, "b.npy", "x" * 200], root="https://key:secret@host/set/")
    random = np.random.default_rng(0).integers(0, some.rows, 3_000)
    write_npy_shards(folder / "x", np.split(np.zeros((60_000, 64), "f4"), [9_000, 9_000, 40_000]))
    write_npy_shards(folder / "y", np.split(np.zeros(60_000, "i8"), [30_000]))
    x, y = open_shards(folder / "x"), open_shards(folder / "y")
    return {
        "all": dataset(some, slice(None), 2_500),
        "slice": dataset(some, (slice(1_000, 5_000), slice(1, 3)), 500),
        "backwards": dataset(some, slice(9_000, 100, -7), 200),
        "sparse": dataset(some, slice(5, None, 900), 4),
        "gather": dataset(some, random, 750),
        "mask": dataset(some, np.arange(some.rows) % 5_000 < 40, 40),
        "one row": dataset(some, -1, 1),
        "no rows": dataset(some, slice(0, 0), 1),
        "engine not started": dataset(some, slice(10, 20)),
        "empty shards": dataset(layout_of((0, 0)), slice(None), 1),
        "million": dataset(million, slice(10**6, 10**9 - 5, 7), 10**6),
        "million, few rows": dataset(million, slice(5 * 10**8, 5 * 10**8 + 10), 5),
        "hostile": dataset(hostile, slice(3, 90), 20),
        "plan": plan(some, slice(1_000, 5_000))._repr_html_(),
        "plan of many tiles": plan(some, slice(None), tiles_per_processor=25)._repr_html_(),
        "plan of a gather": plan(some, random, tiles_per_processor=2)._repr_html_(),
        "plan of a column": plan(some, (slice(None, None, -3), 2, slice(0, 1)))._repr_html_(),
        "plan of a million": plan(million, slice(3, None))._repr_html_(),
        "plan of nothing": plan(some, slice(0, 0))._repr_html_(),
        "plan of a picture": plan(some, slice(7, None, 2)).to_svg(),
        "bundle": zip_shards(x=x, labels=y)[100:50_000]._repr_html_(),
        "quality": x.batches(500, shuffle="blocks", seed=0).quality()._repr_html_(),
        "statistics": (x[:, :30] + np.arange(30)).stats()._repr_html_(),
        "persisted": x[3:50].persist()._repr_html_(),
        "mapped": np.sqrt((x[:, ::2] - np.arange(32)) / np.linspace(1, 2, 32)).clip(0, 9)._repr_html_(),
        "profile": x.profile(limit=True)._repr_html_(),
        "profile of a map": x.map(lambda rows: rows * 2)[5::3].profile()._repr_html_(),
    }


def browse(*arguments):
    """Run the browser to its end and return what it printed."""
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[("light", 900), ("dark", 900), ("light", 420)], ids=str)
def seen(request, tmp_path_factory):
    """Give what is on the page of one theme and width: where everything lies, and its pixels."""
    theme, width = request.param
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAZYSHARDS_ENGINE", "numpy")
        shown = outputs(folder)
    ground, text, even = THEMES[theme]
    parts = "".join([f'<div class="out" id="{name}">{html}</div>' for name, html in shown.items()])
    page = folder / "page.html"
    page.write_text(PAGE.format(ground=ground, text=text, even=even, width=width, outputs=parts), encoding="utf-8")
    dom = browse(f"--window-size={width},1000", "--dump-dom", page.as_uri())
    measured = json.loads(unescape(re.search(r'<pre id="measured"[^>]*>(.*?)</pre>', dom, re.DOTALL)[1]))
    height = int(measured[-1]["box"][3]) + 20
    shot = folder / "page.png"
    browse(f"--window-size={width},{height}", f"--screenshot={shot}", page.as_uri())
    if keep := os.environ.get("LAZYSHARDS_SCREENSHOTS"):
        shutil.copy(shot, Path(keep) / f"{theme}_{width}.png")
    import matplotlib.image as mpimg

    pixels = mpimg.imread(shot)[..., :3]
    assert {each["name"] for each in measured} == set(shown)
    return {each["name"]: each for each in measured}, pixels, width


def test_nothing_is_wider_than_its_cell(seen):
    """Every output fits the notebook's cell and 720 pixels, and so does every line of it, narrow cells included."""
    for name, each in seen[0].items():
        assert each["overflow"] <= 0, name
        assert each["panel"][2] - each["panel"][0] <= 720.5, name
        for picture in each["pictures"]:
            assert picture["box"][2] <= each["panel"][2] + 0.5, name
    for name, each in seen[0].items():
        if seen[2] == 900 and name != "hostile":
            assert max(each["scrolled"], default=0) <= 0, f"{name}: a table is wider than 720 pixels"


def test_pictures_hold_what_they_draw(seen):
    """No shape and no text of a picture lies outside it, and no two texts lie on one another."""
    for name, each in seen[0].items():
        for picture in each["pictures"]:
            left, top, right, bottom = picture["box"]
            for a, b, c, d in picture["shapes"] + picture["texts"]:
                assert left - 1 <= a <= c <= right + 1, name
                assert top - 2 <= b <= d <= bottom + 2, name
            texts = picture["texts"]
            for i, (a, b, c, d) in enumerate(texts):
                for e, f, g, h in texts[i + 1 :]:
                    assert c <= e + 1 or g <= a + 1 or d <= f + 4 or h <= b + 4, name


def test_cells_do_not_overlap(seen):
    """No cell of a table lies on another."""
    for name, each in seen[0].items():
        cells = each["cells"]
        for i, (a, b, c, d) in enumerate(cells):
            for e, f, g, h in cells[i + 1 :]:
                assert c <= e + 1 or g <= a + 1 or d <= f + 1 or h <= b + 1, name


def test_pictures_are_seen(seen):
    """Each picture has its mark's colour and shapes that stand out from the ground, in the light and the dark."""
    measured, pixels, _ = seen
    ground = pixels[-1, -1]
    for name, each in measured.items():
        for picture in each["pictures"]:
            left, top, right, bottom = (round(edge) for edge in picture["box"])
            part = pixels[top:bottom, left:right]
            assert np.abs(part - ground).max(axis=2).max() > 0.2, name
            orange = (part[..., 0] - part[..., 2]) > 0.25
            assert orange.any() == (name not in {"no rows", "plan of nothing"}), name


def test_texts_are_readable(seen):
    """Each output has pixels that contrast with the ground as text must."""
    measured, pixels, _ = seen
    ground = pixels[-1, -1].mean()
    for name, each in measured.items():
        left, top, right, bottom = (round(edge) for edge in each["box"])
        grey = pixels[top : bottom - 2, left:right].mean(axis=2)
        # The document's grey is in the middle, to be read on both grounds.
        assert np.abs(grey - ground).max() > (0.4 if name == "plan of a picture" else 0.6), name


def test_names_stay_text(seen):
    """A name that looks like markup is shown, not run; what stands in a URL before the host is hidden."""
    measured, _, _ = seen
    assert "script" not in {tag for each in measured.values() for tag in each["tags"]}
    assert set(measured["hostile"]["tags"]) <= {
        *("div", "table", "tbody", "tr", "th", "td", "details", "summary"),
        *("svg", "rect", "polygon", "text", "title"),
    }


def test_a_lane_is_to_scale(seen):
    """On the screen, too, each shard is as wide as it has rows, and the selection lies where its rows do."""
    measured, _, _ = seen
    (picture,) = measured["slice"]["pictures"]
    scale = (picture["box"][2] - picture["box"][0]) / 720
    shapes = picture["shapes"]
    shards, selected = shapes[:11], shapes[11]
    widths = [(right - left) / scale + 1 for left, _, right, _ in shards]
    sizes = [900, 1_500, 300, 1_200, 800, 1_000, 700, 1_300, 600, 1_100, 600]
    assert widths == pytest.approx([rows * 608 / 10_000 for rows in sizes], abs=0.2)
    left = (selected[0] - picture["box"][0]) / scale
    assert left == pytest.approx(112 + 1_000 * 608 / 10_000, abs=0.2)
    assert (selected[2] - selected[0]) / scale == pytest.approx(4_000 * 608 / 10_000, abs=0.2)
