"""A server that speaks the client's protocol and runs nothing: each test says what it answers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import pickle
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

FRAMES = "application/vnd.nnsight-serve.frames"
TOKEN = "secret-token-of-the-tests"


def frame(kind: str, payload: bytes = b"") -> bytes:
    return kind.encode() + len(payload).to_bytes(4, "little") + payload


def state(**fields: Any) -> bytes:
    return frame("S", json.dumps(fields).encode())


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.pickles: list[dict[str, Any]] = []
        self.data = b""

    def place(self, raw: bytes) -> int:
        offset = len(self.data)
        self.data += raw + bytes(-len(raw) % 64)
        return offset

    def tensor(self, value: torch.Tensor) -> int:
        raw = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
        self.tensors.append(
            {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "offset": self.place(raw),
                "nbytes": len(raw),
            }
        )
        return len(self.tensors) - 1

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensor(value)}
        for kind, tag in ((torch.Size, "size"), (list, "list"), (tuple, "tuple"), (set, "set")):
            if type(value) is kind:
                return {tag: [self.value(item) for item in value]}
        if type(value) is dict:
            return {"dict": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if (kind := type(value).__name__) == "CacheView":
            return {"view": [value._node_path(), self.value(value._cache)]}
        if kind == "Cache":
            fields = value.__getstate__()
            del fields["model"], fields["_open"]
            return {"cache": {name: self.value(part) for name, part in fields.items()}}
        if kind == "Entry":
            return {"entry": [self.value(value.output), self.value(value.inputs)]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, Rec):
            fields = {name: self.value(item) for name, item in value.fields.items()}
            return {"record": value.kind, "fields": fields}
        raw = value.raw if isinstance(value, Raw) else self.pickled(value)
        self.pickles.append({"offset": self.place(raw), "nbytes": len(raw)})
        return {"pickle": len(self.pickles) - 1}

    def pickled(self, value: Any) -> bytes:
        encoder, buffer = self, io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj: Any) -> Any:
                return ("tensor", encoder.tensor(obj)) if isinstance(obj, torch.Tensor) else None

        Pickler(buffer, protocol=5).dump(value)
        return buffer.getvalue()


@dataclass
class Rec:
    """One of vLLM's result objects."""

    kind: str
    fields: dict[str, Any]


@dataclass
class Raw:
    """Bytes of a pickle."""

    raw: bytes


def encoded(saves: dict[str, Any] | None = None, **header: Any) -> bytes:
    """A result."""
    encoder = _Encoder()
    values = {name: encoder.value(value) for name, value in (saves or {}).items()}
    head = json.dumps(
        {
            "saves": values,
            "error": None,
            "said": [],
            "tensors": encoder.tensors,
            "pickles": encoder.pickles,
            "prompt_tokens": 1,
            "generated_tokens": 1,
            **header,
        }
    ).encode()
    fixed = b"NNSERVE1" + len(head).to_bytes(8, "little") + head
    return fixed + bytes(-len(fixed) % 64) + encoder.data


def result(saves: dict[str, Any] | None = None, part: int = 1000, **header: Any) -> list[bytes]:
    """The frames of a result, in parts of `part` bytes."""
    whole = encoded(saves, **header)
    parts = [whole[at : at + part] for at in range(0, len(whole), part)]
    return [*(frame("R", piece) for piece in parts), frame("Z", b'{"outcome": "ok"}')]


def error_of(type_name: str, message: str, traceback: str = "") -> dict[str, Any]:
    return {
        "type_name": type_name,
        "message": message,
        "traceback": traceback,
        "is_control_flow": type_name == "EarlyStopException",
    }


def module(name: str, extra: str = "", where: str = "vllm.models", **children: Any) -> Any:
    return {"class": name, "module": where, "extra": extra, "children": children}


def _layer() -> Any:
    attention = module(
        "LlamaAttention",
        qkv_proj=module("QKVParallelLinear", "in_features=64, output_features=192"),
        o_proj=module("RowParallelLinear"),
    )
    mlp = module("LlamaMLP", gate_up_proj=module("MergedColumnParallelLinear"))
    return module("LlamaDecoderLayer", self_attn=attention, mlp=mlp)


TREE = module(
    "LlamaForCausalLM",
    model=module(
        "LlamaModel",
        embed_tokens=module("VocabParallelEmbedding", "num_embeddings=512"),
        layers={
            "class": "ModuleList",
            "module": "torch.nn.modules.container",
            "extra": "",
            "children": {str(index): _layer() for index in range(4)},
        },
        norm=module("RMSNorm", "hidden_size=64, eps=1e-05"),
    ),
    lm_head={"same_as": "model.embed_tokens"},
    logits_processor=module("LogitsProcessor", "vocab_size=512"),
)


def tokenizer_zip() -> bytes:
    """A word tokenizer as ``save_pretrained`` would write it."""
    words = {word: index for index, word in enumerate("<unk> <eos> The Eiffel Tower is".split())}
    fast = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tokenizer.json", json.dumps(fast))
        archive.writestr("tokenizer_config.json", json.dumps(config))
    return buffer.getvalue()


@dataclass
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class _QuietServer(ThreadingHTTPServer):
    """One that does not print what a client that leaves does to it."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass
class FakeServer:
    """The server; its attributes are what a test changes.

    Attributes
    ----------
    answer
        What a trace gets: the frames to send, each when the iterator gives it.
    replies
        Path to ``(status, headers, body)``, in place of the usual answer.
    """

    base: str = "/some/base"
    answer: Callable[[Seen], Iterator[bytes]] = lambda seen: iter(result())
    replies: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    protocol: int = 1
    tree: Any = field(default_factory=lambda: TREE)
    archive: bytes = field(default_factory=tokenizer_zip)
    seen: list[Seen] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self) -> FakeServer:
        self.http = _QuietServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    @property
    def url(self) -> str:
        return self.root + self.base

    @property
    def identity(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()

    def traces(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.path.endswith("/generate")]

    def description(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol,
            "name": "some/model",
            "revision": None,
            "tree_id": hashlib.sha256(json.dumps(self.tree).encode()).hexdigest(),
            "tree": self.tree,
            "config": {"max_model_len": 512, "dtype": "bfloat16", "vocab_size": 512},
            "tokenizer": {"id": self.identity, "bytes": len(self.archive)},
            "versions": {"package": "0.1.0", "nnsight": "0.8.1", "vllm": "0.25.1", **self.versions},
            **self.extra,
        }


def problem(status: int, message: str) -> tuple[int, dict[str, str], bytes]:
    """A refusal as the extension makes it."""
    body = {"message": message, "reason": "Reason", "detail": message}
    return status, {"Content-Type": "application/json"}, json.dumps(body).encode()


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            return

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            seen = Seen(self.command, self.path, dict(self.headers), self.rfile.read(length))
            server.seen.append(seen)
            path = self.path.partition("?")[0]
            if path in server.replies:
                self.reply(*server.replies[path])
            elif not path.startswith(f"{server.base}/nnsight/"):
                self.reply(404, {"Content-Type": "text/html"}, b"<html>not here</html>")
            elif path == f"{server.base}/nnsight/health":
                self.json({"status": "ok"})
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.reply(*problem(403, "The token of this request is not one"))
            else:
                self.route(path.removeprefix(f"{server.base}/nnsight/"), seen)

        do_GET = do_POST = do_DELETE = handle_any

        def route(self, path: str, seen: Seen) -> None:
            if path == "model":
                about = server.description()
                etag = f'"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}"'
                if self.headers.get("If-None-Match") == etag:
                    self.reply(304, {"ETag": etag}, b"")
                else:
                    self.reply(200, {"ETag": etag}, json.dumps(about).encode())
            elif path == "model/tokenizer":
                self.reply(200, {"Content-Type": "application/zip"}, server.archive)
            elif path == "status":
                self.json({"model": {"name": "some/model"}, "state": "ready", "running": 0})
            elif path == "generate":
                self.stream(server.answer(seen))
            elif path == "register":
                self.json({"edits": server.edits, "removed": server.removed})
            elif path.startswith("register/"):
                self.json({"status": "ok", "warnings": ["about caching"]})
            else:
                self.reply(*problem(404, "There is no such resource"))

        def json(self, body: Any) -> None:
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if status != 304:
                self.wfile.write(body)

        def stream(self, pieces: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", FRAMES)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for piece in pieces:
                    if piece:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                        self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                server.gone.set()
                self.close_connection = True

    return Handler


def forever(seconds: float = 20.0) -> Iterator[bytes]:
    """States until the reader goes away."""
    end = time.monotonic() + seconds
    tokens = 0
    while time.monotonic() < end:
        tokens += 1
        yield state(state="running", tokens=tokens)
        time.sleep(0.05)
