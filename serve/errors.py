"""Every error the scoring server raises on purpose.

    ServeError                 500   base; never raised itself
    ├── BadRequest             400   a field is wrong or unsupported (`param` names it)
    │   └── Mismatch           400   the models cannot be compared
    ├── NotFound               404   no such model or route
    ├── Unauthorized           401   missing or wrong key
    ├── Forbidden              403   the Host header names another server
    ├── TooSlow                408   the body did not arrive in time
    ├── TooLarge               413   the body is over the limit
    ├── Overloaded             429   too many requests at once (retry_after seconds)
    ├── Draining               503   the server is shutting down, or still loading
    ├── OutOfMemory            507   the device has no memory left for this request
    ├── ScoringFailed          422   a logit is not finite, named by sequence and position
    └── LoadFailed             -     at start: a model cannot be loaded or trusted (exit 2)

The HTTP body has OpenAI's shape: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations


class ServeError(Exception):
    """Base class: `status` is the HTTP status, `kind` OpenAI's error type."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def body(self, *, status: int | None = None) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": status or self.status,
        }


class BadRequest(ServeError):
    """A field is missing, wrong or unsupported."""

    status = 400
    kind = "invalid_request_error"


class Mismatch(BadRequest):
    """The models of a request cannot be compared: their vocabularies differ."""

    kind = "mismatch_error"


class NotFound(ServeError):
    """No such model or route."""

    status = 404
    kind = "not_found_error"


class Unauthorized(ServeError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class Forbidden(ServeError):
    """The Host header names another server: a web page may have brought a browser here."""

    status = 403
    kind = "permission_error"


class TooSlow(ServeError):
    """The request's body did not arrive in time."""

    status = 408
    kind = "invalid_request_error"


class TooLarge(ServeError):
    """The request body is larger than the server takes."""

    status = 413
    kind = "invalid_request_error"


class Overloaded(ServeError):
    """Too many requests at once; try again after `retry_after` seconds."""

    status = 429
    kind = "rate_limit_error"


class Draining(ServeError):
    """The server is shutting down or still loading, and takes no request."""

    status = 503
    kind = "server_error"


class OutOfMemory(ServeError):
    """The device has no memory left for this request."""

    status = 507
    kind = "server_error"


class ScoringFailed(ServeError):
    """A logit is not finite: the model or its kernels are broken at the named place."""

    status = 422
    kind = "scoring_error"


class LoadFailed(ServeError):
    """A model cannot be loaded, or what was loaded cannot be trusted."""

    kind = "load_error"


class ClientGone(Exception):
    """The client went away before its answer was ready."""
