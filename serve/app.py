"""The FastAPI application: routes, key, body limit, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import pkgutil
from collections.abc import Awaitable, Callable
from importlib import import_module

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import serve.routes
from serve.config import ServerConfig
from serve.engine.loop import Engine, as_serve_error
from serve.errors import BadRequest, NotFound, ServeError, TooLarge, Unauthorized
from serve.routes.state import ClientGone, ServerState
from serve.wire import ErrorBody, ErrorReply

Handler = Callable[[Request], Awaitable[Response]]


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application over a started engine."""
    app = FastAPI(title="evalgate scoring server", version="1", docs_url=None, redoc_url=None)
    state = ServerState(engine, config)
    app.state.server = state
    for found in pkgutil.iter_modules(serve.routes.__path__):
        module = import_module(f"serve.routes.{found.name}")
        if hasattr(module, "router"):
            app.include_router(module.router(state))

    @app.middleware("http")
    async def guard(request: Request, call_next: Handler) -> Response:
        try:
            _authorize(request, config)
            _limit_body(request, config)
        except ServeError as error:
            return error_reply(error)
        return await call_next(request)

    @app.exception_handler(ServeError)
    async def refused(_: Request, error: ServeError) -> Response:
        return error_reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_reply(_explain(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return error_reply(NotFound(f"no route {request.method} {request.url.path}"))
        return error_reply(ServeError(str(error.detail)), status=error.status_code)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_reply(as_serve_error(error))

    return app


def _authorize(request: Request, config: ServerConfig) -> None:
    """The key of `Authorization: Bearer KEY`; /health is open, so that a watchdog needs none."""
    if config.api_key is None or request.url.path == "/health":
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), config.api_key.encode()):
        raise Unauthorized("the API key is missing or wrong: send 'Authorization: Bearer KEY'")


def _limit_body(request: Request, config: ServerConfig) -> None:
    """Refuse a body over the limit by its declared length; a chunked body is refused outright."""
    length = request.headers.get("content-length")
    if length is None:
        if request.headers.get("transfer-encoding"):
            raise BadRequest("send a body with Content-Length")
        return
    if not length.isdigit() or int(length) > config.max_body_bytes:
        raise TooLarge(f"the request body has {length} bytes, more than the limit of {config.max_body_bytes}")


def _explain(error: RequestValidationError) -> BadRequest:
    """The first problem of a body, with the field's name."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return BadRequest(f"'{where}' is not supported by this server", param=where)
    if first["type"] == "literal_error":
        return BadRequest(f"'{where}' is supported only as {first['ctx']['expected']}", param=where)
    return BadRequest(f"'{where or 'body'}': {first['msg']}", param=where or None)


def error_reply(error: ServeError, *, status: int | None = None) -> Response:
    """An error as JSON in OpenAI's shape."""
    code = status or error.status
    body = ErrorReply(error=ErrorBody(message=error.message, type=error.kind, param=error.param, code=code))
    headers = {"Retry-After": f"{error.retry_after:g}"} if error.retry_after is not None else None
    return JSONResponse(body.model_dump(), status_code=code, headers=headers)
