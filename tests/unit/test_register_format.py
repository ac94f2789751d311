import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

import lazyshards
from lazyshards import formats, open_shards, register_format
from lazyshards.errors import FormatError, ShardsNotFoundError
from lazyshards.formats import Fault, find_format, format_names, format_of_name
from lazyshards.layout import Decoded, Packed, Shard
from lazyshards.selection import cell_index
from lazyshards.storage.base import Part
from lazyshards.testing import FormatConformance, assert_same, example_array

pytestmark = pytest.mark.usefixtures("on_numpy")

PAGE = Path(lazyshards.__file__).parents[1] / "docs" / "how_to" / "your_own_format.md"


class XorFormat:
    """Rows of three float32, each byte xor a key; a header of 8 bytes: XOR, the key, the number of rows."""

    name = "xor"
    suffixes = (".xor",)
    magic = (b"XOR",)
    directories = False

    def inspect(self, paths, storage, options):
        """Return a shard, or what is wrong, for every file."""
        for option in options:
            raise TypeError(f"the xor format takes no option {option!r}")
        found = []
        for path, head in zip(paths, storage.heads(paths, 8), strict=True):
            rows = int.from_bytes(head.data[4:], "little")
            if head.error is not None:
                found.append(Fault(path, "cannot be read", head.error))
            elif head.data[:3] != b"XOR" or head.stamp.size != 8 + 12 * rows:
                found.append(Fault(path, "is no whole xor file"))
            else:
                found.append(Shard(path, rows, (3,), np.dtype("<f4"), head.stamp, Decoded(head.data[3])))
        return found

    def read_into(self, shard, start, out, cell, storage):
        """Fill out with the rows from start on."""
        block = np.empty((len(out), 3), "<f4")
        storage.fetch_into([Part(shard.path, shard.stamp, 8 + 12 * start, block.reshape(-1).view("u1").data)])
        block.view("u1")[...] ^= shard.source.detail
        out[...] = block[(slice(None), *cell_index(cell))]


def write_xor(path, array, key=0x5A):
    """Write a shard."""
    data = bytes(byte ^ key for byte in array.astype("<f4").tobytes())
    path.write_bytes(b"XOR" + bytes([key]) + len(array).to_bytes(4, "little") + data)


@pytest.fixture(autouse=True)
def _forget():
    """Leave the registry as it was."""
    known = dict(formats._FORMATS), dict(formats._BY_SUFFIX), dict(formats._broken), formats._entry_points
    yield
    formats._FORMATS.clear(), formats._FORMATS.update(known[0])
    formats._BY_SUFFIX.clear(), formats._BY_SUFFIX.update(known[1])
    formats._broken.clear(), formats._broken.update(known[2])
    formats._entry_points = known[3]


class TestOwnFormat(FormatConformance):
    """A format of one's own, as users write it, passes the suite that ours pass."""

    format = "xor"
    dtypes = ("f4",)
    row_shapes = ((3,),)

    @pytest.fixture(autouse=True)
    def _registered(self, _forget):
        register_format(XorFormat())

    def write(self, path, array):
        """Write a shard."""
        write_xor(path, array)


def test_found_by_suffix_name_and_bytes(tmp_path):
    """A registered format is found as ours are."""
    register_format(XorFormat())
    whole = example_array((6, 3), "f4")
    write_xor(tmp_path / "s0.xor", whole)
    write_xor(tmp_path / "s0", whole)
    assert "xor" in format_names()
    assert_same(open_shards(tmp_path / "s0.xor")[1:4].compute(), whole[1:4])
    assert_same(open_shards(tmp_path / "s0").compute(), whole)
    assert_same(open_shards(tmp_path / "s0", format="xor").compute(), whole)


def test_other_engines(tmp_path, engine):
    """Tasks of every engine find the format by its name."""
    register_format(XorFormat())
    whole = example_array((40, 3), "f4")
    write_xor(tmp_path / "s0.xor", whole)
    found = open_shards(tmp_path).compute(engine=engine, tiles_per_processor=2)
    assert np.array_equal(np.asarray(found.get() if engine == "cupy" else found).view("u4"), whole.view("u4"))


def test_plain_bytes_need_no_reading(tmp_path):
    """A format that only says where rows lie is read by the core."""

    class Tagged(XorFormat):
        name, suffixes, magic = "tagged", (".tagged",), ()

        def inspect(self, paths, storage, options):
            heads = storage.heads(paths, 1)
            return [
                Shard(p, (h.stamp.size - 4) // 12, (3,), np.dtype("<f4"), h.stamp, Packed(4))
                for p, h in zip(paths, heads, strict=True)
            ]

        def read_into(self, shard, start, out, cell, storage):
            raise AssertionError

    register_format(Tagged())
    whole = example_array((6, 3), "f4")
    (tmp_path / "s0.tagged").write_bytes(b"TAG1" + whole.tobytes())
    assert_same(open_shards(tmp_path)[::-2, 1:].compute(), whole[::-2, 1:])


def test_registering_again_replaces():
    """A format registered twice under one name, as when a notebook cell runs again, is the one registered last."""
    register_format(XorFormat())
    second = XorFormat()
    second.suffixes = (".other",)
    register_format(second)
    assert find_format("xor") is second
    assert format_of_name("a.xor") is None
    assert format_of_name("a.other") is second


def test_own_names_stay():
    """A name of ours is not given away."""
    fake = XorFormat()
    fake.name = "npy"
    with pytest.raises(ValueError, match="'npy' is one of lazyshards' own"):
        register_format(fake)


def test_suffixes_stay():
    """A suffix of another format is not taken from it, and nothing is half registered."""
    greedy = XorFormat()
    greedy.suffixes = (".xor", ".npy")
    with pytest.raises(ValueError, match=r"'\.npy' belongs to the format 'npy'"):
        register_format(greedy)
    assert "xor" not in format_names()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": ""}, "name"),
        ({"suffixes": ".xor"}, "suffixes"),
        ({"suffixes": ("xor",)}, "one dot at the start"),
        ({"suffixes": (".XOR",)}, "lower case"),
        ({"suffixes": (".xor.gz",)}, "one dot"),
        ({"magic": ("XOR",)}, "magic"),
        ({"magic": (b"",)}, "magic"),
        ({"directories": None}, "directories"),
    ],
    ids=str,
)
def test_wrong_members(change, text):
    """A member of the wrong kind is a TypeError that names it."""
    format = XorFormat()
    for name, value in change.items():
        setattr(format, name, value)
    with pytest.raises(TypeError, match=text):
        register_format(format)


def test_lacking_members():
    """What is no format is told by all that it lacks."""

    class Half:
        name, suffixes, magic = "half", (), ()

    with pytest.raises(TypeError, match="no directories, no inspect, no read_into"):
        register_format(Half())


def test_a_class_is_no_format():
    """A class that was not called is told."""
    with pytest.raises(TypeError, match=r"register an instance of it, XorFormat\(\)"):
        register_format(XorFormat)


PLUG_INS = """
    import numpy as np
    import lazyshards
    from lazyshards.formats import Fault
    from lazyshards.layout import Packed, Shard

    class Plug:
        name, suffixes, magic, directories = "plug", (".plug",), (), False
        def inspect(self, paths, storage, options):
            return [Shard(p, h.stamp.size, (), np.dtype("u1"), h.stamp, Packed(0))
                    for p, h in zip(paths, storage.heads(paths, 1))]
        def read_into(self, shard, start, out, cell, storage):
            raise AssertionError
"""
DECLARED = """
    [lazyshards.formats]
    plug = lazyshards_plug:Plug
    broken = lazyshards_broken:Format
    misnamed = lazyshards_plug:Plug
"""


@pytest.fixture
def plugged(tmp_path, child):
    """Give a function that runs code in a process in which a package with plug-ins is installed."""
    site = tmp_path / "site"
    info = site / "lazyshards_plug-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "lazyshards_plug.py").write_text(textwrap.dedent(PLUG_INS))
    (site / "lazyshards_broken.py").write_text("raise RuntimeError('the plug-in has a bug')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazyshards-plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(DECLARED))
    (tmp_path / "s0.plug").write_bytes(b"\1\2\3")
    (tmp_path / "s0.other").write_bytes(b"\1\2\3")
    np.save(tmp_path / "s0.npy", np.zeros(3))

    def run(code):
        head = f"import sys; sys.path.insert(0, {str(site)!r})\nimport lazyshards\n"
        return child(head + textwrap.dedent(code), LAZYSHARDS_ENGINE="numpy")

    return run


def test_entry_point_by_suffix(plugged):
    """A suffix that only a plug-in knows finds it."""
    assert plugged("print(lazyshards.open_shards('s0.plug').compute())") == "[1 2 3]\n"


def test_entry_point_by_name(plugged):
    """A plug-in that is asked for by name is loaded, and no other."""
    out = plugged("""
        print(lazyshards.open_shards('s0.other', format='plug').compute())
        print('lazyshards_broken' in sys.modules)
    """)
    assert out == "[1 2 3]\nFalse\n"


def test_entry_points_are_not_loaded_without_need(plugged):
    """Files of a known format load no plug-in, and do not even look for them."""
    out = plugged("""
        lazyshards.open_shards('s0.npy').compute()
        print([name for name in sys.modules if name.startswith('lazyshards_')], 'importlib.metadata' in sys.modules)
    """)
    assert out == "[] False\n"


def test_broken_plug_in_is_told_when_asked_for(plugged):
    """A plug-in that cannot be loaded is an error, with whose it is and why, only when it is asked for."""
    out = plugged("""
        print(lazyshards.open_shards('s0.plug').compute())
        for format in ('broken', 'broken', 'misnamed', 'none'):
            try:
                lazyshards.open_shards('s0.other', format=format)
            except lazyshards.FormatError as exc:
                print(exc)
    """)
    lines = out.splitlines()
    broken = (
        "the format 'broken', a plug-in of the package 'lazyshards-plug' (lazyshards_broken:Format), cannot be loaded: "
        "RuntimeError: the plug-in has a bug"
    )
    assert lines[:3] == ["[1 2 3]", broken, broken]
    assert "'misnamed'" in lines[3]
    assert "no format is called 'none'" in lines[4]


def test_unknown_suffix_is_still_unknown(tmp_path):
    """Without a plug-in for it a suffix means nothing."""
    (tmp_path / "s0.zzz").write_bytes(b"1")
    with pytest.raises(ShardsNotFoundError):
        open_shards(tmp_path)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not in the installed package")
def test_the_format_of_the_page_conforms(child):
    """The format that the documentation builds passes the suite that it shows."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    child(
        """
        import sys
        from pathlib import Path
        import pytest
        Path("test_page.py").write_text(sys.argv[1], encoding="utf-8")
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "test_page.py"]))
        """,
        code,
        LAZYSHARDS_ENGINE="numpy",
    )


def test_public():
    """register_format is public, and so are the words that a format is written with."""
    assert lazyshards.register_format is register_format
    assert issubclass(FormatError, ValueError)
