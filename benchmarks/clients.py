"""Either client, in a process of its own: what its traces look like, and its edits.

    python -m benchmarks.clients stock MODEL
    python -m benchmarks.clients ours URL TOKEN

Orders: "bodies" writes ``FOLDER/WORK/NUMBER``, a body each, and answers with the bytes of a body,
the seconds that writing one takes and the headers that go with it; "sized" does so for a trace that saves
so many bytes; "edits" installs so many edits on a server, "clear" removes them.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nnsight.tracing.backend import Backend

from .lines import Answers, Order
from .work import VARIANTS, WORK, prompt


class Capture(Backend):
    """Serializes a trace and sends it nowhere."""

    def __init__(self, serialize: Any) -> None:
        self.serialize = serialize

    def __call__(self, tracer: Any) -> None:
        begun = time.perf_counter()
        self.body: bytes = self.serialize(tracer)
        self.seconds = time.perf_counter() - begun


class Client:
    """A client's model and what is done with it.

    Parameters
    ----------
    model
        What traces are written against.
    serialize
        Makes a body of a tracer.
    headers
        What the client sends along.
    """

    def __init__(self, model: Any, serialize: Any, headers: dict[str, str]) -> None:
        self.model = model
        self.serialize = serialize
        self.headers = headers

    def bodies(self, folder: str) -> Order:
        """Write the bodies of all kinds of work."""
        about: Order = {"headers": self.headers, "bytes": {}, "seconds": {}}
        for work in WORK.values():
            target = Path(folder) / work.name
            target.mkdir(parents=True, exist_ok=True)
            taken = []
            for number in range(VARIANTS):
                capture = Capture(self.serialize)
                work.write(self.model, prompt(number), capture)
                (target / str(number)).write_bytes(capture.body)
                taken.append(capture.seconds)
            sizes = [file.stat().st_size for file in target.iterdir()]
            about["bytes"][work.name] = statistics.median(sizes)
            about["seconds"][work.name] = statistics.median(taken)
        return about

    def sized(self, folder: str, size: int) -> Order:
        """Write the body of a trace that saves so many bytes."""
        capture = Capture(self.serialize)
        with self.model.trace(prompt(0, 8), max_tokens=1, temperature=0.0, backend=capture):
            first = self.model.logits
            saved = first.new_zeros(size // first.element_size()).save()
        target = Path(folder) / f"save {size}"
        target.mkdir()
        (target / "0").write_bytes(capture.body)
        return {}

    def edits(self, count: int, **where: str) -> Order:
        """Install so many edits, each of another layer."""
        layers = self.model.model.layers
        for number in range(count):
            layer = layers[number % len(layers)]
            with self.model.edit(**where) as (_, edit):
                layer.output[0][:] += 0.001
        return {}

    def clear(self) -> Order:
        """Remove the edits."""
        self.model.clear_edits()
        return {}

    def __call__(self, order: Order) -> Order:
        method = getattr(self, order.pop("do"))
        found: Order = method(**order)
        return found


def stock(model: str) -> Client:
    """nnsight's client."""
    import torch

    if not torch.accelerator.is_available():
        # What vLLM needs to build a meta tree on a host without an accelerator.
        torch.accelerator.empty_cache = lambda *args, **kwargs: None
        torch.accelerator.synchronize = lambda *args, **kwargs: None
    from nnsight.modeling.vllm import VLLM
    from nnsight.schema.request import RequestModel

    def serialize(tracer: Any) -> bytes:
        body: bytes = RequestModel.serialize(tracer, compress=False)
        return body

    return Client(VLLM(model, max_model_len=512), serialize, {"nnsight-compress": "False"})


def ours(url: str, token: str) -> Client:
    """This project's client."""
    from jupyter_nnsight_serve import connect
    from jupyter_nnsight_serve.client import frames
    from jupyter_nnsight_serve.client.body import trace_body

    model = connect(url, token).model
    headers = {
        "Accept": frames.MEDIA_TYPE,
        "Nnsight-Tree": model.tree_id,
        "Nnsight-Model": quote(model.name),
    }
    return Client(model, trace_body, headers)


if __name__ == "__main__":
    kinds: dict[str, Any] = {"stock": stock, "ours": ours}
    answers = Answers()
    answers.serve(kinds[sys.argv[1]](*sys.argv[2:]))
