"""What a client needs to write traces for the served model: its tree, its config, its tokenizer."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from .tree import specification, tree_id

PROTOCOL = 1
"""Changes when a client of one version cannot speak to a server of the other."""

_CONFIG = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class Published:
    """The served model as its clients see it.

    Parameters
    ----------
    model
        The dispatched ``nnsight.modeling.vllm.VLLM``.
    description
        What `model.describe` says of it.
    """

    def __init__(self, model: Any, description: dict[str, Any]) -> None:
        self._model = model
        self._description = description

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The module tree, as `tree.specification` has it."""
        return specification(self._model._module)

    @cached_property
    def tree_id(self) -> str:
        """See `tree.tree_id`."""
        return tree_id(self.tree)

    @cached_property
    def tokenizer(self) -> bytes:
        """A zip archive of what the tokenizer's ``save_pretrained`` writes, the same each time."""
        buffer = io.BytesIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            self._model.tokenizer.save_pretrained(folder)
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    info = zipfile.ZipInfo(str(file.relative_to(folder)))
                    info.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(info, file.read_bytes())
        return buffer.getvalue()

    @cached_property
    def tokenizer_id(self) -> str:
        """What two tokenizers with the same files share."""
        return hashlib.sha256(self.tokenizer).hexdigest()

    @cached_property
    def etag(self) -> str:
        """Changes with anything that `description` tells."""
        told = json.dumps(self.description, sort_keys=True).encode()
        return f'"{hashlib.sha256(told).hexdigest()}"'

    @cached_property
    def description(self) -> dict[str, Any]:
        """The answer to ``GET /nnsight/model``."""
        settings = self._description["settings"]
        config = self._model.vllm_entrypoint.vllm_config.model_config.hf_text_config
        values = {name: getattr(config, name) for name in _CONFIG if hasattr(config, name)}
        return {
            "protocol": PROTOCOL,
            **self._description["model"],
            "versions": self._description["versions"],
            "tree_id": self.tree_id,
            "tree": self.tree,
            "config": {
                "max_model_len": settings["max_model_len"],
                "dtype": settings["dtype"],
                "taps": settings["taps"],
                "sampling": list(SamplingParams.__struct_fields__),
                **values,
            },
            "tokenizer": {
                "id": self.tokenizer_id,
                "bytes": len(self.tokenizer),
            },
        }
