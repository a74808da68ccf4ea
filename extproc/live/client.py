"""Asks a running router for its live picture."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import msgspec

from extproc.live.status import STATUS_PATH, Status

TIMEOUT_S = 5.0

#: A router that answers is on this machine, so no proxy lies between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """No status; the text says why and what to do. ``why``: in a few words."""

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text)
        self.why = why or text


def base_url(server: str) -> str:
    """The server's address as a URL. What people have at hand will do: without http://, with /metrics."""
    url = server if "://" in server else f"http://{server}"
    return url.rstrip("/").removesuffix("/metrics").removesuffix(STATUS_PATH)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or a bracket is missing
        return False


def fetch(server: str) -> Status:
    """Its status now. Raises ServerError."""
    url = base_url(server) + STATUS_PATH
    if not _is_http(url):
        raise ServerError(f"--server {server}: use http://host:port, for example http://127.0.0.1:9090")
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=Status)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ServerError(
                f"{url} is unknown there: is this the --metrics address of a router?", "404"
            ) from None
        said = error.read(1000).decode(errors="replace").strip()
        raise ServerError(f"{url} answers {error.code}: {said}", f"{error.code} {said}") from None
    except msgspec.MsgspecError:
        raise ServerError(
            f"{url} answers something else: is this the --metrics address of a router of this version?",
            "something else answers",
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ServerError(
            f"{url}: {why}; start the router with --metrics, and give its address", why
        ) from None
