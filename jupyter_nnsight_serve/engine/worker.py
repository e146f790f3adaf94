"""The vLLM worker class for CUDA devices, and what it shares with the one for CPUs.

vLLM instantiates the class in each of its worker processes. Serving adds to nnsight's worker:
envoys of the module tree resolve by path, so that neither a trace's body nor the request that
carries it to the worker holds the tree; reads stay what was read; each request's sources and
words are its own; saves leave as host memory; the worker ends with the engine process, and tells
its stage while it loads.
"""

from __future__ import annotations

import pickle
from typing import Any

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.distributed.parallel_state import get_pp_group

from . import compat, events, lifeline, said, sources
from .blocks import contained
from .handoff import LendingBatcher
from .requests import ServeRequests
from .tree import envoys_by_id, unlist_adapted


class ServeRunner:
    """Mixin for an nnsight model runner: what serving several people adds to it."""

    nnsight_model: Any
    nnsight_persistent_objects: dict[str, Any]
    nnsight_requests: ServeRequests

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        compat.refuse_nested()
        unlist_adapted(self.nnsight_model)
        self.nnsight_persistent_objects.update(envoys_by_id(self.nnsight_model))
        self.nnsight_requests = ServeRequests()
        self.nnsight_model.interleaver.batcher = LendingBatcher(None)

    def serve_collect(
        self,
        request_ids: list[str],
        finished: list[str],
        outputs: dict[str, Any] | None,
        max_bytes: int,
    ) -> bytes:
        """What finished requests saved and said, and the end of what they held here.

        Parameters
        ----------
        max_bytes
            Bytes of saves above which a request gets an error in their place.

        Returns
        -------
        bytes
            A pickle of ``(payload, words)``: nnsight's ``collect_nnsight`` payload, and pairs of
            stream and text by the engine's request id, empty on all ranks but the first.
        """
        requests = self.nnsight_requests
        ids = set(request_ids) | set(finished)
        speakers = requests.speakers(ids)
        requests.limit(ids, max_bytes)
        payload = self.collect_nnsight(request_ids, finished, outputs)  # type: ignore[attr-defined]
        words: dict[str, list[tuple[str, str]]] = {}
        if get_pp_group().rank == 0:
            for request_id, said in speakers:
                words.setdefault(request_id, []).extend(said.collect())
        requests.forget()
        return pickle.dumps((payload, words))


class ServeWorker:
    """Mixin for a worker: its life follows the engine process's, and it tells its stage."""

    model_runner: Any

    def init_device(self) -> None:
        lifeline.watch_engine()
        compat.apply_in_worker()
        said.route()
        events.stage("starting the worker")
        super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        events.stage("loading weights")
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def serve_collect(
        self, request_ids: list[str], finished: list[str], outputs: bytes | None, max_bytes: int
    ) -> bytes:
        """See `ServeRunner.serve_collect`; ``outputs`` is pickled, as vLLM's RPC carries bytes."""
        try:
            loaded = pickle.loads(outputs) if outputs is not None else None
            with contained():
                result: bytes = self.model_runner.serve_collect(
                    request_ids, finished, loaded, max_bytes
                )
        except Exception as error:
            # Answered and not raised, for the reason that `compat.dumps_collected` tells.
            empty: dict[str, Any] = {"saves": {}, "registered": {}, "sequences": {}}
            entry = {**empty, "error": sources.capture_exception(error)}
            payload = pickle.dumps({request_id: entry for request_id in request_ids})
            result = pickle.dumps((payload, {}))
        return result

    def serve_register(self, edit_id: str, payload: bytes, name: str | None) -> str | None:
        """Install an edit; why it could not be, or None.

        Answered and not raised, for the reason that `compat.dumps_collected` tells.
        """
        try:
            with contained():
                self.model_runner.nnsight_register(edit_id, payload, name=name)
        except Exception as error:
            told = sources.capture_exception(error)
            return f"{told['type_name']}: {told['message']}"
        return None

    def serve_edit_runs(self) -> dict[str, int]:
        """How many requests each installed edit has run for."""
        return dict(self.model_runner.nnsight_requests.runs)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        events.stage("measuring memory")
        return super().determine_available_memory(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        events.stage("warming up")
        return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]


class ServeGPUModelRunner(ServeRunner, NNsightGPUModelRunner):
    """nnsight's model runner with what serving adds."""


class ServeGPUWorker(ServeWorker, NNsightGPUWorker):
    """nnsight's CUDA worker with what serving adds."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = ServeGPUModelRunner
