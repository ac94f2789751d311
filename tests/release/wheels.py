"""Build what a release is made of, and try it in a fresh environment of every Python that is found: `make wheels`.

The sdist is built from the sources, and all wheels from the sdist, so that it is complete if they are. With a C
compiler on Linux there is a wheel for the platform, whose tag auditwheel must agree with, and always a pure one. Each
is installed beside the test group, the one for the platform with Legate, which must start and serve; `pip check` must
find nothing, and the tests run outside the repository. `make wheels ARGS="--python 3.13 -- -x tests/unit"` tries less.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = {"lazyshards/_native/libcuda_stub.so", "lazyshards/_native/libgather.so"}
NEWEST, OLDEST = (3, 14), (3, 11)


def run(*command, **options):
    """Run a command, shown first, and return what it printed; a failure ends everything."""
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=True, text=True, **options).stdout


def pythons():
    """Return the interpreters that are found, one for each version: on the PATH, and pyenv's."""
    versions = [(3, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    names = [f"python{major}.{minor}" for major, minor in versions]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob("*/bin/python")), *filter(None, map(shutil.which, [*names, "python3"]))]
    found = {}
    for path in candidates:
        ask = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
        said = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if said.returncode == 0:
            found.setdefault(tuple(map(int, said.stdout.split())), str(path))
    return {version: found[version] for version in versions if version in found}


def build(out, scratch):
    """Build sdist and wheels, check what is in them; return the wheels, platform (or None) and pure, and sources."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    shutil.unpack_archive(sdist, scratch, filter="data")
    (source,) = scratch.iterdir()
    wheels = []
    for compiler in (os.environ.get("CC"), "false"):
        environment = {name: value for name, value in os.environ.items() if name != "CC"}
        environment |= {"CC": compiler} if compiler else {}
        run(sys.executable, "-m", "build", "--wheel", "--outdir", out, source, env=environment)
        (new,) = set(out.glob("*.whl")) - set(wheels)
        wheels.append(new)
        if "-none-any" in new.name:
            break
    *native, pure = wheels
    check_contents(pure, libraries=set())
    for wheel in native:
        check_contents(wheel, libraries=LIBRARIES)
        said = run(sys.executable, "-m", "auditwheel", "show", wheel, stdout=subprocess.PIPE)
        tags = re.findall(r'"(\w+?)"', said)
        assert set(tags) & set(re.split(r"[.-]", wheel.stem)), f"auditwheel says {tags} of {wheel.name}"
    return (native or [None])[0], pure, source


def check_contents(wheel, *, libraries):
    """Check that a wheel holds these libraries, its version, the licence, and nothing beside the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        said = archive.read("lazyshards/_version.txt").decode().strip()
    assert {name for name in names if name.endswith(".so")} == libraries, f"{wheel.name} holds other libraries"
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lazyshards"}, f"{wheel.name} holds more"
    assert any(name.endswith("licenses/LICENSE") for name in names), f"{wheel.name} has no licence"
    assert wheel.name.split("-")[1] == said, f"{wheel.name} says that it is {said}"


def try_out(python, wheel, source, arguments):
    """Install a wheel and the test group into a fresh environment, check it, run its tests; return how they ended."""
    extra, engines = ("", "numpy") if wheel.name.endswith("-none-any.whl") else ("[legate]", "numpy,legate")
    with tempfile.TemporaryDirectory(prefix="lazyshards-wheel-") as scratch:
        place = Path(scratch)
        run(python, "-m", "venv", place / "venv")
        inside = place / "venv" / "bin" / "python"
        pip = [inside, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        run(*pip, "install", "--upgrade", "pip>=25.1")
        run(*pip, "install", f"{wheel}{extra}", "--group", f"{source / 'pyproject.toml'}:test")
        run(*pip, "check")
        shutil.copytree(source / "tests", place / "work" / "tests")
        shutil.copy(source / "pyproject.toml", place / "work")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("LAZYSHARDS", "PYTHON"))
        } | {"LAZYSHARDS_REQUIRE_ENGINES": engines}
        command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        print("+", *command, flush=True)
        done = subprocess.run(
            list(map(str, command)), cwd=place / "work", env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout[-20_000:])
        return done.returncode, done.stdout.strip().splitlines()[-1].strip("= ")


def main():
    """Build, try, and print one line for each environment; the exit status is 0 only if all passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where sdist and wheels go; emptied first")
    parser.add_argument("--python", help="only this one, such as 3.13")
    parser.add_argument("tests", nargs="*", help="for pytest; by default all but those of several ranks")
    arguments = parser.parse_args()
    tests = arguments.tests or ["tests", "--ignore=tests/distributed"]
    found = pythons()
    if arguments.python:
        found = {version: path for version, path in found.items() if "{}.{}".format(*version) == arguments.python}
    if not found:
        sys.exit(f"no Python {arguments.python or 'from 3.11 on'} was found")
    shutil.rmtree(arguments.out, ignore_errors=True)
    lines, failed = [], False
    with tempfile.TemporaryDirectory(prefix="lazyshards-sdist-") as scratch:
        native, pure, source = build(arguments.out, Path(scratch))
        rounds = [(version, path, native or pure) for version, path in found.items()]
        if native:  # the pure one once, on the oldest
            rounds.append((*next(iter(found.items())), pure))
        for version, path, wheel in rounds:
            status, end = try_out(path, wheel, source, tests)
            failed |= status != 0
            lines.append(f"Python {'.'.join(map(str, version))}, {wheel.name}: {end}")
    print("", *lines, sep="\n")
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        if not arguments.python and (3, minor) not in found:
            print(f"Python 3.{minor}: not tried, there is none on this machine")
    sys.exit(failed)


if __name__ == "__main__":
    main()
