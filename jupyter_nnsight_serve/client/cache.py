"""What is kept on disk between kernels: the served model's description and its tokenizer.

Neither is secret, and both are only ever a copy: a cache that cannot be written or read is no
cache, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_KEPT = 16
"""Models, and tokenizers, that are kept; the longest unused go first."""

_SIZES = ".sizes.json"
"""The file beside a tokenizer's own that names them, with their sizes in bytes."""


class Cache:
    """A directory of trees and tokenizers.

    Parameters
    ----------
    directory
        Where; Jupyter's data directory if None.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory if directory is not None else _default_directory()

    # The model's description, by server.

    def model(self, url: str) -> tuple[str, dict[str, Any]] | None:
        """The ETag and description last seen at ``url``."""
        try:
            kept = json.loads(self._model_file(url).read_text())
            etag, description = kept["etag"], kept["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(etag, str) or not isinstance(description, dict):
            return None
        if not isinstance(description.get("tree"), dict):
            return None
        with contextlib.suppress(OSError):
            os.utime(self._model_file(url))
        return etag, description

    def keep_model(self, url: str, etag: str, description: dict[str, Any]) -> None:
        """Keep what ``url`` said its model is."""
        file = self._model_file(url)
        text = json.dumps({"etag": etag, "model": description})
        with contextlib.suppress(OSError):
            self._folder(file.parent)
            handle, temporary = tempfile.mkstemp(dir=file.parent)
            try:
                with os.fdopen(handle, "w") as stream:
                    stream.write(text)
                os.replace(temporary, file)
            except OSError:
                os.unlink(temporary)
                raise
            _prune(file.parent)

    def _model_file(self, url: str) -> Path:
        return self.directory / "models" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"

    # Tokenizers, by id.

    def tokenizer(self, identity: str) -> Path | None:
        """The directory of a kept tokenizer, if all its files are there."""
        directory = self._tokenizer_directory(identity)
        try:
            sizes = json.loads((directory / _SIZES).read_text())
            whole = all((directory / name).stat().st_size == sizes[name] for name in sizes)
        except (OSError, ValueError, TypeError):
            return None
        if not whole:
            return None
        with contextlib.suppress(OSError):
            os.utime(directory)
        return directory

    def keep_tokenizer(self, identity: str, archive: bytes) -> Path:
        """Unpack a tokenizer and return its directory; a temporary one if it cannot be kept.

        Raises
        ------
        ValueError
            The archive is not the one of that id, or would write outside its directory.
        """
        if hashlib.sha256(archive).hexdigest() != identity:
            raise ValueError("the tokenizer that came is not the one that was announced")
        directory = self._tokenizer_directory(identity)
        try:
            self._folder(directory.parent)
            temporary = Path(tempfile.mkdtemp(dir=directory.parent))
        except OSError:
            temporary = Path(tempfile.mkdtemp(prefix="nnsight-serve-"))
            _unpack(archive, temporary)
            return temporary
        try:
            _unpack(archive, temporary)
            if self.tokenizer(identity) is None:
                # What is left of one, of which files are missing.
                shutil.rmtree(directory, ignore_errors=True)
            os.replace(temporary, directory)
        except OSError:
            # Another kernel was first, or the disk is full.
            shutil.rmtree(temporary, ignore_errors=True)
            if not directory.is_dir():
                raise
        except ValueError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _prune(directory.parent)
        return directory

    def drop_tokenizer(self, identity: str) -> None:
        """Keep a tokenizer no longer."""
        shutil.rmtree(self._tokenizer_directory(identity), ignore_errors=True)

    def _tokenizer_directory(self, identity: str) -> Path:
        if not identity.isalnum():
            raise ValueError("the server's id of its tokenizer is not one")
        return self.directory / "tokenizers" / identity

    def _folder(self, folder: Path) -> None:
        for path in (self.directory, folder):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)


def _unpack(archive: bytes, directory: Path) -> None:
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        for entry in zipped.infolist():
            parts = Path(entry.filename).parts
            if entry.is_dir():
                continue
            if not parts or ".." in parts or Path(entry.filename).is_absolute():
                raise ValueError("the tokenizer's archive holds a file outside of it")
            target = directory.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(zipped.read(entry))
            sizes[target.relative_to(directory).as_posix()] = entry.file_size
    (directory / _SIZES).write_text(json.dumps(sizes))


def _prune(folder: Path) -> None:
    """Remove what was used longest ago."""
    with contextlib.suppress(OSError):
        entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in entries[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)


def _default_directory() -> Path:
    try:
        from jupyter_core.paths import jupyter_data_dir

        return Path(jupyter_data_dir()) / "nnsight-serve"
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "jupyter-nnsight-serve"
