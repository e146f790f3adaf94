"""Two users' notebooks trace on one real engine, with nothing configured in the notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .hub import ADA, BASE, EVE, JOSE, ROOT, Client, Hub
from .kernels import Kernel

MODEL = ROOT / ".models" / "smollm2-135m-instruct"
GUIDE = ROOT / "docs" / "admin-guide.md"

CONNECT = """
from jupyter_nnsight_serve import connect
hub = connect()
model = hub.model
"""
TRACE = """
with model.trace("The Eiffel Tower is located in the city of", max_tokens=1) as tracer:
    out = model.model.layers[16].output
    hidden = (out[0] + out[1]).save()
    logits = model.logits.save()
print(repr(model.tokenizer.decode(logits.argmax(-1)[0])), tuple(hidden.shape))
"""


@pytest.fixture(scope="module")
def service(hub: Hub) -> str:
    """The address of the external service, its engine ready."""
    url = f"{hub.root}{BASE}/services/nnsight"
    Client(url, None).wait_ready(hub.service.tail)
    return url


@pytest.fixture(scope="module")
def kernels(hub: Hub, service: str) -> Iterator[dict[str, Kernel]]:
    """A kernel in the notebook server of each of three users."""
    names = (ADA, JOSE, EVE)
    urls = {name: hub.start_server(name) for name in names}
    yield {name: Kernel(url, hub.user_token(name)["token"]) for name, url in urls.items()}
    for name in names:
        hub.stop_server(name)


def test_two_users_notebooks_trace(kernels: dict[str, Kernel], hub: Hub) -> None:
    for name in (ADA, JOSE):
        kernels[name].run(CONNECT)
        assert kernels[name].run(TRACE).strip() == "' Paris' (10, 576)"
        hub.service.wait_said(f" user={name} outcome=ok")
    assert "user=nnsight" not in hub.service.log


def test_user_outside_the_group_is_told_so_in_the_notebook(kernels: dict[str, Kernel]) -> None:
    said = kernels[EVE].run(
        "from jupyter_nnsight_serve import connect\n"
        "try:\n    connect()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert said.startswith("HubError")
    assert "it does not carry the scope access:services!service=nnsight" in said
    assert "not in a group" in said


def test_trace_of_60_seconds_comes_back_through_the_proxy(kernels: dict[str, Kernel]) -> None:
    begun = time.monotonic()
    said = kernels[JOSE].run(
        "import time\n"
        "with model.trace('Hello', max_tokens=1) as tracer:\n"
        "    time.sleep(60)\n"
        "    logits = model.logits.save()\n"
        "print(tuple(logits.shape))"
    )
    assert said.strip() == "(1, 49152)"
    assert time.monotonic() - begun >= 60


def test_stock_client_takes_the_services_address_and_the_notebooks_token(
    kernels: dict[str, Kernel], hub: Hub
) -> None:
    # docs/admin-guide.md shows these two lines.
    where = (
        '    serve=os.environ["NNSIGHT_SERVE_URL"],\n'
        '    api_key=os.environ["JUPYTERHUB_API_TOKEN"],\n'
    )
    code = f"""
import os, torch
torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *a, **k: None
from nnsight.modeling.vllm import VLLM
stock = VLLM({str(MODEL)!r}, max_model_len=512)
with stock.trace(
    "The Eiffel Tower is located in the city of",
    max_tokens=1,
{where}):
    token = stock.logits.argmax(-1).save()
print(repr(stock.tokenizer.decode(token[0])))
"""
    assert where in GUIDE.read_text()
    assert kernels[ADA].run(code).strip().splitlines()[-1] == "' Paris'"
