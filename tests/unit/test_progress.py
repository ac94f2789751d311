import contextlib
import io
import sys
import types

import pytest

from lazyshards import open_shards
from lazyshards.progress import LogLines, progress_bar


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self):
        return True


def lines_of(steps, total, end=None):
    """Return the lines that a log gets of steps at given seconds: (second, rows)."""
    now, file = [0.0], io.StringIO()
    bar = LogLines(total, "compute set on numpy", file, lambda: now[0])
    with contextlib.suppress(KeyboardInterrupt), bar:
        for second, rows in steps:
            now[0] = second
            bar.update(rows)
        if end is not None:
            raise end
    text = file.getvalue()
    assert text.endswith("\n")
    return text.splitlines()


def test_a_short_log_has_one_line():
    """What is done within ten seconds gets one line, at its end, with rows, share, time and rate."""
    assert lines_of([(1, 25), (2, 25)], 50) == ["compute set on numpy: 50 of 50 rows (100 %) in 2.0 s, 25 rows/s"]


def test_a_long_log_has_a_line_now_and_then():
    """A line is written at most every ten seconds, however often rows are done."""
    lines = lines_of([(second / 10, 1) for second in range(1, 351)], 350)
    assert [line.split("in ")[1].split(" s")[0] for line in lines] == ["10.0", "20.0", "30.0", "35.0"]
    assert lines[1] == "compute set on numpy: 200 of 350 rows (57 %) in 20.0 s, 10 rows/s"


def test_a_log_says_what_stopped_it():
    """The last line says how far it came, and what ended it."""
    assert lines_of([(2, 10)], 40, KeyboardInterrupt()) == [
        "compute set on numpy: 10 of 40 rows (25 %) in 2.0 s, 5 rows/s, stopped by KeyboardInterrupt"
    ]


@pytest.mark.parametrize(
    ("total", "line"), [(None, "7 rows in 1.0 s, 7 rows/s"), (0, "7 of 0 rows (100 %) in 1.0 s, 7 rows/s")]
)
def test_a_log_without_a_total(total, line):
    """Rows are counted where it is not known of how many, and where there are none."""
    assert lines_of([(1, 7)], total) == [f"compute set on numpy: {line}"]


def test_plain_logs_have_no_control_characters(opened, capsys):
    """Where stderr is no terminal, what is written are printable lines."""
    ds, _ = opened((40, 0, 25))
    ds[3:].compute(progress=True)
    said = capsys.readouterr().err
    assert said.endswith("\n")
    assert all(line.isprintable() for line in said.splitlines())
    assert said.startswith("compute set[3:65] on numpy: 62 of 62 rows")


def test_plain_logs_need_no_tqdm(monkeypatch, capsys):
    """A log is written without tqdm; a bar on a terminal says what installs it."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with progress_bar(3, "work", shown=True) as bar:
        bar.update(3)
    assert "work: 3 of 3 rows" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ImportError, match=r"lazyshards\[progress\]"):
        progress_bar(3, "work", shown=True)


def test_a_terminal_has_a_bar(opened, monkeypatch):
    """On a terminal a bar says what runs: dataset, rows, engine; it ends at all rows."""
    ds, _ = opened((40, 0, 25))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    ds[::2].compute(progress=True)
    said = terminal.getvalue()
    assert "\rcompute set[::2] on numpy: 100%" in said
    assert "33.0/33.0" in said


def test_a_notebook_without_widgets_has_a_bar(monkeypatch, capsys):
    """In a notebook the bar goes to stdout, without a warning that widgets are missing."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(3, "work", shown=True) as bar:
        bar.update(3)
    said = capsys.readouterr()
    assert "work: 100%" in said.out
    assert said.err == ""


def test_nothing_is_shown_unless_asked(capsys):
    """A bar that is not shown writes nothing."""
    with progress_bar(3, "work", shown=False) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")


def test_titles_hide_secrets_and_stay_short(write):
    """The name of a dataset in a bar is short and printable."""
    from lazyshards.display import title_text
    from lazyshards.selection import select, select_all

    path, _ = write((40, 25), name="a\nb" + "x" * 90)
    layout = open_shards(path, engine="numpy")._layout
    everything = select_all(65, (3,))
    assert "\n" not in title_text(layout, everything)
    assert len(title_text(layout, select(everything, [1, 2]))) < 70
    (file,) = [shard.path for shard in layout.shards][:1]
    one = open_shards(file, engine="numpy")._layout
    assert title_text(one, select(select_all(40, (3,)), slice(3, 9))) == "shard_0000.npy[3:9]"
    assert title_text(one, select(select_all(40, (3,)), slice(30, 2, -2))) == "shard_0000.npy[14 rows]"
