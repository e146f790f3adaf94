"""How fast traces are served, against the engine alone and against nnsight's own server.

``python -m benchmarks`` measures in one run on one machine: vLLM alone, ``nnsight-serve``, and
this server with the bodies of nnsight's client and with those of its own. Needs nothing but the
packages on the path. NOTES.md tells what was found with it.
"""
