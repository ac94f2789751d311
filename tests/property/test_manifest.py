import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyshards import manifest, open_shards
from lazyshards.layout import Decoded, Extent, Extents, Layout, Names, Packed, Planes, Shard
from lazyshards.storage import LocalStorage, Stamp
from lazyshards.testing import example_array

COUNTS = st.integers(0, 1 << 40)
PARTS = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda part: part not in {".", ".."} and ":" not in part
)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
DTYPES = st.sampled_from(["<f4", ">f4", "|u1", "<M8[ns]", "<U3", "|S5", "<c16"]).map(np.dtype)
DETAILS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5) | DTYPES,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@st.composite
def sources(draw, rows):
    """Draw where the rows of a shard lie."""
    kind = draw(st.sampled_from([Packed, Planes, Extents, Decoded]))
    if kind is Packed:
        return Packed(draw(COUNTS))
    if kind is Planes:
        return Planes(draw(COUNTS), draw(COUNTS))
    if kind is Extents:
        cut = draw(st.integers(0, rows))
        return Extents((Extent(0, cut, "", draw(COUNTS)), Extent(cut, rows - cut, "", draw(COUNTS))))
    return Decoded(draw(DETAILS), tuple(sorted(draw(st.lists(st.integers(0, rows), max_size=3)))))


@st.composite
def layouts(draw):
    """Draw a layout of files that need not be there."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    dtype, row_shape = draw(DTYPES), tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    etags = draw(st.booleans())
    shards = []
    for name in names:
        rows = draw(st.integers(0, 1_000))
        source = draw(sources(rows))
        size = draw(COUNTS) + rows * 4_000 + (source.offset if isinstance(source, Packed) else 0)
        stamp = Stamp(size, draw(COUNTS), draw(COUNTS), draw(st.text(max_size=4)) if etags else "")
        stored = draw(st.sampled_from([dtype, dtype.newbyteorder("S")]))
        shards.append(Shard(f"/set/{name}", rows, row_shape, stored, stamp, source))
    options = draw(st.sampled_from(["", '{"columns": ["a"]}']))
    return Layout.from_shards(shards, "npy", LocalStorage(), options=options)


@settings(deadline=None)
@given(layouts(), st.booleans())
def test_round_trip(layout, hashed):
    """Whatever a layout holds comes back from a manifest as it was, with the same fingerprint."""
    hashes = example_array((len(layout), 16), "u1") if hashed else None
    data = manifest.encode(layout, "/set/", algorithm="blake2b", hashes=hashes)
    found = manifest.decode(data, f"/set/{manifest.NAME}", LocalStorage())
    assert list(found.layout.shards) == list(layout.shards)
    assert found.layout.fingerprint == layout.fingerprint
    assert found.layout.options == layout.options
    assert found.is_complete
    assert found.folder == "/set/"
    if hashed:
        assert np.array_equal(found.hashes, hashes)
    else:
        assert found.hashes is None


@settings(deadline=None)
@given(layouts(), st.data())
def test_parts(layout, data):
    """Any rows of a layout that came from a manifest are cut out as those of the layout itself."""
    bytes_ = manifest.encode(layout, "/set/")
    found = manifest.decode(bytes_, f"/set/{manifest.NAME}", LocalStorage()).layout
    start = data.draw(st.integers(0, layout.rows))
    rows = range(start, data.draw(st.integers(start, layout.rows)))
    for part in (rows, np.array(rows[:: data.draw(st.integers(1, 3))], np.int64)):
        (ours, mine), (theirs, other) = found.narrow(part), layout.narrow(part)
        assert list(ours.shards) == list(theirs.shards)
        assert np.array_equal(mine, other)


@settings(deadline=None)
@given(layouts(), st.data())
def test_every_change_is_seen(layout, data):
    """A listing that differs from a manifest in any name or any part of a stamp is never taken for the same."""
    saved = manifest.decode(manifest.encode(layout, "/set/"), f"/set/{manifest.NAME}", LocalStorage())
    paths = [layout.path(i) for i in range(len(layout))]
    stamps = [layout.stamp(i) for i in range(len(layout))]

    def differences():
        return manifest.compare(saved, paths, stamps, format="npy", options=layout.options)

    assert not differences()
    i = data.draw(st.integers(0, len(paths) - 1))
    change = data.draw(st.sampled_from(["size", "mtime_ns", "inode", "etag", "gone", "added", "removed", "swapped"]))
    if change == "added":
        paths.insert(i, paths[i] + "x")
        stamps.insert(i, stamps[i])
    elif change == "removed":
        del paths[i], stamps[i]
    elif change == "swapped":
        paths.append(paths.pop(0))
        stamps.append(stamps.pop(0))
        if len(paths) == 1:
            return
    elif change == "gone":
        stamps[i] = None
    else:
        value = getattr(stamps[i], change)
        stamps[i] = stamps[i]._replace(**{change: value + ("x" if change == "etag" else 1)})
    found = differences()
    assert found
    assert str(found)


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=6), max_size=8), st.data())
def test_names(texts, data):
    """Names in one buffer are a sequence like any other, and slices of them stay right."""
    texts = [text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape") for text in texts]
    names = Names.of(texts)
    assert list(names) == texts
    assert len(names) == len(texts)
    assert names.joined().decode("utf-8", "surrogateescape").split("\0") == (texts or [""])
    piece = data.draw(st.slices(len(texts))) if texts else slice(None)
    assert list(names[piece]) == texts[piece]
    assert [names[i] for i in range(-len(texts), len(texts))] == texts + texts


ACTIONS = st.lists(
    st.sampled_from(["index", "add", "remove", "write", "touch", "replace", "rename"]), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=60)
@given(ACTIONS, st.randoms(use_true_random=False))
def test_never_stale(actions, random):
    """Whatever is done to files and whenever they are indexed, opening gives what is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        np.save(root / "a_0.npy", np.zeros(3))
        clock = 1_700_000_000
        for action in ["index", *actions]:
            files = sorted(root.glob("a_*.npy"))
            path = random.choice(files)
            clock += 1
            if action == "index":
                open_shards(root, engine="numpy", holes="ignore").save_manifest()
            elif action == "add":
                np.save(root / f"a_{random.randrange(20)}.npy", np.full(random.randrange(4), float(clock)))
            elif action == "remove" and len(files) > 1:
                path.unlink()
            elif action == "write":
                np.save(path, np.full(3, float(clock)))
                os.utime(path, (clock, clock))
            elif action == "touch":
                os.utime(path, (clock, clock))
            elif action == "replace":
                shutil.copy2(path, root / "copy")
                (root / "copy").replace(path)
            elif action == "rename":
                path.rename(root / f"a_{random.randrange(20)}.npy")
        ds = open_shards(root, engine="numpy", holes="ignore")
        names = sorted((int(path.stem[2:]), path) for path in root.glob("a_*.npy"))
        expected = np.concatenate([np.load(path) for _, path in names])
        assert np.array_equal(ds.compute(), expected)
