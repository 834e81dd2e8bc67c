# SPDX-License-Identifier: Apache-2.0
"""The web page for operators: its files, as they lie in appliance/web.

The files hold no facts and need no key; what they show is asked of the API with the key that the
operator gives. Does not know: what the page shows.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from appliance.errors import ApiError

router = APIRouter(tags=["operations"])

PAGE = "index.html"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _read_files() -> dict[str, bytes]:
    """All files of the page, read once: only what was there can be asked for."""
    folder = resources.files("appliance") / "web"
    kinds = tuple(KINDS)
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(kinds)}


FILES = _read_files()


@router.get("/", include_in_schema=False)
async def front_door() -> RedirectResponse:
    """Lead a browser that was given the server's address to the page."""
    return RedirectResponse("/dashboard")


@router.get("/dashboard", response_class=Response)
async def dashboard() -> Response:
    """Return the web page that shows engine, tiers, sessions and cache; it asks for a key."""
    return _answer(PAGE)


@router.get("/dashboard/{name}", include_in_schema=False)
async def dashboard_file(name: str) -> Response:
    """Return a file of the page."""
    if name not in FILES:
        raise ApiError("not_found", f"GET /dashboard/{name}: Not Found")
    return _answer(name)


def _answer(name: str) -> Response:
    kind = KINDS[name[name.rindex(".") :]]
    return Response(FILES[name], media_type=f"{kind}; charset=utf-8", headers=HEADERS)
