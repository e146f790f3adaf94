"""The engine process: one vLLM engine, traced by nnsight, behind HTTP on a Unix socket.

This is the only package of the project that imports torch, vllm and nnsight, and the Jupyter
server never imports it: it runs as ``python -m jupyter_nnsight_serve.engine``.
"""
