"""What the engine process is started with: its environment, its command, its directory.

The engine runs callers' code, so it gets variables by name and nothing else of Jupyter's
environment: no token of Jupyter, of the Hub or of a cloud. The model hub's token, which loading a
gated model needs, reaches it as a file that is gone once the model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

# Paths, locale and proxies; and what vLLM, torch and their libraries read.
_NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH LD_PRELOAD "
    "PYTHONPATH PYTHONHOME PYTHONUNBUFFERED VIRTUAL_ENV CONDA_PREFIX CC CXX XDG_CACHE_HOME "
    "XDG_CONFIG_HOME HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY SSL_CERT_FILE SSL_CERT_DIR "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE".split()
)
_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "NVTE_",
    "HIP_",
    "ROCR_",
    "GLOO_",
    "UCX_",
    "RAY_",
    "VLLM_",
    "FLASHINFER_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
)
# A variable with such a part in its name holds a secret, whatever its name begins with.
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)

# Where huggingface_hub looks for the token, in its order, and for the file that holds one.
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_HUB_TOKEN_FILE = "HF_TOKEN_PATH"


def engine_environment(
    own: Mapping[str, str], extra: Mapping[str, str], token_file: str
) -> dict[str, str]:
    """The engine's environment.

    Parameters
    ----------
    own
        This process's environment.
    extra
        Variables that the admin adds.
    token_file
        Where the model hub's token is kept while the model loads.
    """
    passed = {
        name: value
        for name, value in own.items()
        if (name.upper() in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
    }
    if model_hub_token(own) is not None:
        passed[_HUB_TOKEN_FILE] = token_file
    elif _HUB_TOKEN_FILE in own:
        passed[_HUB_TOKEN_FILE] = own[_HUB_TOKEN_FILE]
    return {**passed, **extra}


def model_hub_token(own: Mapping[str, str]) -> str | None:
    """The model hub's token in an environment."""
    return next((own[name] for name in _HUB_TOKENS if own.get(name)), None)


def engine_command(prefix: Sequence[str], command: Sequence[str], directory: str) -> list[str]:
    """The command line of the engine process.

    Parameters
    ----------
    prefix
        What the engine runs inside of; `{directory}` in it is the engine's directory.
    """
    first, *rest = command
    # The engine's working directory is its own.
    first = os.path.abspath(first) if os.sep in first else first
    return [*(part.replace("{directory}", directory) for part in prefix), first, *rest]
