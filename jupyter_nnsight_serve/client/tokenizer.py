"""The served model's tokenizer, from the server itself: no model hub is asked."""

from __future__ import annotations

from typing import Any

from .connection import Connection
from .errors import HubError


def load(connection: Connection, about: dict[str, Any]) -> Any:
    """The tokenizer that the server describes as ``{"id", "bytes"}``; None if it has none.

    Raises
    ------
    HubError
        What came is not it, or the installed transformers cannot load it.
    """
    identity = about.get("id")
    if not identity:
        return None
    kept = _directory(connection, identity, fetch=False)
    try:
        tokenizer = _read(kept or _directory(connection, identity))
    except Exception as error:
        if kept is None:
            raise _unreadable(error) from None
        # What is kept may be broken in ways that its files' sizes do not tell.
        connection.cache.drop_tokenizer(identity)
        try:
            tokenizer = _read(_directory(connection, identity))
        except Exception as again:
            raise _unreadable(again) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A block that uses it gets the server's.
    tokenizer._persistent_id = "Tokenizer"
    return tokenizer


def _directory(connection: Connection, identity: str, fetch: bool = True) -> Any:
    """Where the tokenizer's files are; None where they are not and are not to be fetched."""
    try:
        directory = connection.cache.tokenizer(identity)
        if directory is None and fetch:
            archive = connection.link.ask("GET", "/nnsight/model/tokenizer").content
            directory = connection.cache.keep_tokenizer(identity, archive)
    except ValueError as error:
        raise HubError(f"The tokenizer could not be taken from the server: {error}.") from None
    return directory


def _read(directory: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def _unreadable(error: Exception) -> HubError:
    if isinstance(error, HubError):
        return error
    return HubError(
        f"The installed transformers cannot load the server's tokenizer ({error}); install the "
        "server's version of transformers here, which hub.status() tells."
    )
