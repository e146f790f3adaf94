"""The served model: nnsight's VLLM over stub modules, with the server in the engine's place."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import quote

from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.vllm import VLLM
from nnsight.tracing.tracer import WithBlockNotFoundError

from . import sampling, tree
from .address import read_address
from .backend import ServedBackend
from .connection import Connection
from .discover import placed
from .errors import HubError
from .link import Link
from .secret import Secret
from .tokenizer import load
from .tracer import ServedEdit, ServedTracer

NO_ENGINE = (
    "This model has no engine in this process: it runs on its server. Write a trace, "
    "`with model.trace(prompt):`, or call `model.generate(prompt)`."
)


def _envoys(envoy: Any) -> Iterator[Any]:
    yield envoy
    for child in envoy._children:
        yield from _envoys(child)


class ServedModel(VLLM):  # type: ignore[misc]
    """A model that is loaded on a server; `hub.model`.

    Traces, edits and ``generate`` are nnsight's own, without ``serve=`` and ``api_key=``.

    Attributes
    ----------
    tree_id
        The id of the module tree, by which the server knows what a trace was written for.
    config
        What the server tells of the model's configuration, such as ``max_model_len``.
    """

    def __init__(self, connection: Connection, description: dict[str, Any]) -> None:
        # VLLM's own __init__ builds vLLM's model; these are the attributes its methods read.
        self.vllm_entrypoint = None
        self.taps = ()
        self._async_engine = False
        self._owns_distributed = False
        self._installed_edits: list[Any] = []
        self.args = (description.get("name"),)
        self.kwargs: dict[str, Any] = {}
        # Edits are checked by the server, which knows those of other notebooks as well.
        self._serving = True
        self._connection = connection
        self.tree_id = str(description.get("tree_id"))
        self._description = description
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        module = tree.build(description.get("tree"))
        module.__dict__["config"] = SimpleNamespace(**(description.get("config") or {}))
        Envoy.__init__(self, module)
        # An envoy travels as its path, which names the same one on the server.
        for envoy in _envoys(self):
            envoy.__dict__["_persistent_id"] = f"Envoy:{envoy.path}"

    # What the person reads.

    @property
    def name(self) -> str:
        """The served model's name."""
        return str(self.args[0])

    @property
    def dispatched(self) -> bool:
        """Never: there is no engine in this process."""
        return False

    @property
    def tokenizer(self) -> Any:
        """The served model's tokenizer, from the server or the cache; loaded when first used."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                about = self._description.get("tokenizer") or {}
                self._tokenizer = load(self._connection, about)
            return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    # Traces.

    def trace(self, *inputs: Any, stream: bool = False, **kwargs: Any) -> Any:
        """Open a trace that runs on the server.

        Parameters
        ----------
        inputs
            One prompt: text, a list of token ids, a tokenizer's output or one of vLLM's prompt
            dicts. None of them for a trace with invokes.
        stream
            Whether the text is wanted as it is generated; ``tracer.backend`` is then iterated
            over after the block.
        kwargs
            Sampling settings; ``edits``, ``lora_request``.
        """
        _hide_token(kwargs)
        if kwargs.pop("trace", True) is False:
            return self._generate(*inputs, stream=stream, **kwargs)
        kwargs = self._sampling_kwargs(kwargs)
        link = self._link(kwargs.pop("serve", None), kwargs.pop("api_key"))
        own = {name: kwargs.pop(name) for name in ("backend", "tracer_cls", "fn") if name in kwargs}
        for name in ("remote", "scan", "validate"):
            # Their default is what happens here.
            if kwargs.get(name, True) in (False, None):
                del kwargs[name]
        served = (self._description.get("config") or {}).get("sampling")
        sampling.check(kwargs, bool(inputs), served)
        if own.get("backend") is None:
            written = {"Nnsight-Tree": self.tree_id, "Nnsight-Model": quote(self.name)}
            own["backend"] = ServedBackend(self, self._connection, link, written, stream)
        own.setdefault("tracer_cls", ServedTracer)
        own.setdefault("fn", self._call)
        return Envoy.trace(self, *map(_plain_prompt, inputs), **own, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """`trace` as a ``with`` block; otherwise run on the server and return its outputs."""
        _hide_token(kwargs)
        tracer = self.trace(*inputs, **kwargs)
        try:
            # Looks at the frame two up, which is the caller's.
            tracer.capture()
        except WithBlockNotFoundError:
            return self._generate(*inputs, **kwargs)
        return tracer

    def _generate(self, *inputs: Any, stream: bool = False, **kwargs: Any) -> Any:
        """Run prompts with no block of the caller's own; edits run with them."""
        if stream:
            raise TypeError(
                "stream=True needs a block: write `with model.trace(prompt, stream=True) as "
                "tracer:` and read the text from `tracer.backend`, or leave it out to have the "
                "outputs at the end"
            )
        prompts = inputs[0] if len(inputs) == 1 else list(inputs)
        if isinstance(prompts, (str, Mapping)) or (
            isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], int)
        ):
            prompts = [prompts]
        prompts = [_plain_prompt(prompt) for prompt in prompts]
        if not prompts:
            return []
        with self.trace(**kwargs) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    outputs = tracer.result.save()
        found = outputs if len(prompts) > 1 else [outputs]
        for output in found:
            # As on an engine in this process, also where no edit saved anything.
            output.saves = getattr(output, "saves", {})
        return found

    def edit(
        self,
        *,
        name: str | None = None,
        shared: bool = False,
        inplace: bool = True,
        serve: str | None = None,
        api_key: str | None = None,
        backend: Any = None,
    ) -> Any:
        """Install a block on the engine, to run for every trace of yours.

        ``with model.edit(name="steer") as (tracer, edit):``; see nnsight's ``VLLM.edit``.

        Parameters
        ----------
        name
            What traces list it by in ``edits=[...]``.
        shared
            Whether it runs for everybody's traces; for admins of the server.
        """
        token = Secret(api_key)
        api_key = None
        if not inplace:
            raise ValueError(
                "a vLLM edit is installed on the engine itself, which every caller shares — there "
                "is no copy to edit instead. Drop inplace=False, or trace the requests you want to "
                "change."
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"edit name must be a string, got {type(name).__name__}")
        return ServedEdit(self, self._link(serve, token), name, shared)

    def clear_edits(self) -> None:
        """Clear every edit that was installed through this object."""
        super().clear_edits()

    def _link(self, serve: str | None, token: Secret) -> Link:
        """The way to the server, or to another one that a call names."""
        link = self._connection.link
        if serve is None or serve.rstrip("/") == link.url:
            return link
        address = placed(read_address(serve))
        return Link(address, token or address.token, link.timeout)

    # What only an engine in this process could do.

    def dispatch(self) -> NoReturn:
        """Refuse: there is no engine here to start."""
        raise NotImplementedError(NO_ENGINE)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is no forward pass here to run a block beside."""
        raise NotImplementedError(NO_ENGINE)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a block calls modules on the server; here they have no weights."""
        raise NotImplementedError(NO_ENGINE)

    def _remote_backend(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise HubError("remote= sends to NDIF, and this model's traces run on its own server.")


def _hide_token(kwargs: dict[str, Any]) -> None:
    """Make a secret of a call's ``api_key``: a traceback that prints variables prints kwargs."""
    kwargs["api_key"] = Secret(kwargs.get("api_key"))


def _plain_prompt(prompt: Any) -> Any:
    """A tokenizer's output as a plain dict, which any server can read."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt and type(prompt) is not dict:
        return {name: prompt[name] for name in ("input_ids", "attention_mask") if name in prompt}
    return prompt
