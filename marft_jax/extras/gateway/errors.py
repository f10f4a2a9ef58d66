"""Calls that are refused, in the format of the API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from marft_jax.errors import BadInput, one_line


class ApiError(Exception):
    """A call that is refused: a status code, and what its body says."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code or None

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        return {"error": dict(message=str(self), type=kind, param=self.param, code=self.code)}


@contextlib.contextmanager
def naming(param: str, code: str = "") -> Iterator[None]:
    """Refuses a call for bad input, with the field that has it."""
    try:
        yield
    except BadInput as error:
        raise ApiError(400, str(error), param, code) from None


def refused(error: Exception) -> ApiError:
    """Describes an error as the API reports it; one that is no fault of the caller's is 503."""
    if isinstance(error, ApiError):
        return error
    return ApiError(400 if isinstance(error, BadInput) else 503, one_line(str(error)))
