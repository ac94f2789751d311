"""Names without secrets: passwords in URLs, signatures in queries, tokens in options."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Vault", "mask", "secrets_of"]

_MASK = "***"
_SECRET = re.compile(
    r"pass|secret|token|signature|credential|cookie|authorization|connection_string|\bsas|\bsig\b|(?<!no)auth\b"
    r"|(^|_|-)key|key$|keyid$|certificate|bearer",
    re.IGNORECASE,
)
"""Names of options and of query parameters whose values are secrets."""
_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]*:[^/\s@'\"]*(?=@)")
_QUERY = re.compile(
    r"([?&][^=&\s'\"]*(?:pass|secret|token|sig|signature|credential|key|keyid|auth)[^=&\s'\"]*=)[^&\s'\"<>)]+",
    re.IGNORECASE,
)
_NO_SECRET = {"github", "hf", "abfs", "abfss", "az", "adl"}
"""Schemes that write something else than a password before the @."""


def mask(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return the text with passwords, signatures and the given secrets replaced by asterisks.

    Parameters
    ----------
    text : str
        A URL, or a message that may hold some.
    secrets : tuple of str
        Secrets known besides, longest first.

    Examples
    --------
    >>> mask("cannot read https://ann:pw@host/a.npy?X-Amz-Signature=1f3e&part=2")
    'cannot read https://***@host/a.npy?X-Amz-Signature=***&part=2'
    """
    for secret in secrets:
        text = text.replace(secret, _MASK)
    return _QUERY.sub(rf"\1{_MASK}", _USERINFO.sub(_MASK, text))


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the secrets among options for fsspec, longest first."""
    found = {text for text in _secret_values(options, secret=False) if len(text) >= 4}
    return tuple(sorted(found, key=len, reverse=True))


def _secret_values(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secret_values(inner, secret=secret or bool(_SECRET.search(str(key))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_values(inner, secret=secret)
    elif secret and isinstance(value, str):
        yield value
    elif secret and isinstance(value, bytes):
        yield value.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Vault:
    """URLs that hold secrets, kept under names that hold none.

    A name is what the rest of the package sees, prints and saves; the storage alone turns it into the URL.
    """

    prefixes: dict[str, str] = field(default_factory=dict, repr=False)
    """Scheme and authority as named -> as they are."""
    queries: dict[str, str] = field(default_factory=dict, repr=False)
    """URL as named -> the query that belongs to it."""

    def hide(self, url: str) -> str:
        """Return the name of a URL, which is the URL itself if it holds no secret."""
        return "::".join([self._hide(link) if "://" in link else link for link in url.split("::")])

    def reveal(self, name: str) -> str:
        """Return the URL of a name."""
        if not self.prefixes and not self.queries:
            return name
        return "::".join([self._reveal(link) if "://" in link else link for link in name.split("::")])

    def secrets(self) -> tuple[str, ...]:
        """Return the secrets kept, longest first."""
        found = set()
        for prefix in self.prefixes.values():
            userinfo = prefix.partition("://")[2].rpartition("@")[0]
            found |= {userinfo, userinfo.partition(":")[2]}
        for query in self.queries.values():
            found.add(query)
            found |= {value for _, _, value in (pair.partition("=") for pair in query[1:].split("&"))}
        return tuple(sorted((text for text in found if len(text) >= 4), key=len, reverse=True))

    def _hide(self, link: str) -> str:
        scheme, _, rest = link.partition("://")
        authority, slash, tail = rest.partition("/")
        userinfo, at, host = authority.rpartition("@")
        if at and scheme not in _NO_SECRET and (":" in userinfo or scheme in {"http", "https"}):
            head = _keep(self.prefixes, f"{scheme}://{_MASK}", f"@{host}", f"{scheme}://{authority}")
        else:
            head = f"{scheme}://{authority}"
        base, mark, query = tail.partition("?")
        if mark and any(_SECRET.search(pair.partition("=")[0]) for pair in query.split("&")):
            return _keep(self.queries, f"{head}/{base}", "", "?" + query)
        return head + slash + tail

    def _reveal(self, link: str) -> str:
        query = self.queries.get(link, "")
        if query:
            link = re.sub(r"#\d+$", "", link)
        scheme, _, rest = link.partition("://")
        authority, slash, tail = rest.partition("/")
        head = self.prefixes.get(f"{scheme}://{authority}", f"{scheme}://{authority}")
        return head + slash + tail + query


def _keep(kept: dict[str, str], before: str, after: str, real: str) -> str:
    """Return the name under which ``real`` is kept; a number is added if another has it."""
    number = 1
    name = before + after
    while kept.setdefault(name, real) != real:
        number += 1
        name = f"{before}{number}{after}" if after else f"{before}#{number}"
    return name
