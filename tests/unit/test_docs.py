import codeop
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import lazyshards
from lazyshards import errors, testing

ROOT = Path(lazyshards.__file__).parents[1]
BUILT = {"_build", "notebooks"}
PAGES = [
    *[ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")],
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not BUILT & set(page.relative_to(ROOT / "docs").parts)),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES if page.is_file()}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif("README.md" not in TEXTS, reason="the documentation is not in the installed package")


def python_of(name):
    """Return the Python of a page, top to bottom."""
    return "\n".join([textwrap.dedent(code) for language, code in BLOCK.findall(TEXTS[name]) if language == "python"])


@pytest.mark.parametrize("name", [name for name in TEXTS if python_of(name)])
def test_python_of_the_page_runs(name, tmp_path, monkeypatch):
    """The Python of a page runs from top to bottom, in a fresh process and an empty directory, as a reader would."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "page.py"
    script.write_text(python_of(name), encoding="utf-8")
    folder = tmp_path / "empty"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", [name for name in TEXTS if name == "README.md" or "getting_started" in name])
def test_python_of_the_first_pages_can_be_pasted(name):
    """What a newcomer reads first can be pasted at Python's prompt, which wants an empty line after each loop."""
    typed = []
    for line in [*python_of(name).splitlines(), ""]:
        typed.append(line)
        if codeop.compile_command("\n".join(typed)) is not None:
            typed = []
    assert not typed


@pytest.mark.parametrize("name", TEXTS)
def test_relative_links_lead_somewhere(name):
    """Every link to a file of the repository leads to one, and every link to a heading to a heading."""
    text = BLOCK.sub("", TEXTS[name])
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), f"{name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]


def test_api_page_names_everything():
    """The API page has every public name, and every error in the tree, once in a first column."""
    first = re.findall(r"^\| `(\w+)", TEXTS["docs/api/index.md"], re.MULTILINE)
    assert set(lazyshards.__all__) <= set(first)


def test_every_public_name_has_an_entry_in_the_reference():
    """The pages of the API describe every public name and every error, each of them once."""
    pages = "\n".join(text for name, text in TEXTS.items() if name.startswith("docs/api/"))
    entries = re.findall(r"^\.\. auto\w+:: (lazyshards\.[\w.]+)$", pages, re.MULTILINE)
    assert len(entries) == len(set(entries))
    wanted = {f"lazyshards.{name}" for name in {*lazyshards.__all__, *errors.__all__}}
    wanted |= {f"lazyshards.testing.{name}" for name in testing.__all__}
    assert wanted - set(entries) == set()


def test_readme_begins_with_the_two_commands():
    """The README begins with what the package is and the two commands for a fresh machine."""
    head = TEXTS["README.md"].partition("\n## ")[0]
    assert [line.split()[1] for line in head.splitlines() if line.startswith("make ")] == ["demo", "test"]


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_short(name):
    """Lines are at most 120 characters, tables aside, so that changes are readable."""
    assert not [line for line in TEXTS[name].splitlines() if len(line) > 120 and not line.startswith("|")]


KNOWN_HOSTS = {
    *("docs.dask.org", "docs.mosaicml.com", "docs.nvidia.com", "docs.xarray.dev", "filesystem-spec.readthedocs.io"),
    *("github.com", "huggingface.co", "keepachangelog.com", "pypi.org", "pytorch.org", "semver.org", "www.skills.sh"),
}
"""Whom the pages may send their readers to: a new one is looked at by a person before it is entered here."""


@pytest.mark.parametrize("name", TEXTS)
def test_links_to_others_are_sound(name):
    """Links out of the documentation are https, to known hosts, without blanks or secrets."""
    for target in re.findall(r"\]\(\s*(\w+:[^)]*)\)", BLOCK.sub("", TEXTS[name])):
        link = urlsplit(target)
        assert re.fullmatch(r"https://[\w.-]+(/[\w./%#?=&+-]*)?", target), target
        assert link.hostname in KNOWN_HOSTS, f"{target}: look at it, then enter its host in KNOWN_HOSTS"
        assert not link.username, target
