"""What can go wrong, each with its HTTP status and a sentence for the person at the notebook.

A message says what happened and what to do next. It never holds a token, a path of the server or
the name of another user: it is shown in notebooks, which are shared.
"""

from __future__ import annotations

import re
from http.client import responses
from typing import Any

from tornado import web

# An absolute path of two or more parts, as it appears in a log line or an exception's text.
_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.@%+~-]+)+/([\w.@%+~-]+)")


def without_paths(text: str) -> str:
    """`text` with every absolute path cut down to its last part."""
    return _PATH.sub(r"\1", text)


class SettingError(Exception):
    """A wrong setting. Its text is one sentence that names the setting and what to do."""


class NNsightServeError(web.HTTPError):
    """An answer other than success.

    Parameters
    ----------
    message
        One or two sentences: what happened, and what to do.
    headers
        Response headers that go with the answer.
    """

    status = 500

    def __init__(self, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(self.status, message)
        self.message = message
        self.headers = headers or {}


class NoToken(NNsightServeError):
    """The request carries nothing that says who the caller is."""

    status = 401

    def __init__(self) -> None:
        super().__init__(
            "This request carries no token, so the server cannot tell who you are; pass "
            "api_key= with this Jupyter server's token (or your JupyterHub token) to trace() "
            "or edit().",
            {"WWW-Authenticate": "Bearer"},
        )


class WrongToken(NNsightServeError):
    """The request carries a token, and it is not one this server accepts."""

    status = 403

    def __init__(self) -> None:
        super().__init__(
            "The token of this request is not one this server accepts: it is mistyped, expired "
            "or for another server; pass api_key= with this Jupyter server's current token (or "
            "your JupyterHub token)."
        )


class NoAccess(NNsightServeError):
    """The Hub knows whose token this is, and the token does not give access to this server.

    Parameters
    ----------
    service
        The name of the Hub service that this server is; None for a user's server.
    """

    status = 403

    def __init__(self, service: str | None) -> None:
        scope = f"access:services!service={service}" if service else "access:servers"
        super().__init__(
            f"JupyterHub knows this token, and it does not carry the scope {scope} for this "
            "server: either you are not in a group that may use the server, which its admin can "
            "change, or the token was made without that scope (a notebook's own token has the "
            "scopes of c.Spawner.server_token_scopes, from the notebook server's next start on)."
        )


class Tokenless(NNsightServeError):
    """The server has no token that a request could carry.

    Parameters
    ----------
    how
        How it runs instead.
    """

    status = 403

    def __init__(self, how: str) -> None:
        super().__init__(
            f"This Jupyter server runs {how}, and it takes traces and edits with a token only, so "
            "that no web page can run code on it; its owner can start it with one, "
            "--IdentityProvider.token=TOKEN."
        )


class CrossSite(NNsightServeError):
    """A request that a browser cookie authenticates and that another site may have caused."""

    status = 403

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; from a browser page send the _xsrf cookie's value in the X-XSRFToken "
            "header, and from a notebook or a script pass api_key= with a token."
        )


class NotAllowed(NNsightServeError):
    """The caller is known, and the server's rules do not let the caller do this."""

    status = 403


class NotFound(NNsightServeError):
    """No such resource; the message names the right one."""

    status = 404


class WrongMethod(NNsightServeError):
    """The path is right and the HTTP method is not."""

    status = 405


class BadRequest(NNsightServeError):
    """The request is not one this resource understands."""

    status = 400


class TooLarge(NNsightServeError):
    """A request body over `max_request_bytes`.

    Parameters
    ----------
    size, limit
        Bytes of the body (of what came so far, when its length was not announced) and of the limit.
    announced
        Whether `size` is the whole body.
    """

    status = 413

    def __init__(self, size: int, limit: int, *, announced: bool) -> None:
        have = f"is {size} bytes" if announced else f"passed {size} bytes before it ended"
        super().__init__(
            f"The request body {have} and max_request_bytes allows {limit} bytes; send less "
            "with the block (large tensors it captures travel with it) or ask the server's "
            "admin to raise c.NNsightServe.max_request_bytes."
        )


class TooManyTraces(NNsightServeError):
    """The caller has as many traces waiting as `max_user_waiting` allows."""

    status = 429

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"You have {limit} traces here that are still waiting for their turn, and "
            "max_user_waiting allows no more; send the next ones as these come back.",
            {"Retry-After": "5"},
        )


class Stalled(NNsightServeError):
    """A request whose body stopped coming."""

    status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"Nothing of this request's body came for {seconds:g} s (stall_timeout), so the server "
            "stopped waiting for it; send it again over a connection that holds."
        )


class NoRoom(NNsightServeError):
    """The server cannot keep a body until its turn."""

    status = 507

    def __init__(self, error: OSError) -> None:
        super().__init__(
            "The server's disk does not take this request's body now "
            f"({error.strerror or type(error).__name__}); send less with the block, try again "
            "later, or tell the server's admin."
        )


class EngineUnavailable(NNsightServeError):
    """No engine to run on: it is stopped, starting, failed, or was lost during the request.

    Parameters
    ----------
    message
        Which of these, why, and what to do.
    retry_after
        Seconds after which trying again makes sense; None where it does not.
    """

    status = 503

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(message, headers)
        self.retry_after = retry_after


class TraceTimeout(NNsightServeError):
    """The engine did not answer within `trace_timeout` seconds."""

    status = 504

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The engine did not answer within trace_timeout ({seconds:g} s), so the request "
            "was stopped; generate fewer tokens or save less, or ask the server's admin to "
            "raise c.NNsightServe.trace_timeout."
        )


def body_of(status: int, message: str) -> dict[str, Any]:
    """The JSON of an error; `detail` repeats `message` because the stock client reads only it."""
    return {"message": message, "reason": responses.get(status, "Error"), "detail": message}


def message_of(status: int, error: BaseException | None) -> str:
    """The sentence for an answer of `status`, whatever raised it."""
    if isinstance(error, NNsightServeError):
        return error.message
    if isinstance(error, web.HTTPError):
        said = error.get_message()
        if said:
            return said
        if status >= 500:
            return "The server could not check who you are; try again in a minute."
        return f"The server refused this request: {responses.get(status, status)}."
    return (
        "The server made a mistake while it handled this request; its log says more, so tell "
        "the server's admin when it happened."
    )
