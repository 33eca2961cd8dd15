"""GET /ui and what the page loads. The files are read once, at the start; no name from a request reaches the disk.

The page holds no data and needs no key: what it shows comes from /status, which asks for one where keys are configured.
All addresses in it are relative, so that it works behind a proxy under a path of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
# Nothing from elsewhere, nothing inline, no text taken for HTML (Trusted Types), no frame around it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked again each time, answered 304 while it is the same: an upgrade shows at the next load.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        # A media type that has its charset already is left as it is.
        return Response(self.content, headers={**headers, "Content-Type": self.media_type})


def _read() -> dict[str, _File]:
    files = {}
    for item in resources.files(__package__).joinpath("static").iterdir():
        media_type = _MEDIA_TYPES.get("." + item.name.rpartition(".")[2])
        if media_type is not None:
            content = item.read_bytes()
            files[item.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return files


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = _read()

    @router.api_route("/ui", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return files[_PAGE].answer(request)

    @router.get("/ui/")
    async def slash() -> Response:
        # Relative, since a proxy may have taken a prefix off the path.
        return Response(status_code=307, headers={"Location": "../ui"})

    @router.api_route("/ui/{name}", methods=["GET", "HEAD"])
    async def file(request: Request, name: str) -> Response:
        found = files.get(name)
        if found is None or name == _PAGE:
            raise HTTPException(404, "Not Found")
        return found.answer(request)

    return router
