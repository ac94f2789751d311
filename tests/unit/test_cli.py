import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from lazyshards import cli, demo, open_shards
from lazyshards.errors import EngineError, EngineUnavailableError, LazyShardsError, ShardChangedWarning

pytestmark = pytest.mark.usefixtures("on_numpy")


@pytest.fixture
def path(write):
    """Give the path, as text, of 10,000 rows in uneven shards."""
    return str(write((1_500, 0, 2_500, 6_000))[0])


@pytest.fixture
def lines(capsys):
    """Give a function that runs a command, which must succeed, and returns the lines that it printed."""

    def run(*argv):
        assert cli.main(argv) == 0
        return capsys.readouterr().out.splitlines()

    return run


def test_info_prints_the_dataset(path, lines):
    """`info` prints the text of the dataset."""
    assert "\n".join(lines("info", path)) == repr(open_shards(path))


def test_info_lists_every_shard(write, lines):
    """`info --shards` prints a line for every shard, however many there are."""
    path, _ = write((3,) * 20)
    listed = lines("info", str(path), "--shards")
    assert len(listed) == 22
    assert listed[-1].endswith("shard_0019.npy")


@pytest.mark.parametrize(
    ("arguments", "count"), [([], 5), (["-n", "2"], 2), (["-n", "0"], 0), (["-n", "20_000"], 10_000)]
)
def test_head_prints_the_first_rows(path, lines, arguments, count):
    """`head` prints the first rows, five unless told otherwise, and how many there are."""
    listed = lines("head", path, *arguments)
    with np.printoptions(threshold=1_000, edgeitems=3, linewidth=120):
        assert "\n".join(listed[:-1]) == str(open_shards(path)[:count].to_numpy())
    assert listed[-1] == f"rows 0 to {count:,} of 10,000, float32"


def test_plan_prints_the_numbers(path, lines):
    """`plan` prints the plan of the slice, and reads no data."""
    listed = lines("plan", path, "1_000:5_000")
    assert "shards touched  3 of 4" in listed
    assert any(line.startswith("bytes wanted    48,000") for line in listed)


def test_plan_takes_a_negative_index(path, lines):
    """An index that begins with a minus is an index, not an option."""
    assert "result          (5, 3) float32" in lines("plan", path, "-5:")
    assert "result          (1, 3) float32" in lines("plan", path, "-1,...", "--engine", "numpy")


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("1_000:5_000", np.s_[1_000:5_000,]),
        ("5", (5,)),
        ("-1", (-1,)),
        ("+3,", (3,)),
        (":", np.s_[:,]),
        ("::", np.s_[::,]),
        ("::-1", np.s_[::-1,]),
        (" 10 : 20 : 2 , : , 3 ", np.s_[10:20:2, :, 3]),
        ("..., 3", (..., 3)),
        ("-10:,...", np.s_[-10:, ...]),
    ],
)
def test_index_is_read_as_numpy_reads_it(text, index):
    """The text between NumPy's brackets gives the index that NumPy gets."""
    assert cli.parse_index(text) == index


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a",
        "1.5",
        "1:2:3:4",
        "1,,2",
        "None",
        "[1,2]",
        "1_",
        "_1",
        "1__0",
        "0x10",
        "....",
        "1 2",
        "٣",
        "9" * 5_000,
        "__import__('os').getcwd()",
        "1:a",
        "1;2",
    ],
)
def test_other_text_is_no_index(text):
    """Whatever is no integer, slice or dots is refused, and never evaluated."""
    with pytest.raises(ValueError, match="is not an index"):
        cli.parse_index(text)


@pytest.mark.parametrize(
    "argv",
    [[], ["info"], ["nothing"], ["plan", "x", "a"], ["head", "x", "-n", "-1"], ["info", "x", "--order", "random"]],
)
def test_wrong_command_line_is_2(argv, capsys):
    """A wrong command line is status 2, with the usage on stderr."""
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("usage: lazyshards")


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_is_0(argv, capsys):
    """Asking for help is no error."""
    assert cli.main(argv) == 0
    assert "lazyshards" in capsys.readouterr().out


def test_error_is_one_line(tmp_path, capsys):
    """An error of ours is one line on stderr and status 1, without a traceback."""
    assert cli.main(["info", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lazyshards: error: ")
    assert captured.err.count("\n") == 1


def test_options_reach_open_shards(write, lines, capsys):
    """--holes, --order, --format and --engine are those of open_shards."""
    path, whole = write((2,) * 12, pattern="s{}.npy")
    (path / "s5.npy").unlink()
    assert cli.main(["info", str(path)]) == 1
    assert "s5.npy" in capsys.readouterr().err
    options = ["--holes", "ignore", "--order", "name", "--format", "npy", "--engine", "numpy"]
    listed = lines("head", str(path), "-n", "4", *options)
    assert listed[:-1] == str(whole[[0, 1, 2, 3]]).splitlines()
    assert lines("info", str(path), "--shards", *options)[4].endswith("s10.npy")


def test_options_of_the_format_reach_open_shards(tmp_path, lines, capsys):
    """--option names what a format takes, in every command; one that it does not take is an error in one line."""
    np.savez(tmp_path / "both.npz", a=np.arange(6), b=np.arange(3))
    source = str(tmp_path / "both.npz")
    assert "(6,)" in lines("info", source, "--option", "member=a")[0]
    assert lines("head", source, "--option", "member=b")[0] == "[0 1 2]"
    assert cli.main(["info", source, "--option", "membr=a"]) == 1
    assert "did you mean member=?" in capsys.readouterr().err


def test_several_paths_are_answered_with_quotes(path, capsys):
    """A glob that the shell took apart is a wrong command line, and the message says what to do."""
    assert cli.main(["info", path, path, path]) == 2
    assert "put a glob in quotes" in capsys.readouterr().err
    assert cli.main(["info", path, "--shard-s"]) == 2
    assert "quotes" not in capsys.readouterr().err


def test_convert_says_how_to_replace(path, tmp_path, capsys):
    """A directory that holds shards is not replaced, and the message names the option of the command line."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "shard.npy").touch()
    assert cli.main(["convert", path, str(tmp_path / "there")]) == 1
    assert "pass --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_ends_without_a_traceback(error, status, path, monkeypatch, capfd):
    """Ctrl-C is status 130 and a reader that went away 141, both silent."""

    def fail(options):
        raise error

    monkeypatch.setattr(cli, "_open", fail)
    monkeypatch.setattr(cli, "_abandon_stdout", lambda: None)
    assert cli.main(["info", path]) == status
    assert capfd.readouterr().err == ""


def test_errors_hide_secrets(monkeypatch, capsys):
    """An error that quotes a URL does not print what stands in it."""

    def fail(options):
        raise LazyShardsError("'s3://key:secret@bucket/x?secret' is\x1b[1m gone")

    monkeypatch.setattr(cli, "_open", fail)
    assert cli.main(["info", "x"]) == 1
    assert capsys.readouterr().err == "lazyshards: error: 's3://***@bucket/x?***' is\\x1b[1m gone\n"


def test_warnings_are_one_line(monkeypatch, capsys):
    """A warning of ours is one line on stderr, without the place in our source."""

    def warn(options):
        warnings.warn("shard 1 changed", ShardChangedWarning, stacklevel=1)

    monkeypatch.setattr(cli, "_info", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["info", "x"]) == 0
    assert capsys.readouterr().err == "lazyshards: warning: shard 1 changed\n"


def test_doctor_is_text_or_json(lines):
    """`doctor` prints a report for a person, and with --json the same for a program."""
    assert any(line.startswith("Engine: auto takes") for line in lines("doctor"))
    assert {"engine", "engine_reason", "numpy"} <= json.loads("\n".join(lines("doctor", "--json"))).keys()


def test_demo_computes_the_example(lines):
    """`demo` computes the example, checks it, and says in the last line engine, tiles, shards, bytes and time."""
    listed = lines("demo")
    assert listed[-2] == "ds[1_000:5_000] -> numpy array (4000, 256) float32, equal to what NumPy reads."
    assert listed[-1].startswith("engine numpy: ")
    assert "over 6 shards, 4,096,000 bytes in " in listed[-1]


def test_demo_runs_on_each_engine(engine, lines):
    """`demo --engine` computes and checks the example on every engine that is here."""
    listed = lines("demo", "--engine", engine)
    assert "(4000, 256) float32, " in listed[-2]
    assert listed[-2].endswith("equal to what NumPy reads.")
    assert listed[-1].startswith(f"engine {engine}: ")


def test_demo_computes_the_users_shards(path, lines):
    """`demo PATH` does the same on the user's shards."""
    listed = lines("demo", path)
    assert listed[-2] == "ds[1_000:5_000] -> numpy array (4000, 3) float32, equal to what NumPy reads."
    assert listed[-1].startswith("engine numpy: 1 tile over 3 shards, 48,000 bytes in ")


@pytest.mark.parametrize("counts", [(0,), (1,), (7, 0, 2), (1_000,), (1_001,)])
def test_demo_serves_small_datasets(write, lines, counts):
    """`demo PATH` takes what there is of a dataset too small for its slice."""
    path, _ = write(counts)
    assert lines("demo", str(path))[-2].endswith("equal to what NumPy reads.")


def test_demo_tells_a_wrong_result(path, monkeypatch):
    """A result that differs in one bit is an error."""
    ds = open_shards(path)
    expected = ds[1_000:5_000].to_numpy()
    expected[-1, -1] = np.nextafter(expected[-1, -1], np.float32(9e9))
    monkeypatch.setattr(demo, "_expected", lambda *_: expected)
    with pytest.raises(EngineError, match="differs"):
        list(demo.demonstrate(ds))


def test_demo_falls_back_aloud(path, monkeypatch):
    """If Legate does not start, the demonstration says why and NumPy serves; if it was asked for, it is an error."""
    find = demo.find_engine

    def broken(name):
        if name == "legate":
            raise EngineUnavailableError("no luck")
        return find(name)

    monkeypatch.setattr(demo, "find_engine", broken)
    monkeypatch.setattr(type(open_shards(path)), "engine", "legate")
    texts = list(demo.demonstrate(open_shards(path)))
    assert "Legate does not start here, NumPy serves: no luck\n" in texts
    assert texts[-1].startswith("engine numpy")
    with pytest.raises(EngineUnavailableError):
        list(demo.demonstrate(open_shards(path), "legate"))


def run_child(argv, **options):
    """Run the command line in a child process."""
    root = str(Path(cli.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run([sys.executable, "-m", "lazyshards.cli", *argv], env=environment, timeout=120, **options)  # noqa: PLW1510


def test_demo_runs_as_a_command(tmp_path):
    """The demonstration runs in a process of its own, from any directory, and leaves nothing there."""
    done = run_child(["demo", "--engine", "numpy"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal to what NumPy reads" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_closed_pipe_is_silent(write):
    """A reader that closes the pipe early ends the command without a word."""
    path, _ = write((1,) * 3_000, row_shape=())
    read, end = os.pipe()
    os.close(read)
    with os.fdopen(end, "wb") as stdout:
        done = run_child(["info", str(path), "--shards"], stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")
