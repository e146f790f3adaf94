"""What the engine process is started with, and what it cannot see."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_nnsight_serve.engine.scan import REFUSED, RefusedGlobalError, Scan
from jupyter_nnsight_serve.environment import engine_command, engine_environment

from .test_supervisor import supervised, until

Record = Callable[[str], list[dict[str, Any]]]

SECRETS = {
    "JUPYTER_TOKEN": "1",
    "JUPYTERHUB_API_TOKEN": "2",
    "JPY_API_TOKEN": "3",
    "HF_TOKEN": "4",
    "VLLM_API_KEY": "5",
    "AWS_SECRET_ACCESS_KEY": "6",
    "GITHUB_TOKEN": "7",
    "NCCL_password": "8",
    "SSH_AUTH_SOCK": "9",
    "SOMETHING": "10",
}


def test_variables_are_passed_by_name_and_secrets_never() -> None:
    wanted = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "https_proxy": "http://p",
        "CUDA_VISIBLE_DEVICES": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HOME": "/hf",
        "TOKENIZERS_PARALLELISM": "false",
    }
    found = engine_environment({**wanted, **SECRETS}, {"EXTRA": "x", "PATH": "/mine"}, "/d/token")
    assert found == {**wanted, "EXTRA": "x", "PATH": "/mine", "HF_TOKEN_PATH": "/d/token"}
    assert "HF_TOKEN_PATH" not in engine_environment(wanted, {}, "/d/token")


def test_prefix_gets_the_engines_directory() -> None:
    command = engine_command(["run", "--bind={directory}", "{directory}"], ["python", "-m"], "/d")
    assert command == ["run", "--bind=/d", "/d", "python", "-m"]
    (first,) = engine_command([], ["bin/engine"], "/d")
    assert first == os.path.abspath("bin/engine")


async def test_engine_process_is_confined_and_the_hubs_token_goes_once_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    inherited, _ = os.pipe()
    os.set_inheritable(inherited, True)
    async with supervised(tmp_path, "--load-seconds", "0.6") as supervisor:
        async with asyncio.timeout(10):
            while not record("started"):
                await asyncio.sleep(0.02)
        (started,) = record("started")
        directory = Path(started["cwd"])
        token = directory / "hub-token"
        assert (token.read_text(), stat.S_IMODE(token.stat().st_mode)) == ("4", 0o600)
        await until(supervisor, "ready")
        assert not token.exists()
        assert directory == Path(supervisor.upstream().path).parent
    os.close(inherited)
    assert not set(started["environment"]) & set(SECRETS)
    assert "HF_TOKEN_PATH" in started["environment"]
    assert started["umask"] == 0o077
    assert started["fds"] == [0, 1, 2]
    assert started["group"] == started["pid"]


def test_scan_refuses_what_no_trace_needs_however_it_is_written() -> None:
    import pickle

    scan = Scan()
    for protocol in range(6):
        for value in (os.system, [1, {"a": eval}], ("x", os.remove, os.remove)):
            with pytest.raises(RefusedGlobalError, match="which this server does not load"):
                scan.check(pickle.dumps(value, protocol))
    # The module's name comes from the memo.
    memo = pickle.dumps(("posix", os.system), 4)
    with pytest.raises(RefusedGlobalError, match=r"refers to posix\.system"):
        scan.check(memo)


def test_scan_lets_the_names_pass_as_text_and_other_names_pass() -> None:
    import pickle

    scan = Scan()
    for value in (
        ["os", "system"],
        "os.system('x')",
        {"posix": "system"},
        os.getpid,
        os.path.join,
        b"not a pickle: system",
    ):
        scan.check(value if isinstance(value, bytes) else pickle.dumps(value))
    scan.check(b"\x80\x04\x8c\x06system\x93.")


def test_scan_takes_more_names() -> None:
    import pickle

    body = pickle.dumps(os.path.join)
    module = os.path.join.__module__
    Scan().check(body)
    with pytest.raises(RefusedGlobalError):
        Scan([f"{module}.join"]).check(body)
    assert (module, "join") not in REFUSED
