"""Runs a built trace on vLLM and brings its saves together.

Each invoke is one vLLM request. When all have finished, nnsight's own collect and merge rules
(``VLLM._collect``, ``merge_shared_saves``) decide what each saved name comes home as, so that a
served trace means what it means on an in-process engine.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from nnsight.intervention.errors import DeferredError
from nnsight.modeling.vllm.engines.engine import attach, merge_collected
from nnsight.modeling.vllm.vllm import VLLM
from nnsight.tracing.tracer import dec, inc
from vllm.v1.engine.exceptions import EngineDeadError

from .blocks import contained
from .build import Invoke, Trace
from .errors import EngineDownError
from .frames import Progress
from .sources import capture_exception


@dataclass
class Outcome:
    """What a trace came to.

    Attributes
    ----------
    saves
        Saved name to value; tensors are in host memory, in the dtype the block saved.
    error
        The first error of a block, as nnsight's deferred error; None when there was none.
    said
        Pairs of stream name and text the blocks wrote, in the order of the invokes.
    prompt_tokens, generated_tokens
        Tokens over all invokes and sequences.
    """

    saves: dict[str, Any] = field(default_factory=dict)
    error: DeferredError | None = None
    said: list[tuple[str, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def failed(self, error: Exception) -> Outcome:
        """This outcome with ``error`` in place of its saves."""
        return replace(self, saves={}, error=capture_exception(error))


class Runner:
    """Runs traces on one engine.

    Parameters
    ----------
    engine
        vLLM's ``AsyncLLM`` with nnsight's workers.
    max_response_bytes
        Most bytes of saves a worker hands over for one request.
    """

    def __init__(self, engine: Any, max_response_bytes: int) -> None:
        self.engine = engine
        self.max_response_bytes = max_response_bytes
        self.active = 0
        # The event loop keeps only weak references to its tasks.
        self._cleanups: set[asyncio.Task[Any]] = set()

    async def run(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """Run every invoke of ``trace``; cancelling the call aborts them.

        Parameters
        ----------
        progress
            Told of every output, for a trace that was built to be watched.

        Raises
        ------
        EngineDownError
            vLLM's engine core died.
        """
        tasks = [
            asyncio.ensure_future(self._request(index, invoke, progress))
            for index, invoke in enumerate(trace.invokes)
        ]
        try:
            results = await asyncio.gather(*tasks)
        except EngineDeadError:
            raise EngineDownError(
                "The engine died while this trace was running; it was not run again. "
                "The server's status tells what became of the engine."
            ) from None
        except Exception as error:
            if not str(error) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            # vLLM refused a request (a prompt that is too long, say): as on an in-process engine
            # the whole trace fails with it.
            return Outcome(error=capture_exception(error), said=trace.said.collect())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _merge(trace, [output for output, _ in results], [said for _, said in results])

    async def _request(self, index: int, invoke: Invoke, progress: Progress | None) -> Any:
        """Run one request to its end and attach what its blocks saved to its output."""
        request_id = str(uuid.uuid4())
        output = None
        collected = False
        self.active += 1
        try:
            async for output in self.engine.generate(
                invoke.prompt, invoke.params, request_id, lora_request=invoke.lora_request
            ):
                if progress is not None:
                    progress.update(index, output)
            entry, words = await self._collect(request_id, output)
            collected = True
            if entry is not None:
                attach(output, entry)
            return output, words
        finally:
            self.active -= 1
            if not collected and not self.engine.errored:
                # An aborted request is never collected, and only a collect frees what its
                # worker holds.
                cleanup = asyncio.ensure_future(self._collect(request_id))
                self._cleanups.add(cleanup)
                cleanup.add_done_callback(self._cleaned)

    async def _collect(
        self, request_id: str, output: Any = None
    ) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
        """Fetch what a finished request saved and said, and have the workers forget it.

        Parameters
        ----------
        output
            The finished ``RequestOutput``, which serves a block that waits for ``tracer.result``;
            None for a request that was aborted.
        """
        outputs = None if output is None else pickle.dumps({request_id: output})
        ids = [request_id]
        arguments = (ids, ids, outputs, self.max_response_bytes)
        replies = await self.engine.collective_rpc("serve_collect", args=arguments)
        payloads, words = zip(*map(pickle.loads, replies), strict=True)
        said = [part for rank in words for part in rank.get(request_id, ())]
        # Unpickling an instance of a caller's class runs the caller's code.
        with contained():
            return merge_collected(payloads).get(request_id), said

    def _cleaned(self, task: asyncio.Task[Any]) -> None:
        self._cleanups.discard(task)
        if not task.cancelled():
            task.exception()


def _merge(trace: Trace, outputs: list[Any], words: list[list[tuple[str, str]]]) -> Outcome:
    """Bring the requests' saves home by nnsight's rules; a block's error does not lose them."""
    error = next(
        (
            deferred
            for output in outputs
            if (deferred := getattr(output, "nnsight_error", None))
            and not deferred.get("is_control_flow")
        ),
        None,
    )
    if error is not None and error["type_name"] == "NameError":
        for name, sentence in trace.siblings.items():
            if error["message"] == f"name {name!r} is not defined":
                error = {**error, "message": f"{error['message']}: {sentence}"}
    inc()
    try:
        VLLM._collect(trace.mediators, outputs)
    except RuntimeError:
        if error is None:
            raise
    finally:
        dec()
    saves: dict[str, Any] = {}
    for mediator in trace.mediators:
        saves.update(mediator.lcls.writes())
    return Outcome(
        saves=saves,
        error=error,
        said=trace.said.collect() + [part for said in words for part in said],
        prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in outputs),
        generated_tokens=sum(len(c.token_ids) for output in outputs for c in output.outputs),
    )
