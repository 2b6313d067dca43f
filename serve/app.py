"""The FastAPI application: the guard, the routes, and errors in OpenAI's shape."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import serve.api.routes
from serve.api.chat import check_parsers
from serve.api.guard import Guard
from serve.api.replies import ChatChunk, CompletionChunk
from serve.api.sending import SCHEMAS, error_reply
from serve.config import ServerConfig
from serve.engine.loop import Engine, as_serve_error
from serve.engine.metrics import Metrics
from serve.errors import BadRequest, ClientGone, NotFound, ServeError
from serve.state import ServerState
from serve.wire import ErrorReply

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "refused"}, "5XX": {"description": "failed"}}


class _Application(FastAPI):
    """FastAPI, with a schema that has errors as they are sent (JSON whatever the route answers otherwise) and the
    chunks of streams. OpenAPI 3.2 is the first that can describe a stream's events."""

    def openapi(self) -> dict[str, Any]:
        """The schema of all routes."""
        schema = super().openapi()
        body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
        for operations in schema["paths"].values():
            for operation in operations.values():
                for code in _ERRORS:
                    operation["responses"][code]["content"] = body
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for model in (ErrorReply, CompletionChunk, ChatChunk):
            document = model.model_json_schema(ref_template=SCHEMAS, mode="serialization")
            schemas |= {**document.pop("$defs"), **schemas, model.__name__: document}
        return schema


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application over a started engine. Raises LoadFailed for an unknown parser name."""
    check_parsers(config)
    app = _Application(title="evalgate scoring server", version="1", docs_url=None, redoc_url=None, responses=_ERRORS)
    state = ServerState(engine, config, Metrics(engine))
    app.openapi_version = "3.2.0"
    app.state.server = state
    for found in pkgutil.iter_modules(serve.api.routes.__path__):
        module = import_module(f"serve.api.routes.{found.name}")
        if hasattr(module, "router"):
            app.include_router(module.router(state))
    paths = frozenset(app.openapi()["paths"])
    app.add_middleware(Guard, state=state, paths=paths)

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
        refusal = BadRequest if error.status_code < 500 else ServeError
        reply = error_reply(refusal(str(error.detail)), status=error.status_code)
        reply.headers.update(error.headers or {})
        return reply

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return error_reply(as_serve_error(error))

    return app


def _explain(error: RequestValidationError) -> BadRequest:
    """The first problem of a body, with the field's name."""
    first, *others = _nearest(error.errors())
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not JSON: {first['ctx']['error']} (byte {first['loc'][-1]})")
    where = ".".join(map(str, _place(first)))
    if first["type"] == "extra_forbidden":
        return BadRequest(f"'{where}' is not supported by this server", param=where)
    if first["type"] == "literal_error":
        return BadRequest(f"'{where}' is supported only as {first['ctx']['expected']}", param=where)
    said = " or ".join(dict.fromkeys([first["msg"], *(e["msg"].removeprefix("Input should be ") for e in others)]))
    given = first.get("input")
    value = f" (it is {given})" if isinstance(given, int | float) and not _of_type(first) else ""
    return BadRequest(f"'{where or 'body'}': {said}{value}", param=where or None)


def _nearest(errors: Sequence[Any]) -> list[Any]:
    """The errors of the first field that has some; of a union, those of the branch that came furthest.

    A branch whose types fit and whose value does not came further than one with other types, and among those the one
    that is wrong at a later item did. Several are left where no branch came further than another.
    """
    first = errors[0]
    if not any(_is_branch(part) for part in first["loc"]):
        return [first]
    field = first["loc"][: next(i for i, part in enumerate(first["loc"]) if _is_branch(part))]
    of_field = [e for e in errors if e["loc"][: len(field)] == field]

    def reached(found: Any) -> tuple[bool, list[int]]:
        return not _of_type(found), [part for part in found["loc"] if isinstance(part, int)]

    best = max(map(reached, of_field))
    return [e for e in of_field if reached(e) == best]


def _of_type(found: Any) -> bool:
    return str(found["type"]).endswith("_type")


def _place(found: Any) -> list[int | str]:
    return [part for part in found["loc"] if part != "body" and not _is_branch(part)]


def _is_branch(part: int | str) -> bool:
    """Whether a part of an error's place is pydantic's name for a branch of a union, and no field."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or part.startswith("constrained-"))
