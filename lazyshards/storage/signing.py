"""Signed URLs of S3: the first of each bucket by botocore, the others here, where ours is the same for the first.

How to log in, which region, endpoint and style of address, is the business of the client that s3fs made. What is left
is Signature Version 4 of a query, a few hashes (docs.aws.amazon.com, "Authenticating Requests: Using Query
Parameters"), for which botocore takes a hundred times as long.
"""

import hmac
import inspect
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

__all__ = ["USED_SECONDS", "Signer", "sign_first"]

USED_SECONDS = 600
"""How long a signed URL, and what signs others like it, is used."""
_VALID_SECONDS = 3600
_PLAIN = re.compile(r"[A-Za-z0-9._~-][A-Za-z0-9/._~-]*")
"""Names of which every way to escape them makes the same."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs URLs of the objects of one bucket."""

    origin: str
    """Scheme and host."""
    folder: str
    """Path of the bucket, with the separator."""
    host: str
    query: Mapping[str, str] = field(repr=False)
    """Parameters of every URL; none if nothing is signed."""
    key: bytes = field(repr=False)
    """Signs, for one day, region and service; empty if nothing is signed."""
    made: float
    """Time when it was made, by the monotonic clock."""

    def is_fresh(self) -> bool:
        """Return whether it may be used still."""
        return time.monotonic() - self.made < USED_SECONDS

    def sign(self, name: str) -> str | None:
        """Return the URL of an object; None of one whose name is not plain."""
        if not _PLAIN.fullmatch(name) or "//" in name or "/." in name or name[0] == ".":
            return None
        return self._signed(self.folder + name, self.query)

    def sign_listing(self, parameters: Mapping[str, str]) -> str:
        """Return the URL of a listing of the bucket."""
        return self._signed(self.folder.rstrip("/") or "/", {**self.query, **parameters})

    def _signed(self, path: str, query: Mapping[str, str]) -> str:
        text = "&".join([f"{quote(name, safe='~')}={quote(query[name], safe='~')}" for name in sorted(query)])
        if not self.key:
            return f"{self.origin}{path}?{text}" if text else self.origin + path
        request = f"GET\n{path}\n{text}\nhost:{self.host}\n\nhost\nUNSIGNED-PAYLOAD"
        scope = query["X-Amz-Credential"].partition("/")[2]
        lines = ("AWS4-HMAC-SHA256", query["X-Amz-Date"], scope, sha256(request.encode()).hexdigest())
        signature = hmac.digest(self.key, "\n".join(lines).encode(), "sha256").hex()
        return f"{self.origin}{path}?{text}&X-Amz-Signature={signature}"


async def sign_first(fs: Any, bucket: str, name: str, version: str | None) -> tuple[str, Signer | None]:
    """Return the URL of an object, signed by botocore, and what signs others of its bucket in the same way.

    Parameters
    ----------
    fs : S3FileSystem
    bucket, name : str
    version : str or None
        Of the object; with one there is no signer.
    """
    await fs.set_session()
    client = await fs.get_s3(bucket)
    named = {"Bucket": bucket, "Key": name, **({"VersionId": version} if version else {})}
    url = str(await client.generate_presigned_url("get_object", Params=named, ExpiresIn=_VALID_SECONDS))
    if version:
        return url, None
    try:
        signer = await _signer(client, url, name)
    except Exception:  # noqa: BLE001  # what botocore keeps to itself may be anything in another version
        signer = None
    return url, signer


async def _signer(client: Any, url: str, name: str) -> Signer | None:
    """Return what signs as botocore did; None if it is not known how that is."""
    scheme, host, path, text, _ = urlsplit(url)
    quoted = quote(name, safe="/~")
    if not path.endswith(f"/{quoted}"):
        return None
    query = dict(parse_qsl(text, keep_blank_values=True))
    given, made = query.pop("X-Amz-Signature", ""), time.monotonic()
    folder = path[: -len(quoted)]
    if not given:
        return None if query else Signer(f"{scheme}://{host}", folder, host, {}, b"", made)
    if query["X-Amz-SignedHeaders"] != "host" or not all([part.startswith("X-Amz-") for part in query]):
        return None
    credentials = client._request_signer._credentials.get_frozen_credentials()  # noqa: SLF001  # the only way to them
    if inspect.isawaitable(credentials):
        credentials = await credentials
    key = f"AWS4{credentials.secret_key}".encode()
    for part in query["X-Amz-Credential"].split("/")[1:]:
        key = hmac.digest(key, part.encode(), "sha256")
    signer = Signer(f"{scheme}://{host}", folder, host, query, key, made)
    return signer if signer._signed(path, query).endswith(f"&X-Amz-Signature={given}") else None  # noqa: SLF001  # our own
