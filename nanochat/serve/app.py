"""Builds the web application: the routes of the API, the pages, and the files that they load."""

import asyncio
import contextlib
import importlib.resources
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import nanochat
from nanochat.serve.connections import Caps
from nanochat.serve.listening import App, Guard
from nanochat.serve.models import Loadable
from nanochat.serve.routes import tokens
from nanochat.serve.routes.answers import error
from nanochat.serve.routes.anthropic.request import count_tokens, read_messages
from nanochat.serve.routes.chat import read_chat
from nanochat.serve.routes.completions import read_completion
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs.control import Control
from nanochat.serve.runs.routes import Runs
from nanochat.serve.runs.starter import Starter
from nanochat.serve.server import ChatServer, Settings

SCRIPTS = (
    "about.js",
    "app.js",
    "client.js",
    "sse.js",
    "chats/check.js",
    "chats/conversation.js",
    "chats/exchange.js",
    "chats/files.js",
    "chats/kept.js",
    "chats/pair.js",
    "chats/panel.js",
    "chats/store.js",
    "chats/tree.js",
    "language/i18n.js",
    "language/names.js",
    "language/phrases.js",
    "language/words.js",
    "reply/dom.js",
    "reply/draw.js",
    "reply/inline.js",
    "reply/markdown.js",
    "reply/saw.js",
    "reply/tokens.js",
    "reply/turn.js",
    "runs/chart.js",
    "runs/control.js",
    "runs/feed.js",
    "runs/figures.js",
    "runs/form.js",
    "runs/list.js",
    "runs/runs.js",
    "runs/samples.js",
    "runs/started.js",
    "runs/words.js",
    "settings/drawer.js",
    "settings/values.js",
)
STYLES = (
    "style.css",
    "chats/panel.css",
    "reply/markdown.css",
    "reply/pair.css",
    "reply/reply.css",
    "runs/control.css",
    "runs/runs.css",
    "settings/settings.css",
)
PAGES = ("index.html", "runs/index.html")
ASSETS = {
    **dict.fromkeys(SCRIPTS, "text/javascript"),
    **dict.fromkeys(STYLES, "text/css"),
    "favicon.svg": "image/svg+xml",
}


def assets() -> Mapping[str, bytes]:
    """Return the pages in web/ and the files that they load, as a dict from name to content."""
    folder = importlib.resources.files("nanochat.serve") / "web"
    return {name: (folder / name).read_bytes() for name in (*PAGES, *ASSETS)}


def create_app(models: Sequence[Loadable], settings: Settings) -> App:
    """Return the web application, which starts the engine threads, and stops them when it ends."""
    server = ChatServer(models, settings)
    files = assets()
    runs = None
    if settings.runs is not None:
        starter = Starter(settings.runs) if settings.starts else None
        runs = Runs(settings.runs, settings.page, starter, bool(settings.api_key))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for thread in server.models.threads:
            thread.start()
        yield
        server.close()
        if runs is not None:
            runs.close()
        await asyncio.gather(*(thread.stop() for thread in server.models.threads))

    app = _application(lifespan)
    if settings.page:
        _add_pages(app, {"/": files["index.html"]}, files)
    if runs is not None:
        _add_pages(app, {"/runs": files["runs/index.html"]}, files)
        _add_runs(app, runs)
    _add_api(app, server)
    _answer_head(app)
    guarded: ASGIApp = Guard(app, settings.hosts, settings.api_key)
    if settings.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Skipped-Tools", "Retry-After"],
        )
    return App(guarded, server.models.threads, settings.caps)


def _add_api(app: FastAPI, server: ChatServer) -> None:
    """Add the routes of the API to `app`."""
    app.add_api_route("/health", server.health)
    app.add_api_route("/metrics", server.metrics_text)
    app.add_api_route("/tokenizer_info", server.tokenizer_info)
    app.add_api_route("/v1/models", server.list_models)
    app.add_api_route("/v1/models/{name:path}", server.model)
    posts = {
        "/v1/chat/completions": server.generating(read_chat, large=True),
        "/v1/completions": server.generating(read_completion),
        "/v1/responses": server.respond,
        "/v1/messages": server.generating(read_messages, large=True),
        "/v1/messages/count_tokens": server.encoding(count_tokens, large=True),
        "/tokenize": server.encoding(tokens.tokenize),
        "/detokenize": server.encoding(tokens.detokenize),
    }
    for path, route in posts.items():
        app.add_api_route(path, route, methods=["POST"])
    app.add_api_route("/v1/responses/{number}", server.response)
    app.add_api_route("/v1/responses/{number}", server.remove_response, methods=["DELETE"])


def _add_runs(app: FastAPI, runs: Runs) -> None:
    """Add the routes of the page of runs, and if it has a starter those that start and stop runs."""
    runs.add_to(app)
    if runs.starter is not None:
        Control(runs, runs.starter).add_to(app)


def create_runs_app(
    base: Path,
    hosts: tuple[str, ...],
    api_key: str,
    starts: bool = False,
) -> App:
    """Return an application without a model, whose only page shows the runs under `base`.

    If `starts` is true, the page also starts, resumes and stops runs.
    """
    runs = Runs(base, False, Starter(base) if starts else None, bool(api_key))
    files = assets()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        runs.close()

    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": nanochat.__version__})

    app = _application(lifespan)
    _add_pages(app, dict.fromkeys(("/", "/runs"), files["runs/index.html"]), files)
    _add_runs(app, runs)
    app.add_api_route("/health", health)
    _answer_head(app)
    return App(Guard(app, hosts, api_key), [], Caps())


def _application(
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]],
) -> FastAPI:
    """Return an application without routes, which answers errors in the format of their route."""

    async def refused(request: Request, failure: Exception) -> Response:
        if isinstance(failure, ApiError):
            # The traceback refers to the request and to the error itself, so that only a garbage
            # collection would free them.
            failure.__traceback__ = None
        path = request.url.path
        return error(_refusal(failure, path), path)

    async def left(_: Request, failure: Exception) -> Response:
        return Response()  # nobody reads it

    # FastAPI's own documentation pages load scripts from the internet, which fails on a machine
    # without a network.
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_middleware(WithoutSlash)
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(ClientDisconnect, left)
    return app


class WithoutSlash:
    """Passes requests on without the slashes at the end of their path.

    A redirect instead would name an absolute address, with the http of this server even behind a
    proxy that speaks https, and many clients do not send the body of a POST again.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self.app(scope, receive, send)


def _answer_head(app: FastAPI) -> None:
    """Let every route of `app` that answers GET answer HEAD too; the server sends no body then."""
    for route in app.routes:
        methods = route.methods if isinstance(route, APIRoute) else None
        if methods and "GET" in methods:
            methods.add("HEAD")


def _add_pages(
    app: FastAPI,
    pages: Mapping[str, bytes],
    files: Mapping[str, bytes],
) -> None:
    """Add routes for `pages`, a dict from path to content, and for the `files` that they load."""

    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise ApiError(404, "not_found", "there is no such file: the page is at /")
        return Response(files[name], media_type=ASSETS[name])

    def page(content: bytes) -> Callable[[], Awaitable[Response]]:
        async def answer() -> Response:
            return Response(content, media_type="text/html")

        return answer

    for path, content in pages.items():
        app.add_api_route(path, page(content))
    app.add_api_route("/assets/{name:path}", asset)


def _refusal(failure: Exception, path: str) -> ApiError:
    """Return the error that a client gets for a failed request to `path`.

    The details of a fault in this server stay in its log.
    """
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, HTTPException):
        subject = f"this server has no {path[:80]}"
        if failure.status_code == 405:
            subject = (
                f"{path[:80]} answers {(failure.headers or {}).get('Allow', 'other methods')} only"
            )
        elif failure.status_code != 404:
            subject = f"{failure.detail} at {path[:80]}"
        text = f"{subject}: docs/chat.md lists the routes"
        return ApiError(failure.status_code, "not_found", text)
    return ApiError(500, "server_failed", "the server failed: its log says why")
