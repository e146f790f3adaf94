"""Reads what the engine process prints: its log, and its events while it starts."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any

EVENT_MARK = "@engine "

# A line longer than this is cut: a client's print may be of any length.
_LINE_BYTES = 16 * 1024
# EngineCore's traceback and that of the process above it come after the line that tells the cause.
_KEPT_LINES = 400

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# vLLM: "INFO 12-01 10:00:00 [core.py:58] text", after a "(EngineCore pid=1)" in its processes.
_LEVEL = re.compile(r"^(?:\([^)]*\)\s*)?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
# The last line of a traceback, with or without vLLM's log mark before it.
_RAISED = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)$")
# What vLLM prints of a step that failed: every request in it, with its block and its prompt.
_DUMP = re.compile(r"Dumping (?:scheduler output|input data)[^:]*:|serve_block")
# What vLLM's front process says when EngineCore failed: true, and no cause.
_NO_CAUSE = re.compile(r"see (?:the )?(?:root cause|stack trace|log)", re.IGNORECASE)


class EngineOutput:
    """Cuts the engine's output into lines, logs each, and hands events on.

    Parameters
    ----------
    log
        Gets every line, marked with `[engine]`.
    on_event
        Gets the JSON object of each event line.
    """

    def __init__(
        self,
        log: logging.Logger | logging.LoggerAdapter[Any],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._log = log
        self._on_event = on_event
        self._pending = bytearray()
        self._cut = False
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take what came through the pipe."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(line)
            self.flush()
        self._add(rest)

    def flush(self) -> None:
        """Take what came so far as a line."""
        raw, cut = bytes(self._pending), self._cut
        self._pending.clear()
        self._cut = False
        # A progress bar rewrites its line; what it showed last is the line.
        text = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
        text = _ANSI.sub("", text).rstrip()
        if text:
            self._line(text + (" [cut]" if cut else ""))

    def reason(self, told: str) -> str:
        """The reason of an engine that failed: what it told, or the log line that it points to."""
        return self.cause().removeprefix(": ") or told if _NO_CAUSE.search(told) else told

    def cause(self) -> str:
        """ ": " and the line that most likely says why the engine ended, or nothing."""
        for line in reversed(self.lines):
            found = _RAISED.search(line)
            if found and not _NO_CAUSE.search(line):
                return f": {found.group(1)}"
        for line in reversed(self.lines):
            level = _LEVEL.match(line)
            if level and level.group(1) in ("ERROR", "CRITICAL") and not _NO_CAUSE.search(line):
                return f": {line}"
        return f": {self.lines[-1]}" if self.lines else ""

    def _add(self, piece: bytes) -> None:
        room = _LINE_BYTES - len(self._pending)
        self._pending += piece[:room]
        self._cut = self._cut or len(piece) > room

    def _line(self, text: str) -> None:
        dumped = _DUMP.search(text)
        if dumped:
            text = f"{text[: dumped.end()]} [left out, for it holds the bodies of requests]"
        if text.startswith(EVENT_MARK):
            try:
                event = json.loads(text[len(EVENT_MARK) :])
            except ValueError:
                event = None
            if isinstance(event, dict):
                self._on_event(event)
                return
        self.lines.append(text)
        level = _LEVEL.match(text)
        number = logging.getLevelNamesMapping()[level.group(1)] if level else logging.INFO
        self._log.log(number, "[engine] %s", text)
