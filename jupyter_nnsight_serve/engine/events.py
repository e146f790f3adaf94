"""What the engine process tells whoever started it, as marked lines on its standard output.

The reader believes these lines only until the engine is ready: from then on client code runs in
the workers, whose prints share the same pipe.
"""

from __future__ import annotations

import json
import os
from typing import Any

MARK = "@engine "


def emit(event: str, **fields: Any) -> None:
    """Write one event line, whole, to standard output.

    One ``write`` of less than PIPE_BUF (4096 bytes on Linux) is not torn by the lines of other
    processes on the same pipe, so long text is cut.
    """
    text = {key: value[:3000] if isinstance(value, str) else value for key, value in fields.items()}
    line = MARK + json.dumps({"event": event, **text}) + "\n"
    os.write(1, line.encode())


def stage(name: str) -> None:
    """Say what the engine is doing while it loads."""
    emit("stage", stage=name)
