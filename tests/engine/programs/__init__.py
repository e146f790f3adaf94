"""Small trace programs, each to be run twice: on a local engine and on a served one.

A program is a function of a model and of ``where``, which is ``{}`` on a local synchronous engine
and ``{"serve": url, "api_key": token}`` on a served one, so the very same source runs on both. It
returns what came home by name, or lets the exception out.

The modules go by what a program is about: `values` (reads and writes), `steps` (generation,
caches), `invokes`, `prompts`, `code` (what a notebook brings along), `edits`, `adapters` (LoRA) and
`refusals`.
"""

from __future__ import annotations

from . import adapters, code, edits, invokes, prompts, refusals, steps, values
from .registry import PROGRAMS, Program

__all__ = [
    "PROGRAMS",
    "Program",
    "adapters",
    "code",
    "edits",
    "invokes",
    "prompts",
    "refusals",
    "steps",
    "values",
]
