"""vLLM without nnsight and without HTTP: ``python -m benchmarks.alone MODEL ENGINE_ARGS_JSON``.

The clients are tasks of the process that holds the engine, so that nothing is in the way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from typing import Any

from .lines import Answers, Order
from .work import VARIANTS, prompt


class Alone:
    """vLLM's ``AsyncLLM`` and a loop that it runs on."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.runner = asyncio.Runner()
        self.engine = self.runner.run(self._call(AsyncLLM, AsyncEngineArgs(model, **arguments)))

    async def _call(self, kind: Any, arguments: Any) -> Any:
        return kind.from_engine_args(arguments)

    async def run(self, order: Order) -> Order:
        """Generate ``order["tokens"]`` for each prompt, as `load.run` sends traces."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [{"prompt_token_ids": prompt(number)} for number in range(VARIANTS)]
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            for turn in range(order["rounds"]):
                params = SamplingParams(
                    max_tokens=order["tokens"],
                    temperature=0.0,
                    ignore_eos=True,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                ids = prompts[(number + turn * order["clients"]) % VARIANTS]
                async for _ in self.engine.generate(ids, params, uuid.uuid4().hex):
                    pass
                done += 1

        begun = time.perf_counter()
        await asyncio.gather(*map(client, range(order["clients"])))
        return {
            "traces": done,
            "seconds": time.perf_counter() - begun,
            "bytes_out": 0,
            "latency": 0.0,
        }

    def __call__(self, order: Order) -> Order:
        return self.runner.run(self.run(order))


if __name__ == "__main__":
    answers = Answers()
    alone = Alone(sys.argv[1], json.loads(sys.argv[2]))
    answers.serve(alone)
    alone.engine.shutdown()
