"""What can go wrong in the engine process, each with its HTTP status and a sentence."""

from __future__ import annotations


class EngineError(Exception):
    """An error whose message is a sentence for the person at the notebook.

    Attributes
    ----------
    status
        The HTTP status it is answered with.
    reason
        The short HTTP reason.
    """

    status = 500
    reason = "Engine error"


class BadBodyError(EngineError):
    """The body is not what ``RequestModel.serialize`` or ``edit`` makes."""

    status = 400
    reason = "Bad body"


class OtherModelError(EngineError):
    """The trace was written for a model with another tree."""

    status = 409
    reason = "Other model"


class TraceTimeoutError(EngineError):
    """The trace took longer than the server lets one run."""

    status = 504
    reason = "Trace timeout"


class TooLargeError(EngineError):
    """A body is larger than the engine accepts."""

    status = 413
    reason = "Too large"


class EngineDownError(EngineError):
    """vLLM's engine core has died; this process is about to end."""

    status = 503
    reason = "Engine down"


class ConfigError(EngineError):
    """The engine cannot be built from its configuration."""
