import builtins
import inspect
import pickle
import re

import pytest

from lazyshards import errors

ALL = [getattr(errors, name) for name in errors.__all__]


def drawn():
    """Return name, name of the parent and name of the builtin, of each line of the tree that the docstring draws."""
    above, lines = [], []
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+)(?: +(.*))?$", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        words = (found[3] or "").split()
        builtin = words[0] if words and hasattr(builtins, words[0]) else None
        del above[depth:]
        lines.append((found[2], above[-1] if above else None, builtin))
        above.append(found[2])
    return lines


def test_the_tree_has_every_error():
    """The docstring draws every exception and warning of the module, once."""
    assert sorted(name for name, _, _ in drawn()) == sorted(errors.__all__)


@pytest.mark.parametrize(("name", "parent", "builtin"), drawn(), ids=str)
def test_the_tree_is_true(name, parent, builtin):
    """Each class has the parent under which it is drawn, and is the builtin beside it."""
    kind = getattr(errors, name)
    bases = {base.__name__ for base in kind.__bases__}
    expected = {parent, builtin} - {None} or {"Exception"}
    assert bases == expected


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_pickles_with_its_message(kind):
    """Every error travels between processes with its message, special characters included."""
    error = kind("'shard_1.npy' is truncated: größe 空\nline two")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
    assert type(again) is kind
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_message_is_shown_as_it_is(kind):
    """The message is shown without quotes or numbers added, although some builtins add them."""
    assert str(kind("what was found")) == "what was found"


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_documented(kind):
    """Every class says in a sentence when it is raised."""
    assert inspect.getdoc(kind).endswith(".")
    assert kind.__doc__ != kind.__bases__[0].__doc__


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_one_base_catches_all(kind):
    """One except clause catches all errors, one filter all warnings, and no class is both."""
    assert issubclass(kind, errors.LazyShardsError) != issubclass(kind, errors.LazyShardsWarning)
