"""What can be known of a trace's keyword arguments before it is sent.

The engine's vLLM has the last word: it may be newer than this list, so a name is refused here only
when it is close to one of these, or means something in nnsight that a served model does not have.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

KNOWN = frozenset(
    """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids
    flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind structured_outputs logit_bias allowed_token_ids
    extra_args bad_words skip_reading_prefix_cache thinking_token_budget best_of guided_decoding
    truncate_prompt_tokens logits_processors repetition_detection watermarking
    prompt_logprob_start prompt_logprob_token_ids trace_decode_token_ids
    """.split()
)
NNSIGHT = frozenset({"edits", "lora_request", "max_new_tokens"})

# Keywords of other nnsight models, each with what to do in their place.
_ELSEWHERE = {
    "scan": "there is no forward pass here to scan: trace one token and read the shapes",
    "validate": "there is no forward pass here to validate: the engine checks while it runs",
    "remote": "remote= sends to NDIF, and this model's traces run on its own server; drop it",
    "blocking": "it belongs to remote=; for a trace that is awaited write `async with`",
    "do_sample": "vLLM samples unless temperature=0.0; drop it or set temperature",
    "num_beams": "vLLM has no beam search in a trace",
    "output_hidden_states": "read the layers' outputs in the block",
    "return_dict_in_generate": "read tracer.result in the block",
}


def check(kwargs: dict[str, Any], direct: bool, served: Iterable[str] | None) -> None:
    """Refuse keyword arguments that cannot be right.

    Parameters
    ----------
    kwargs
        A trace's keyword arguments, nnsight's own taken out.
    direct
        Whether the trace has a prompt of its own; nnsight's text for the mistake depends on it.
    served
        Every sampling setting the engine knows, where the server told.

    Raises
    ------
    TypeError
        Names the argument, in the engine's own words, and says what may be meant.
    """
    names = KNOWN if served is None else frozenset(served)
    for name in kwargs:
        if name in names or name in NNSIGHT:
            continue
        if name in _ELSEWHERE:
            raise _wrong(name, direct, _ELSEWHERE[name])
        close = difflib.get_close_matches(name, sorted(names | NNSIGHT), n=1, cutoff=0.8)
        if close:
            raise _wrong(name, direct, f"did you mean {close[0]}?")
        if served is not None:
            raise _wrong(name, direct, "the engine has no such setting")


def _wrong(name: str, direct: bool, advice: str) -> TypeError:
    text = (
        f"Unexpected keyword argument '{name}'"
        if direct
        else f"unexpected trace argument {name!r}: not a vLLM SamplingParams field. "
        "trace()/invoke() keyword arguments are sampling settings "
        "(temperature, top_p, max_tokens, ...)."
    )
    return TypeError(f"{text}\n{name}: {advice}")
