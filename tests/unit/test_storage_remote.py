import os
import pickle
import socket
import time
from pathlib import Path

import fsspec
import pytest

from lazyshards.errors import ShardReadError
from lazyshards.storage import LocalStorage, Part, Stamp, open_storage
from lazyshards.storage.fsspec_storage import FsspecStorage
from lazyshards.storage.mounts import find_mount, parse_name, parse_url, stamp_of
from lazyshards.storage.retry import Retry, is_missing, is_transient
from lazyshards.storage.secrets import Vault, mask, secrets_of

QUICK = Retry(tries=3, first_seconds=0.001, most_seconds=0.002)


@pytest.fixture
def memory(request):
    """Give fsspec's memory file system, and a directory of it that is this test's own."""
    fs = fsspec.filesystem("memory")
    root = f"/{request.node.name}"
    yield fs, root
    if fs.exists(root):
        fs.rm(root, recursive=True)


class Failing(fsspec.get_filesystem_class("memory")):
    """A file system whose reads fail as often as they are told, and that counts them."""

    protocol = "failing"
    cachable = False
    faults = ()
    tries = 0

    def open(self, path, mode="rb", **kwargs):
        type(self).tries += 1
        if self.faults:
            raise self.faults.pop(0)
        return super().open(path, mode, **kwargs)


@pytest.fixture
def failing():
    """Give the file system that fails, with one file in it."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.faults = []
    Failing(skip_instance_cache=True).pipe("failing://failing/a.bin", b"0123456789")
    Failing.tries = 0
    yield Failing
    Failing(skip_instance_cache=True).rm("failing://failing/a.bin")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/set/*.npy", "s3://bucket/set/*.npy"),
        ("simplecache::s3://bucket/a.npy", "simplecache::s3://bucket/a.npy"),
        ("zip://set/a.npy::file:///d/b.zip", "file:///d/b.zip::zip://set/a.npy"),
        ("zip::file:///d/b.zip", "file:///d/b.zip::zip://"),
        ("zip://a.npy::/d/b.zip", "/d/b.zip::zip://a.npy"),
        ("zip://a.npy::simplecache::s3://b/c.zip", "simplecache::s3://b/c.zip::zip://a.npy"),
        ("zip://a.npy::tar://b.zip::s3://c/d.tar", "s3://c/d.tar::tar://b.zip::zip://a.npy"),
    ],
)
def test_names(url, name):
    """A chained URL is named archive first, so that a name ends with the file's name; both ways lose nothing."""
    address = parse_url(url)
    assert address.name == name
    assert parse_name(name) == address
    _, names = open_storage([url], None, "raise")
    assert names == [name.replace("/d/b.zip", "file:///d/b.zip").replace("file://file://", "file://")]
    assert open_storage(names, None, "raise")[1] == names


def test_archives_of_this_machine_stay_found(tmp_path, monkeypatch):
    """A relative path of an archive stays right when the working directory changes."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.bin", "0123")
    monkeypatch.chdir(tmp_path)
    found = [open_storage([f"zip://a.bin::{place}"], None, "raise") for place in ("a.zip", "file://a.zip")]
    monkeypatch.chdir("/")
    assert [storage.fetch([(path, 1, 2)]) for storage, (path,) in found] == [[b"12"], [b"12"]]


def test_urls_of_this_machine_are_paths(tmp_path):
    """file:// is read by positional reads, like the path itself."""
    (tmp_path / "a b#%.bin").write_bytes(b"0123")
    storage, (path,) = open_storage([f"file://{tmp_path}/a b#%.bin"], None, "raise")
    assert isinstance(storage, LocalStorage)
    assert storage.fetch([(path, 1, 2)]) == [b"12"]


def test_a_path_with_colons_is_a_path(tmp_path):
    """A path of this machine that exists is one, even if it looks like a chained URL."""
    (tmp_path / "a::b").write_bytes(b"0123")
    storage, (path,) = open_storage([f"{tmp_path}/a::b"], None, "raise")
    assert storage.fetch([(path, 1, 2)]) == [b"12"]


def test_paths_and_urls_do_not_mix(tmp_path):
    """A list of paths and URLs is refused."""
    with pytest.raises(ValueError, match="one kind"):
        open_storage(["memory://a.npy", str(tmp_path)], None, "raise")


@pytest.mark.parametrize("path", ["nosuch://bucket/a.npy", "nosuch://a.npy::file:///b.zip"])
def test_unknown_protocols_are_told(path):
    """A protocol that nobody knows is a ValueError that names it."""

    def find():
        storage, (name,) = open_storage([path], None, "raise")
        storage.find(name)

    with pytest.raises(ValueError, match="nosuch"):
        find()


# ------------------------------------------------------------------------------------------- listing


@pytest.mark.parametrize("end", ["", "/"])
def test_directories_of_memory(memory, end):
    """A directory is found with and without a slash, and its entries are URLs."""
    fs, root = memory
    fs.pipe({f"{root}/a.bin": b"a", f"{root}/deep/b.bin": b"b"})
    storage, (place,) = open_storage([f"memory:/{root}{end}"], None, "raise")
    kind, entries = storage.find(place)
    assert kind == "directory"
    assert sorted(entries) == [(f"memory:/{root}/a.bin", False), (f"memory:/{root}/deep", True)]


def test_what_exists_is_literal(memory):
    """A path that exists is taken as it is, and so are the directories of a pattern, whatever characters they hold."""
    fs, root = memory
    fs.pipe({f"{root}/run[1]/a[0].bin": b"1", f"{root}/run1/a0.bin": b"2", f"{root}/run1/a[1].bin": b"3"})
    storage, (place,) = open_storage([f"memory:/{root}"], None, "raise")
    assert storage.find(f"{place}/run[1]/a[0].bin") == ("file", [(f"{place}/run[1]/a[0].bin", False)])
    assert storage.find(f"{place}/run[1]") == ("directory", [(f"{place}/run[1]/a[0].bin", False)])
    assert storage.find(f"{place}/run[1]/*.bin") == ("glob", [(f"{place}/run[1]/a[0].bin", False)])
    assert storage.find(f"{place}/run[2-9]/*.bin") == ("glob", [])
    assert sorted(storage.find(f"{place}/run?/a?.bin")[1]) == [(f"{place}/run1/a0.bin", False)]


def test_deep_patterns(memory):
    """** goes through directories at any depth, and * through one."""
    fs, root = memory
    fs.pipe({f"{root}/a.bin": b"", f"{root}/x/b.bin": b"", f"{root}/x/y/c.bin": b"", f"{root}/x/y/d.txt": b""})
    storage, (place,) = open_storage([f"memory:/{root}"], None, "raise")

    def found(pattern):
        return sorted(path.removeprefix(place) for path, _ in storage.find(f"{place}/{pattern}")[1])

    assert found("**/*.bin") == ["/a.bin", "/x/b.bin", "/x/y/c.bin"]
    assert found("*/*.bin") == ["/x/b.bin"]


def test_a_listing_saves_asking_for_each_file(memory, monkeypatch):
    """What a listing told of a file is not asked again when its first bytes are read."""
    fs, root = memory
    fs.pipe({f"{root}/{i}.bin": b"0123" for i in range(5)})
    storage, (place,) = open_storage([f"memory:/{root}"], None, "raise")
    _, entries = storage.find(place)
    asked = []
    info = type(fs).info
    monkeypatch.setattr(
        type(fs), "info", lambda self, path, **options: asked.append(path) or info(self, path, **options)
    )
    heads = storage.heads([path for path, _ in entries], 4)
    assert asked == []
    again = storage.heads([path for path, _ in entries], 4)
    assert len(asked) == 5
    assert heads == again


# ------------------------------------------------------------------------------------------- stamps


@pytest.mark.parametrize(
    ("info", "stamp"),
    [
        ({"size": 3, "ETag": '"x"', "LastModified": "2024-01-01T00:00:00Z"}, Stamp(3, 0, 0, '"x"')),
        ({"size": 3, "mtime": 1.5}, Stamp(3, 1_500_000_000)),
        ({"size": 3, "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, Stamp(3, 1_704_067_200_000_000_000)),
        ({"size": 3, "updated": "2024-01-01T00:00:00Z"}, Stamp(3, 1_704_067_200_000_000_000)),
        ({"size": 3, "CRC": 255}, Stamp(3, 0, 0, "000000ff")),
        ({"size": None}, Stamp(-1)),
        ({"size": 3, "modified": "some day"}, Stamp(3)),
    ],
)
def test_stamps(info, stamp):
    """A tag, else a time, in whatever form a file system tells them."""
    assert stamp_of(info) == stamp


def test_a_changed_archive_is_told(tmp_path):
    """A member of an archive that was replaced is not the file that was opened."""
    import zipfile

    def write(data):
        with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
            archive.writestr("a.bin", data)
        (tmp_path / "new.zip").replace(tmp_path / "a.zip")

    write(b"0123")
    storage, (path,) = open_storage([f"zip://a.bin::file://{tmp_path}/a.zip"], None, "raise")
    (head,) = storage.heads([path], 4)
    write(b"4567")
    with pytest.raises(ShardReadError, match=r"a\.bin.*changed"):
        storage.fetch_into([Part(path, head.stamp, 0, memoryview(bytearray(4)))])
    storage.find(path)
    assert storage.heads([path], 4)[0].data == b"4567"


# ------------------------------------------------------------------------------------------- retries


class _AnswerError(Exception):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (_AnswerError(429), True),
        (_AnswerError(503), True),
        (_AnswerError(403), False),
        (_AnswerError(404), False),
        (OSError(16, "SlowDown"), True),
        (OSError(5, "input/output error"), False),
        (FileNotFoundError("a"), False),
        (PermissionError("a"), False),
        (ValueError("a"), False),
    ],
)
def test_what_passes(error, passes):
    """Resets, timeouts, names that are not found, 429 and 5xx pass; what is missing or forbidden does not."""
    assert is_transient(error) is passes


def test_a_missing_file_may_be_a_passing_fault():
    """FileNotFoundError that came of a 503 says nothing about the file."""
    error = FileNotFoundError("url")
    error.__cause__ = _AnswerError(503)
    assert (is_missing(error), is_transient(error)) == (False, True)
    error.__cause__ = _AnswerError(404)
    assert (is_missing(error), is_transient(error)) == (True, False)


def test_pauses_grow_within_limits():
    """Each pause is between half and all of its limit, which doubles up to the longest; one less than the tries."""
    pauses = list(Retry(tries=6, first_seconds=1, most_seconds=4).pauses())
    assert len(pauses) == 5
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, [1, 2, 4, 4, 4], strict=True))


def test_jitter_leaves_the_users_draws_alone():
    """The pauses draw from a generator of their own: a user's seeded numbers stay what they were."""
    import random

    random.seed(1)
    expected = random.random()
    random.seed(1)
    list(Retry().pauses())
    assert random.random() == expected


def test_passing_faults_are_tried_again(failing):
    """A read that fails twice and then works gives the bytes."""
    failing.faults = [ConnectionResetError("reset"), TimeoutError()]
    assert FsspecStorage(retry=QUICK).fetch([("failing://failing/a.bin", 2, 3)]) == [b"234"]
    assert failing.tries == 3


def test_the_error_says_what_was_tried(failing):
    """A fault that stays is an error with the file, the fault and how often it was tried."""
    failing.faults = [ConnectionResetError(104, "Connection reset by peer")] * 9
    with pytest.raises(ShardReadError, match=r"a\.bin' cannot be read: Connection reset by peer \(tried 3 times in"):
        FsspecStorage(retry=QUICK).fetch([("failing://failing/a.bin", 2, 3)])
    assert failing.tries == 3


@pytest.mark.parametrize("error", [PermissionError("no"), OSError(5, "input/output error"), FileNotFoundError("a")])
def test_permanent_faults_are_not_tried_again(failing, error):
    """What will be no better the next time is told at once."""
    failing.faults = [error] * 9
    with pytest.raises(ShardReadError, match=r"a\.bin"):
        FsspecStorage(retry=QUICK).fetch([("failing://failing/a.bin", 2, 3)])
    assert failing.tries == 1


def test_the_deadline_ends_trying(failing):
    """Nothing is sent again after the deadline."""
    failing.faults = [ConnectionResetError("reset")] * 9
    hasty = Retry(tries=9, first_seconds=0.2, deadline_seconds=0.05)
    start = time.monotonic()
    with pytest.raises(ShardReadError, match="reset"):
        FsspecStorage(retry=hasty).fetch([("failing://failing/a.bin", 2, 3)])
    assert failing.tries == 1
    assert time.monotonic() - start < 0.15


# ------------------------------------------------------------------------------------------- processes


def test_a_pickle_holds_no_live_file_system(memory):
    """A storage that was used pickles small, and equals what comes out."""
    fs, root = memory
    fs.pipe(f"{root}/a.bin", b"0123")
    storage = FsspecStorage({"some": "option"})
    storage.find(f"memory:/{root}")
    data = pickle.dumps(storage)
    assert len(data) < 1000
    assert pickle.loads(data) == storage  # noqa: S301  # our own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the very thing that is tested
def test_a_forked_process_makes_its_own():
    """A child process does not use the file systems, connections and open archives of its parent."""
    mine = find_mount(parse_url("memory://a"), {}, "")
    pid = os.fork()
    if not pid:
        other = find_mount(parse_url("memory://a"), {}, "")
        os._exit(0 if other is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert find_mount(parse_url("memory://a"), {}, "") is mine


def test_live_file_systems_are_bounded(tmp_path):
    """Many archives are read with few of them open."""
    import zipfile

    count = 40
    for i in range(count):
        with zipfile.ZipFile(tmp_path / f"{i}.zip", "w") as archive:
            archive.writestr("a.bin", b"%04d" % i)
    handles = Path("/proc/self/fd")
    before = len(list(handles.iterdir())) if handles.is_dir() else None
    urls = [f"zip://a.bin::file://{tmp_path}/{i}.zip" for i in range(count)]
    storage, names = open_storage(urls, None, "raise")
    assert storage.fetch([(name, 0, 4) for name in names]) == [b"%04d" % i for i in range(count)]
    if before is not None:
        assert len(list(handles.iterdir())) - before <= 20


# ------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "url",
    [
        "https://ann:planted@host/set/a.npy",
        "https://planted@host/set/a.npy",
        "ftp://ann:planted@host/set/a.npy",
        "https://host/set/a.npy?X-Amz-Credential=AKI&X-Amz-Signature=planted",
        "https://host/set/a.npy?sv=2024&sig=planted",
        "zip://a.npy::https://ann:planted@host/b.zip",
        "simplecache::https://ann:planted@host/a.npy",
    ],
)
def test_names_hold_no_secret(url):
    """The name of a URL has no password and no signature, ends as the file's does, and gives the URL again."""
    vault = Vault()
    name = vault.hide(url)
    assert "planted" not in name + repr(vault)
    assert vault.reveal(name) == url
    storage, (path,) = open_storage([url], {"token": "planted"}, "raise")
    assert path.endswith("a.npy")
    assert "planted" not in path + repr(storage) + str(storage)
    assert storage == pickle.loads(pickle.dumps(storage))  # noqa: S301  # our own


def test_two_secrets_have_two_names():
    """Two users of one host, and two signatures of one file, are kept apart."""
    vault = Vault()
    urls = ["ftp://ann:1@h/a", "ftp://bob:2@h/a", "https://h/a?sig=1", "https://h/a?sig=2", "https://h/a?part=1"]
    names = [vault.hide(url) for url in urls]
    assert len(set(names)) == 5
    assert [vault.reveal(name) for name in names] == urls
    assert [vault.hide(url) for url in urls] == names


@pytest.mark.parametrize("url", ["github://org:repo@main/a.npy", "abfs://box@account.dfs.core.windows.net/a.npy"])
def test_what_is_no_secret_stays(url):
    """What some URLs have before the @ is part of the place."""
    assert Vault().hide(url) == url


def test_masking():
    """Passwords, signatures, and secrets of options in any depth are masked wherever they stand in a text."""
    options = {"key": "AKIDPLANTED", "client_kwargs": {"headers": {"Authorization": "Bearer planted"}}, "anon": False}
    text = "AKIDPLANTED failed: Bearer planted at ftp://ann:pw@host/a?sig=abc&part=1"
    assert mask(text, secrets_of(options)) == "*** failed: *** at ftp://***@host/a?sig=***&part=1"


def test_errors_hold_no_secret(failing):
    """A secret in the text of a file system's error is not passed on, nor shown as its cause."""
    import traceback

    failing.faults = [OSError(5, "GET https://ann:pw@host/a?X-Amz-Signature=abcd with token planted failed")] * 2
    storage = FsspecStorage({"token": "planted"}, retry=QUICK)
    failing.__init__ = lambda self, **options: super(Failing, self).__init__()
    try:
        with pytest.raises(ShardReadError) as caught:
            storage.fetch([("failing://failing/a.bin", 2, 3)])
    finally:
        del failing.__init__
    shown = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in ("planted", "ann:pw", "abcd") if secret in shown]
    assert "a.bin" in shown
