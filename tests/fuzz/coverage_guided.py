"""Coverage-guided inputs for the parts that take bytes apart, with atheris.

    python tests/fuzz/coverage_guided.py TARGET [libFuzzer's options, such as -runs=100000]

ends with another code than 0, and the input that did it, when a target raises what it must not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["jupyter_nnsight_serve"]):
    from jupyter_nnsight_serve.client.address import read_address
    from jupyter_nnsight_serve.client.errors import HubError
    from jupyter_nnsight_serve.client.frames import FrameError, FrameReader
    from jupyter_nnsight_serve.edits import check_id
    from jupyter_nnsight_serve.engine.scan import DamagedPickleError, RefusedGlobalError, Scan
    from jupyter_nnsight_serve.errors import BadRequest
    from jupyter_nnsight_serve.framed import FrameWatch
    from jupyter_nnsight_serve.paths import advice

SCAN = Scan()


def scan(data: bytes) -> None:
    """A body is refused by name, or passes."""
    try:
        SCAN.check(data)
    except (RefusedGlobalError, DamagedPickleError):
        return


def frames(data: bytes) -> None:
    """Both readers of frames agree, and neither depends on how the bytes are cut."""
    cut = data[0] + 1 if data else 1
    whole, pieces = FrameWatch(), FrameWatch()
    whole.feed(data)
    reader = FrameReader(lambda part: None)
    try:
        for start in range(0, len(data), cut):
            pieces.feed(data[start : start + cut])
            list(reader.feed(data[start : start + cut]))
    except FrameError:
        return
    assert whole.between_frames == pieces.between_frames == reader.between_frames
    assert whole.ended == pieces.ended
    told = whole.told()
    assert all(isinstance(value, str) for value in told.values())


def names(data: bytes) -> None:
    """An id, a path and an address are taken or refused in a sentence."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        check_id(text)
    except BadRequest:
        pass
    assert len(advice(text, "/base/")) < 1200
    try:
        read_address(text)
    except HubError:
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {"scan": scan, "frames": frames, "names": names}


if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
