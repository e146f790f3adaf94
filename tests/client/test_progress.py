"""The line of a long trace: it comes late, says what happens, and leaves nothing behind."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_server import TOKEN, FakeServer, result, state

from jupyter_nnsight_serve import connect
from jupyter_nnsight_serve.client import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stderr; not a fixture, because pytest puts its own back."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def slow(seen: Any) -> Iterator[bytes]:
    yield state(state="queued", place=3)
    time.sleep(0.9)
    yield state(state="running", tokens=1)
    time.sleep(0.4)
    yield state(state="running", tokens=12)
    time.sleep(0.4)
    frames = result({"x": torch.zeros(500_000)}, part=500_000)
    yield frames[0]
    time.sleep(0.4)
    yield from frames[1:]


def last_line(text: str) -> str:
    """What stays visible of a line that was drawn over and over."""
    shown: list[str] = []
    for piece in text.split("\r"):
        shown[: len(piece)] = piece
    return "".join(shown).replace("\x1b[A", "").strip()


def test_a_long_trace_has_a_line_and_a_short_one_has_none(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched(monkeypatch)
    model = connect(server.url, TOKEN).model
    with model.trace("a"):
        x = model.logits.save()
    assert terminal.getvalue() == ""
    server.answer = slow
    with model.trace("a"):
        x = model.logits.save()
    text = terminal.getvalue()
    for expected in ("queued at place 3", "running, 1 token ", "running, 12 tokens", "receiving "):
        assert expected in text, text
    assert "of 2.0 MB" in text and last_line(text) == ""
    assert server.traces()[-1].headers["Nnsight-Progress"] == "1"


def test_it_is_gone_after_an_error_too(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)

    def failing(seen: Any) -> Iterator[bytes]:
        yield state(state="running", tokens=1)
        time.sleep(1)

    server.answer = failing
    model = connect(server.url, TOKEN).model
    with pytest.raises(ConnectionError):
        with model.trace("a"):
            x = model.logits.save()
    assert "running" in terminal.getvalue() and last_line(terminal.getvalue()) == ""


def test_no_line_where_nobody_wants_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    server.answer = slow
    model = connect(server.url, TOKEN, progress=False).model
    with model.trace("a"):
        x = model.logits.save()
    assert terminal.getvalue() == ""
    assert "Nnsight-Progress" not in server.traces()[-1].headers


def test_traces_from_threads_share_one_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched(monkeypatch)
    server.answer = slow
    model = connect(server.url, TOKEN).model

    def one(number: int) -> Any:
        with model.trace([number]):
            x = model.logits.save()
        return x.shape

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [(500_000,)] * 3
    text = terminal.getvalue()
    for expected in ("3 traces: 3 queued (", "3 traces: 3 running, 36 tokens (", "receiving"):
        assert expected in text, text
    assert "queued at place" not in text and last_line(text) == ""
    assert "\n" not in text and "\x1b[A" not in text


def test_what_blocks_say_stands_clear_of_the_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = watched(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)
    lines: list[str] = []
    made = progress._bar
    monkeypatch.setattr(progress, "_bar", lambda text: lines.append(text) or made(text))

    def answer(seen: Any) -> Iterator[bytes]:
        time.sleep(0.8)
        if len(server.traces()) == 1:
            yield state(state="running", tokens=1)
            time.sleep(1.5)
        yield from result({"x": 1}, said=[["stdout", "the block says hello\n"]])

    server.answer = answer
    model = connect(server.url, TOKEN).model

    def one(number: int) -> None:
        time.sleep(number * 0.3)
        with model.trace([number]):
            x = model.logits.save()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))
    shown = [last_line(line) for line in terminal.getvalue().split("\n")]
    assert shown == ["the block says hello", "the block says hello", ""]
    # The line stayed for the trace that went on when the other had ended.
    assert len(lines) == 1
