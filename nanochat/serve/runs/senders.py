"""Says who may start runs, and see with which commands they were started."""

from urllib.parse import urlsplit

from fastapi import Request

from nanochat.serve.connections import comes_from_here
from nanochat.serve.routes.fields import ApiError


def check_sender(request: Request, has_key: bool) -> None:
    """Raise ApiError (403, 415) unless a page of this server or a program has sent a request.

    A server with a key gets no request without it, and a page of another site cannot know the key,
    which comes in a header. Without a key, the client and the name of the server must be those of
    this machine, and a page must be one of this server: a browser tells the site of the page that
    asks. A body must be called JSON, which no form of another site can send.
    """
    if not has_key:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != host):
            text = "a page of another site may not use this: open /runs of this server"
            raise ApiError(403, "other_site", text)
        if not comes_from_here(request):
            text = "without a key, only this machine may use this, as 127.0.0.1: set --api_key"
            raise ApiError(403, "needs_key", text)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise ApiError(415, "not_json", "the body must be sent as Content-Type: application/json")
