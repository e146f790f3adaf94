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
    try:
        directory = connection.cache.tokenizer(identity)
        if directory is None:
            archive = connection.link.ask("GET", "/nnsight/model/tokenizer").content
            directory = connection.cache.keep_tokenizer(identity, archive)
    except ValueError as error:
        raise HubError(f"The tokenizer could not be taken from the server: {error}.") from None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (ImportError, OSError, ValueError) as error:
        raise HubError(
            f"The installed transformers cannot load the server's tokenizer ({error}); install "
            "the server's version of transformers here, which hub.status() tells."
        ) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A block that uses it gets the server's.
    tokenizer._persistent_id = "Tokenizer"
    return tokenizer
