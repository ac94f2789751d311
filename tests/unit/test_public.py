import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import lazyshards
from lazyshards import testing

NAMES = [f"lazyshards.{name}" for name in lazyshards.__all__] + [
    f"lazyshards.testing.{name}" for name in testing.__all__
]
MODULES = sorted(info.name for info in pkgutil.walk_packages(lazyshards.__path__, "lazyshards."))
STARTS_SOMETHING = {"lazyshards.engines.legate", "lazyshards.engines.cupy", "lazyshards.engines.staging"}


def resolve(dotted):
    """Return what a dotted name means."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_members(kind):
    """Return the methods and properties that a class itself defines for others."""
    return [
        (name, member)
        for name, member in vars(kind).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod | staticmethod))
    ]


@pytest.mark.parametrize("module", [lazyshards, testing], ids=lambda module: module.__name__)
def test_all_is_sorted(module):
    """The public names are sorted: constants, classes, functions."""
    names = module.__all__
    assert names == sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[:1].isupper() else 2, name))


def test_nothing_public_is_left_out():
    """Every class and function that the package binds is in __all__; the rest are modules."""
    bound = {
        name for name, value in vars(lazyshards).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert bound == set(lazyshards.__all__)


@pytest.mark.parametrize("dotted", NAMES)
def test_documented(dotted):
    """Every public name has a docstring of its own; a constant has one below it in the source."""
    thing = resolve(dotted)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__doc__
        assert thing.__doc__ != getattr(thing.__mro__[1] if inspect.isclass(thing) else None, "__doc__", None)
    else:
        module, _, name = dotted.rpartition(".")
        source = inspect.getsource(importlib.import_module(module))
        assert re.search(rf'^{name}\b[^\n]* = .*\n"""', source, re.MULTILINE)


@pytest.mark.parametrize("dotted", [name for name in NAMES if inspect.isclass(resolve(name))])
def test_members_are_documented(dotted):
    """Every public method and property of a public class has a docstring."""
    lacking = [name for name, member in public_members(resolve(dotted)) if not inspect.getdoc(member)]
    assert lacking == []


@pytest.mark.parametrize("dotted", [name for name in NAMES if inspect.isclass(resolve(name))])
def test_fields_are_documented(dotted):
    """Every field of a public record is explained in a string below it."""
    kind = resolve(dotted)
    source = inspect.getsource(kind)
    for name in inspect.get_annotations(kind):
        assert re.search(rf'^    {name}: .*\n    """', source, re.MULTILINE), name


@pytest.mark.parametrize("dotted", [name for name in NAMES if inspect.isfunction(resolve(name))])
def test_parameters_are_documented(dotted):
    """The docstring of a public function names every parameter, unless a sentence says it all."""
    function = resolve(dotted)
    names = [name for name in inspect.signature(function).parameters if name != "draw"]
    if "Parameters" in function.__doc__:
        assert [name for name in names if not re.search(rf"\b{name}\b", function.__doc__)] == []


@pytest.mark.parametrize("name", sorted(set(MODULES) - STARTS_SOMETHING))
def test_examples(name, tmp_path, monkeypatch):
    """The examples in the docstrings of every module do what they say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAZYSHARDS_ENGINE", "numpy")
    if name == "lazyshards.adapters.torch":
        pytest.importorskip("torch", reason="torch is installed by a test group of its own")
    if name == "lazyshards.engines.exchange":
        pytest.importorskip("legate", reason="Legate is not installed")
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_version():
    """The version is a number that can be compared."""
    number, _, commit = lazyshards.__version__.partition("+")
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", number)
    assert re.fullmatch(r"|g\w+(\.d\d{8})?|d\d{8}", commit)
