"""Settings for a machine without a GPU; `make demo` and `make serve` use them.

jupyter nnsight-serve --config=examples/cpu_config.py --model=.models/smollm2-135m-instruct
"""

c = get_config()  # noqa: F821

c.NNsightServe.device = "cpu"
c.NNsightServe.engine_args = {
    # Longest prompt and answer together, in tokens.
    "max_model_len": 1024,
    # On a CPU engine this is a share of the machine's memory, and vLLM's own default is 0.92.
    "gpu_memory_utilization": 0.2,
    # Memory for keys and values, in bytes; without it the whole share above goes to them.
    "kv_cache_memory_bytes": 2**29,
}
