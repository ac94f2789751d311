"""What a redirect to another host takes along of what the user gave for the first one: nothing.

aiohttp keeps back Authorization and Cookie by itself. A secret can be in any header.
"""

import weakref
from collections.abc import Mapping
from typing import Any

__all__ = ["guarded", "is_guard"]

_guards: "weakref.WeakSet[Any]" = weakref.WeakSet()


def guarded(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of an HTTP client with which redirects are guarded; None if there is nothing to guard.

    Parameters
    ----------
    options : mapping
        Of fsspec's HTTP file system.
    """
    client = dict(options.get("client_kwargs") or {})
    names = {*(options.get("headers") or {}), *(client.get("headers") or {})}
    has_login = bool(client.get("cookies") or client.get("auth"))
    if (not names and not has_login) or "get_client" in options:
        return None
    try:
        import aiohttp
    except ImportError:
        return None

    async def keep_back(session: object, context: object, params: Any) -> None:
        answer = params.response
        place = answer.headers.get("Location", "")
        try:
            stays = answer.url.join(type(answer.url)(place)).origin() == answer.url.origin()
        except ValueError:  # no URL at all: it goes nowhere
            return
        if stays:
            return
        for name in names:
            params.headers.popall(name, None)
        if has_login:  # they belong to the session, for whichever host
            raise aiohttp.ClientError(
                "the server sends on to another host, which must not get the cookies and the login"
            )

    guard = aiohttp.TraceConfig()
    guard.on_request_redirect.append(keep_back)
    _guards.add(guard)
    client["trace_configs"] = [*(client.get("trace_configs") or []), guard]
    return client


def is_guard(config: object) -> bool:
    """Return whether a trace is one of these."""
    return config in _guards
