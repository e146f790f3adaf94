"""From the bytes of a request to the vLLM requests it asks for.

A body is ``RequestModel.serialize(tracer)``: the tracer and its block as source, with the names
the block reads. Building deserializes it against this engine's own model, runs what stands above
the invokes, and puts each invoke's block on the ``SamplingParams`` of one vLLM request.

nnsight's build shares the model's one interleaver, so a build holds the event loop from beginning
to end: it never awaits, and no two builds interleave.
"""

from __future__ import annotations

import ast
import copy
import io
import os
import textwrap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnsight.intervention.envoy import Envoy
from nnsight.intervention.serialization import UnknownPersistentIdError
from nnsight.intervention.util import clear_shared_locals
from nnsight.tracing.tracer import dec, inc
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from ..parsing import again
from . import blocks, sources
from .adapters import lora_request
from .advice import names_of_siblings, unnamed_saves
from .errors import BadBodyError, OtherModelError, TooLargeError
from .requests import BLOCK, EDITS, SCOPE
from .said import Said, listening
from .scan import DamagedPickleError, RefusedGlobalError, Scan
from .sources import Scope
from .tree import difference, envoys_by_id, tag

_encoder = MsgpackEncoder()
_decoder = MsgpackDecoder(SamplingParams)

NOT_A_TRACE = (
    "The body is not a serialized nnsight trace or edit ({why}); send what "
    "`model.trace(..., serve=url)` and `model.edit(serve=url)` do."
)

NOT_LOADED = "This body was refused before any of it was loaded: {why}."


@dataclass
class Invoke:
    """One vLLM request: a prompt, its ``SamplingParams`` with the block on it, and its LoRA."""

    prompt: Any
    params: Any
    lora_request: Any


@dataclass
class Trace:
    """A built trace.

    Attributes
    ----------
    mediators
        nnsight's workers of the invokes, in order; results are merged into their scopes.
    invokes
        The vLLM requests, in the same order.
    said
        What the part of the block above the invokes wrote.
    siblings
        Why a name is missing in an invoke, for names that only another invoke binds.
    """

    mediators: list[Any]
    invokes: list[Invoke]
    said: Said
    siblings: dict[str, str]


class Builder:
    """Builds traces and checks edits against one model.

    Parameters
    ----------
    model
        A dispatched asynchronous ``nnsight.modeling.vllm.VLLM``.
    max_body_bytes
        Largest body in bytes once decompressed.
    max_tokens
        Most tokens a trace may ask to generate, over its invokes and sequences; 0 for no limit.
    scan
        Looks at bodies before they are loaded.
    """

    def __init__(
        self, model: Any, max_body_bytes: int, max_tokens: int = 0, scan: Scan | None = None
    ) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.scan = scan or Scan()
        # Shown in notebooks, which have no use for the server's directories.
        served = model.vllm_entrypoint.vllm_config.model_config.model
        self.name = os.path.basename(os.path.normpath(served)) if os.path.isabs(served) else served
        self.max_body_bytes = max_body_bytes
        self.envoys = envoys_by_id(model)
        tag(self.envoys, self.envoys)
        self.persistent_objects = {**model._remoteable_persistent_objects(), **self.envoys}

    def trace(
        self,
        body: bytes,
        compressed: bool,
        watched: bool = False,
        edits: Sequence[str] = (),
    ) -> Trace:
        """Build the trace in ``body``.

        Parameters
        ----------
        body
            ``RequestModel.serialize(tracer)``.
        compressed
            Whether the body is one zstd frame (``nnsight-compress: True``).
        watched
            Whether its outputs are wanted while they are generated.
        edits
            Keys of the installed edits it may run.

        Raises
        ------
        BadBodyError, TooLargeError
            The body is no trace.
        Exception
            Whatever the caller's own part of the build raises: a module that is not installed
            here, a bad sampling setting, an error above the invokes.
        """
        body = self.decompressed(body, compressed)
        key, said = uuid.uuid4().hex[:12], Said()
        try:
            tracer, filename = self._load(body, key)
            for sentence in unnamed_saves(tracer.node):
                said.add("stderr", f"{filename}, {sentence}\n")
            with listening(said), blocks.contained():
                mediators, prompts, params, loras = self._prepare(tracer)
        finally:
            sources.release(key)
        for param in params:
            _check_sampling(param)
        self._check_tokens(params)
        for index, param in enumerate(params):
            param.extra_args[BLOCK] = param.extra_args.pop("nnsight_mediator")
            param.extra_args[SCOPE] = [f"{key}.{index}", filename]
            param.extra_args[EDITS] = list(edits)
            # Each partial output costs this process, and only a watched trace is read as it goes.
            # vLLM's partial outputs of several sequences hold one sequence each.
            partial = watched and param.n == 1
            param.output_kind = (
                RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY
            )
        invokes = [Invoke(*invoke) for invoke in zip(prompts, params, loras, strict=True)]
        return Trace(mediators, invokes, said, names_of_siblings(mediators))

    def _check_tokens(self, params: list[Any]) -> None:
        """Refuse a trace that asks for more tokens than the server's limit."""
        if not self.max_tokens:
            return
        longest = self.model.vllm_entrypoint.vllm_config.model_config.max_model_len
        asked = sum((param.max_tokens or longest) * param.n for param in params)
        if asked > self.max_tokens:
            raise ValueError(
                f"This trace asks for up to {asked} tokens over its invokes and sequences "
                f"(max_tokens), and this server's max_trace_tokens allows {self.max_tokens}; ask "
                "for fewer, or make several traces of it."
            )

    def _prepare(self, tracer: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Run what stands above the invokes and serialize each invoke's block onto its request."""
        model = self.model
        inc()
        try:
            _, (prompts, params, loras), settings = tracer.prepare(tracer.info.code)
            mediators = model._attach_mediators(params, **settings)
        finally:
            dec()
            model.interleaver.cancel()
            clear_shared_locals()
        adapters = [lora_request(lora) for lora in loras or [None] * len(prompts)]
        return mediators, prompts, params, adapters

    def edit(self, body: bytes) -> str:
        """Check that a serialized edit loads, so that a worker never has to refuse it.

        Returns
        -------
        str
            The source of its block.

        Raises
        ------
        BadBodyError
            The body is no edit.
        Exception
            Whatever loading it raises.
        """
        scope = Scope(uuid.uuid4().hex[:12], "<edit>")
        try:
            edit = self._unpickle(body, scope)
        finally:
            sources.release(scope.key)
        if not isinstance(edit, blocks.Block):
            raise BadBodyError(
                "The body is not a serialized nnsight edit; send what `model.edit(serve=url)` does."
            )
        for value in (*edit.lcls.values(), *edit.glbls.values()):
            if isinstance(value, Envoy) and self.envoys.get(f"Envoy:{value.path}") is not value:
                self._check_tree(envoys_by_id(value), whole=value.path == self.model.path)
        return textwrap.dedent(edit.source)

    def decompressed(self, body: bytes, compressed: bool) -> bytes:
        """The body as it was before compression; never more than ``max_body_bytes`` bytes."""
        if not compressed:
            return body
        import zstandard

        buffer = io.BytesIO()
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                while chunk := reader.read(2**20):
                    buffer.write(chunk)
                    if buffer.tell() > self.max_body_bytes:
                        raise TooLargeError(
                            f"The body is more than {self.max_body_bytes} bytes once decompressed, "
                            "the limit this server sets (max_request_bytes); capture less in "
                            "the block."
                        )
        except zstandard.ZstdError as error:
            raise BadBodyError(NOT_A_TRACE.format(why=f"it is not a zstd frame: {error}")) from None
        if not buffer.tell():
            raise BadBodyError(NOT_A_TRACE.format(why="its zstd frame is empty or cut"))
        return buffer.getvalue()

    def _load(self, body: bytes, key: str) -> tuple[Any, str]:
        """Deserialize a trace and give it back its code, its names and its AST.

        Does what ``RequestModel.deserialize`` does, with each part checked for being what it
        should be, and with its source kept under the scope ``key``.

        Returns
        -------
        tuple
            The tracer, and the file name its source had.
        """
        loaded = self._unpickle(body, Scope(key, "<trace>"))
        try:
            tracer, (source, glbls, variables) = loaded
            frame = tracer.info.frame
            filename = str(frame.f_code.co_filename)
            name = frame.f_code.co_name
        except (TypeError, ValueError, AttributeError):
            raise BadBodyError(NOT_A_TRACE.format(why="it holds something else")) from None
        scoped = Scope(key, filename).keep(filename, source)
        frame.f_code.co_filename = scoped
        frame.f_globals, frame.f_locals = glbls, variables
        tracer.node = again(lambda: ast.parse(source))
        tracer.info.code = compile(source, scoped, "exec").replace(co_name=name)
        if tracer.envoy is not self.model:
            self._adopt_tree(tracer.envoy)
        return tracer, filename

    def _adopt_tree(self, root: Any) -> None:
        """Have a client's tree stand for this model's; refuse one that is another model's."""
        while (parent := root.parent) is not None:
            root = parent
        envoys = envoys_by_id(root)
        self._check_tree(envoys)
        tag(envoys, self.envoys)

    def _check_tree(self, envoys: dict[str, Any], whole: bool = True) -> None:
        """Refuse what was written for another tree.

        Parameters
        ----------
        envoys
            The client's, its root first, as `envoys_by_id` has them.
        whole
            Whether that is all of its tree.
        """
        known = self.envoys.keys() if whole else self.envoys.keys() & envoys.keys()
        path = difference(envoys.keys(), known)
        if path is not None:
            root = next(iter(envoys.values()))
            written = next(iter(getattr(root, "args", ())), "another model")
            raise OtherModelError(
                f"The server serves {self.name}, this trace was written for {written}: only "
                f"one of them has `{path}`. Build the client's model from the served one's name."
            )

    def _unpickle(self, body: bytes, scope: Scope) -> Any:
        """Unpickle ``body``, telling bytes that are no pickle from what the caller can mend.

        Raises
        ------
        BadBodyError
            The bytes are no pickle, or refer to a model that is not served here.
        ImportError, AttributeError, RuntimeError
            The pickle needs something that is not here: a module, a name in it, a device.
        """
        if not body:
            raise BadBodyError(NOT_A_TRACE.format(why="it is empty"))
        try:
            self.scan.check(body)
        except RefusedGlobalError as error:
            raise BadBodyError(NOT_LOADED.format(why=error)) from None
        except DamagedPickleError as error:
            raise BadBodyError(NOT_A_TRACE.format(why=error)) from None
        try:
            with blocks.contained():
                return blocks.loads(body, self.persistent_objects, scope)
        except UnknownPersistentIdError as error:
            raise OtherModelError(
                f"The server serves {self.name}, this trace was written for another model, which "
                f"has {str(error).removeprefix('Module:')!r}. Build the client's model from the "
                "served one's name."
            ) from None
        except ImportError as error:
            module = (error.name or str(error)).partition(".")[0]
            error.msg = (
                f"{error.msg}: the trace uses {module!r}, which is not installed on the server. "
                f"Have it sent along, before the trace, with `nnsight.register({module})`, define "
                "what you use in the notebook, or ask the admin to install it."
            )
            raise
        except (AttributeError, RuntimeError, blocks.BlockExitError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise BadBodyError(NOT_A_TRACE.format(why=why)) from None


def _check_sampling(params: SamplingParams) -> None:
    """Refuse settings that vLLM's engine core cannot read.

    It reads them on a thread that ends with the first it cannot, and from there on no request is
    answered: ``max_tokens=1.5`` of one caller is the end of everybody's.
    """
    bare = copy.copy(params)
    bare.extra_args = None
    try:
        _decoder.decode(_encoder.encode(bare))
    except Exception as error:
        raise TypeError(f"a sampling setting has a value that vLLM cannot take: {error}") from None
