"""Options, and what a format needs to read a shard again, as JSON text and back.

Of details, plain values and the package's named tuples only.
Nothing in such a text is ever run, and no text may name another file: a detail that does is not put into one.
"""

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from lazyshards.layout import Decoded

__all__ = [
    "DetailDecoder",
    "descr_of",
    "dtype_of",
    "encode_details",
    "names_function",
    "options_of",
    "options_text",
]

_FORMATS = "lazyshards.formats."
_BASE64 = "b64"
_DTYPE = "dtype"
_SHARED = "shared"
_TUPLE = "of"


class _UnencodableError(Exception):
    """A value that no text stands for."""


def encode_details(sources: Sequence[Decoded]) -> tuple[list[str | None], list[str]]:
    """Return a text for each source, None for one that no text can stand for, and texts that several refer to.

    Parameters
    ----------
    sources : sequence of Decoded
    """
    # What all shards have in common, such as the columns that are read, is written once.
    counts = Counter(id(item) for source in sources if isinstance(source.detail, tuple) for item in source.detail)
    encoder = _Encoder({key for key, count in counts.items() if count > 1})
    texts: list[str | None] = []
    for source in sources:
        try:
            texts.append(json.dumps([list(source.edges), encoder.encode(source.detail)], separators=(",", ":")))
        except _UnencodableError:  # the others still can
            texts.append(None)
    return texts, encoder.shared


class _Encoder:
    def __init__(self, common: set[int]) -> None:
        self.shared: list[str] = []
        self._common = common
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str | int | float):
            return value
        if isinstance(value, bytes):
            return {_BASE64: base64.b64encode(value).decode()}
        if isinstance(value, np.dtype) and not value.hasobject:
            return {_DTYPE: descr_of(value)}
        if not isinstance(value, tuple):
            raise _UnencodableError
        if id(value) not in self._common:
            return self._encode_tuple(value)
        if id(value) not in self._known:
            text = json.dumps(self._encode_tuple(value), separators=(",", ":"))
            number = self._numbers.setdefault(text, len(self._numbers))
            if number == len(self.shared):
                self.shared.append(text)
            self._known[id(value)] = value, number
        return {_SHARED: self._known[id(value)][1]}

    def _encode_tuple(self, value: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind is tuple:
            return [self.encode(item) for item in value]
        if not _is_detail(kind) or _path_of(value):
            raise _UnencodableError
        name = f"{kind.__module__.removeprefix(_FORMATS)}.{kind.__qualname__}"
        return {_TUPLE: name, "": [self.encode(item) for item in value]}


class DetailDecoder:
    """Turns such texts into sources again.

    Parameters
    ----------
    shared : sequence of str
        The texts that others refer to.

    Examples
    --------
    >>> texts, shared = encode_details([Decoded((1, "x"), (0, 4))])
    >>> DetailDecoder(shared).decode(texts[0])
    Decoded(detail=(1, 'x'), edges=(0, 4), format='')
    """

    def __init__(self, shared: Sequence[str]) -> None:
        self._texts = shared
        self._shared: dict[int, Any] = {}

    def __reduce__(self) -> tuple[type["DetailDecoder"], tuple[Sequence[str]]]:
        return DetailDecoder, (self._texts,)

    def decode(self, text: str) -> Decoded:
        """Return the source that a text stands for; ValueError if it stands for none."""
        try:
            edges, detail = json.loads(text)
            if not isinstance(edges, list) or not all([type(edge) is int for edge in edges]):
                raise ValueError(f"its edges are {edges!r:.80}")
            return Decoded(self._value(detail), tuple(edges))
        except (TypeError, KeyError, IndexError, AttributeError, ImportError, RecursionError) as exc:
            raise ValueError(f"{text[:200]!r} is not what a format needs: {exc}") from exc

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple([self._value(item) for item in value])
        if not isinstance(value, dict):
            return value
        if _SHARED in value:
            number = int(value[_SHARED])
            if number not in self._shared:
                self._shared[number] = self._value(json.loads(self._texts[number]))
            return self._shared[number]
        if _BASE64 in value:
            return base64.b64decode(value[_BASE64], validate=True)
        if _DTYPE in value:
            return dtype_of(value[_DTYPE])
        module, _, name = str(value[_TUPLE]).rpartition(".")
        if not module.replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"{module!r} is no module of a format")
        kind: object = getattr(import_module(_FORMATS + module), name)
        if not isinstance(kind, type) or not _is_detail(kind):
            raise ValueError(f"{value[_TUPLE]!r} is no detail of a format")
        made = kind(*[self._value(item) for item in value[""]])
        if _path_of(made):
            raise ValueError(f"it names another file, {_path_of(made)!r}")
        return made


def _is_detail(kind: type) -> bool:
    """Return whether a type is a named tuple of one of the package's formats."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__module__.startswith(_FORMATS)


def _path_of(detail: object) -> object:
    """Return the other file that a detail names, if it names one."""
    return getattr(detail, "path", "")


def descr_of(dtype: np.dtype[Any]) -> Any:
    """Return a dtype as JSON can hold it."""
    return dtype.descr if dtype.names else dtype.str


def dtype_of(descr: Any) -> np.dtype[Any]:
    """Return the dtype of a description that JSON holds; ValueError or TypeError if there is none of plain values."""
    dtype = np.lib.format.descr_to_dtype(_tuples(descr))
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{dtype} is no dtype of plain values")
    return dtype


def _tuples(descr: Any) -> Any:
    """Return a description with the tuples that JSON has no way to write: fields, and the shapes in them."""
    if not isinstance(descr, list):
        return descr
    return [(field[0], _tuples(field[1]), *map(tuple, field[2:])) for field in descr]


# Options ---------------------------------------------------------------------------------------------------------

_FUNCTION = "$function"
_TYPE = "$dtype"


def options_text(options: Mapping[str, object]) -> str:
    """Return the options of a format as text that is the same in every process; empty if there are none.

    Examples
    --------
    >>> options_text({"columns": ("a", "b"), "dtype": np.dtype("u1")})
    '{"columns": ["a", "b"], "dtype": {"$dtype": "|u1"}}'
    """
    return json.dumps({name: _option(value) for name, value in sorted(options.items())}) if options else ""


def options_of(text: str) -> dict[str, object]:
    """Return the options that a text stands for; a function in them cannot be had back."""
    return {name: _value_of(value) for name, value in json.loads(text).items()} if text else {}


def names_function(text: str) -> bool:
    """Return whether the options of a text hold a function, or another thing that text cannot give back."""
    return f'"{_FUNCTION}"' in text


def _option(value: object) -> object:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, np.generic):
        return _option(value.item())
    if isinstance(value, Mapping):
        return {str(key): _option(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_option(item) for item in value]
    if isinstance(value, np.dtype | type):
        try:
            return {_TYPE: descr_of(np.dtype(value))}
        except TypeError:
            pass
    # A function, say: its name, as its repr tells where it lies in memory.
    text = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    line = f":{value.__code__.co_firstlineno}" if "<" in text and hasattr(value, "__code__") else ""
    return {_FUNCTION: text + line}


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE in value:
        return dtype_of(value[_TYPE])
    return {key: _value_of(item) for key, item in value.items()}
