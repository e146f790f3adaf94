"""The vLLM worker class for CPUs.

nnsight 0.8.1 instruments exactly vLLM's ``GPUModelRunner`` and refuses the CPU one, which derives
from it. The CPU runner runs the same steps, so the same instrumentation fits it.
"""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from . import compat
from .worker import ServeRunner, ServeWorker


class ServeCPUModelRunner(ServeRunner, NNsightGPUModelRunner, CPUModelRunner):
    """vLLM's CPU model runner, instrumented."""


class ServeCPUWorker(ServeWorker, CPUWorker):
    """vLLM's CPU worker with nnsight's calls and what serving adds."""

    def init_device(self) -> None:
        compat.apply_in_cpu_worker()
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise NotImplementedError(
                f"this worker built {type(self.model_runner).__qualname__}, and only vLLM's "
                "CPUModelRunner can be traced on a CPU; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        self.model_runner.__class__ = ServeCPUModelRunner

    collect_nnsight = NNsightGPUWorker.collect_nnsight
    nnsight_request_count = NNsightGPUWorker.nnsight_request_count
    nnsight_register = NNsightGPUWorker.nnsight_register
    nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered
