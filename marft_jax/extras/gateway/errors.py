"""Calls that are refused, in the format of the API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A call that is refused: a status code, and what its body says."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code or None

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, usual)
        fields = dict(message=str(self), type=kind, param=self.param, code=self.code)
        return {"error": fields}
