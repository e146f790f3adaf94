"""nnsight's worker on vLLM's CPU runner, and nothing else: what ``nnsight-serve`` would be there."""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class StockCPUModelRunner(NNsightGPUModelRunner, CPUModelRunner):
    """vLLM's CPU model runner, instrumented by nnsight."""


class StockCPUWorker(CPUWorker):
    """vLLM's CPU worker with nnsight's calls."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = StockCPUModelRunner

    collect_nnsight = NNsightGPUWorker.collect_nnsight
    nnsight_request_count = NNsightGPUWorker.nnsight_request_count
    nnsight_register = NNsightGPUWorker.nnsight_register
    nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered
