"""What it costs that a read stays what it was: traces with lent copies against views, in pairs.

    python benchmarks/reads.py MODEL [PAIRS]

runs one synchronous engine and switches its batcher between this package's, which
lends copies and writes them back, and nnsight's own, which hands out views. Each pair of batches is
run in both orders; printed are the medians of the seconds, and of the ratios within the pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

# Lets `switch` be sent to the worker.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

REQUESTS = 16
PROMPT_TOKENS = 128
STEPS = 8


def build(model: str) -> Any:
    """A synchronous engine on the CPU."""
    from jupyter_nnsight_serve.engine import compat

    compat.apply()
    from nnsight.modeling.vllm import VLLM

    VLLM._WORKER_CLS = "jupyter_nnsight_serve.engine.worker_cpu.ServeCPUWorker"
    arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 200_000_000, "seed": 0}
    return VLLM(model, dispatch=True, **arguments)


def prompts() -> list[list[int]]:
    """Prompts of which no two share a beginning."""
    return [[5 + (7 * i + 13 * j) % 400 for j in range(PROMPT_TOKENS)] for i in range(REQUESTS)]


def logits(model: Any) -> None:
    """One token, the logits saved."""
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        for prompt in prompts():
            with tracer.invoke(prompt):
                saved = model.logits.save()


def one_layer(model: Any) -> None:
    """One token, one layer saved."""
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        for prompt in prompts():
            with tracer.invoke(prompt):
                saved = model.model.layers[8].output[0].save()


def all_layers(model: Any) -> None:
    """One token, every layer saved."""
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        for prompt in prompts():
            with tracer.invoke(prompt):
                saved = [layer.output[0] for layer in model.model.layers].save()  # type: ignore[attr-defined]


def each_step(model: Any) -> None:
    """Several tokens, one layer saved at each step."""
    with model.trace(max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        for prompt in prompts():
            with tracer.invoke(prompt):
                saved = list().save()  # type: ignore[attr-defined]
                for _ in tracer.iter[:STEPS]:
                    saved.append(model.model.layers[8].output[0])


def switch(worker: Any, kind: str) -> None:
    """Give the worker's interleaver one of the two batchers."""
    from nnsight.modeling.vllm.batching import VLLMBatcher

    from jupyter_nnsight_serve.engine.handoff import LendingBatcher

    class Views(VLLMBatcher):
        """nnsight's own, with what this package's blocks ask of a batcher."""

        serving = 0

        def settle(self) -> None:
            """There is nothing to write back."""

    batcher = (Views if kind == "views" else LendingBatcher)(None)
    batcher.clone_reads = False
    worker.model_runner.nnsight_model.interleaver.batcher = batcher


KINDS = ("views", "copies")
WORK = {"logits": logits, "one layer": one_layer, "all layers": all_layers, "each step": each_step}


def main(path: str, pairs: str = "15") -> None:
    """Print a table."""
    model = build(path)

    def seconds(kind: str, work: Any) -> float:
        model.vllm_entrypoint.collective_rpc(switch, args=(kind,))
        begun = time.perf_counter()
        work(model)
        return time.perf_counter() - begun

    print(f"{REQUESTS} requests of {PROMPT_TOKENS} tokens, {pairs} pairs, {os.path.basename(path)}")
    print(f"{'work':12} {'views':>9} {'copies':>9} {'copies/views':>13} {'quartiles':>15}")
    for name, work in WORK.items():
        for kind in KINDS:
            seconds(kind, work)
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for pair in range(int(pairs)):
            for kind in sorted(KINDS, reverse=bool(pair % 2)):
                taken[kind].append(seconds(kind, work))
        ratios = [c / v for c, v in zip(taken["copies"], taken["views"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = {kind: statistics.median(values) for kind, values in taken.items()}
        print(
            f"{name:12} {medians['views'] * 1000:6.1f} ms {medians['copies'] * 1000:6.1f} ms "
            f"{middle:13.3f} {low:7.3f} {high:7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
