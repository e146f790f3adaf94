"""Every wrong setting fails with one sentence that names it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_nnsight_serve.errors import SettingError
from jupyter_nnsight_serve.settings import EngineSettings, check_names, engine_argument_names

CUSTOM = [sys.executable, "-c", "pass"]


def problem(**settings: Any) -> str:
    """The sentence a setting fails with."""
    with pytest.raises(SettingError) as caught:
        EngineSettings(**{"model": "org/name", "engine_command": CUSTOM, **settings}).check()
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment whose vLLM is a source file with three engine arguments."""
    source = tmp_path / "site" / "vllm"
    (source / "engine").mkdir(parents=True)
    (source / "__init__.py").write_text("raise RuntimeError('vllm was imported')")
    (source / "engine" / "arg_utils.py").write_text(
        "class Other:\n    no_argument: int = 1\n"
        "class EngineArgs:\n    model: str = ''\n    max_model_len: int = 1\n"
        "    enforce_eager: bool = False\n    plain = 3\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return source


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without vLLM."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )


def test_good_settings_pass(vllm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in ("gpt2", "org/name-1.5_b", str(tmp_path)):
        EngineSettings(model=model, engine_args={"max_model_len": 5}).check()
    EngineSettings(model="gpt2", taps=["x"], engine_args={"enforce_eager": False}).check()
    EngineSettings(model="gpt2", engine_args={"enforce_eager": True}).check()


def test_no_model() -> None:
    assert problem(model="").startswith("c.NNsightServe.model is not set; set it to")


def test_model_directory_that_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing")
    assert f"c.NNsightServe.model is {path!r}, and there is no such directory" in problem(
        model=path
    )
    for model in ("./nothing", "~/nothing-here", "../nothing"):
        assert "there is no such directory" in problem(model=model)


def test_model_directory_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no config.json" in problem(model=str(tmp_path))
    (tmp_path / "local-name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "no config.json" in problem(model="local-name")


@pytest.mark.parametrize("model", ["a/b/c", "org/", "a b", "https://host/x", "-x", "org/na me"])
def test_model_that_is_neither_name_nor_path(model: str) -> None:
    assert f"c.NNsightServe.model is {model!r}, which is neither" in problem(model=model)


@pytest.mark.parametrize("name", ["max_request_bytes", "max_response_bytes", "trace_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limit_that_is_not_above_zero(name: str, value: float) -> None:
    assert problem(**{name: value}).startswith(f"c.NNsightServe.{name} is {value!r} and must be")


def test_unknown_engine_argument_with_the_nearest_name(vllm: Path) -> None:
    sentence = problem(engine_args={"max_model_lenght": 3})
    assert "engine_args has 'max_model_lenght'" in sentence
    assert "did you mean max_model_len?" in sentence
    assert "did you mean enforce_eager?" in problem(engine_args={"enforce-eager": True})
    assert "did you mean" not in problem(engine_args={"zzz": 1})


def test_names_of_other_classes_are_no_engine_arguments(vllm: Path) -> None:
    assert engine_argument_names() == [
        "enable_log_requests",
        "enforce_eager",
        "max_model_len",
        "model",
    ]


def test_installed_vllm_is_read_and_not_imported() -> None:
    code = (
        "import sys; from jupyter_nnsight_serve.settings import engine_argument_names as n;"
        "print(len(n() or []), 'max_model_len' in (n() or []), 'tensor_parallel_size' in (n() or []),"
        " [m for m in ('vllm', 'torch', 'nnsight') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    count, *rest = output.split(maxsplit=1)
    assert int(count) > 100
    assert rest == ["True True []\n"]


@pytest.mark.parametrize("name", ["model", "revision", "taps", "worker_cls", "mode", "dispatch"])
def test_argument_that_is_set_elsewhere(name: str) -> None:
    assert f"engine_args has {name!r}, which is not set there" in problem(engine_args={name: 1})


def test_argument_that_cannot_be_handed_over(no_vllm: None) -> None:
    assert "engine_args['a'] is a object" in problem(engine_args={"a": object()})


def test_taps_contradictions() -> None:
    sentence = problem(taps=["x"], engine_args={"enforce_eager": True})
    assert "c.NNsightServe.taps" in sentence and "enforce_eager" in sentence
    sentence = problem(engine_args={"enforce_eager": False})
    assert "c.NNsightServe.taps" in sentence and "enforce_eager" in sentence
    sentence = problem(taps=["x"], device="cpu")
    assert "c.NNsightServe.taps" in sentence and "c.NNsightServe.device" in sentence


def test_no_vllm_says_what_to_install(no_vllm: None) -> None:
    with pytest.raises(SettingError) as caught:
        EngineSettings(model="gpt2").check()
    assert "jupyter-nnsight-serve[gpu]" in str(caught.value)
    assert "jupyter-nnsight-serve[cpu]" in str(caught.value)


def test_no_vllm_is_no_matter_to_another_engine_command(no_vllm: None) -> None:
    EngineSettings(model="gpt2", engine_command=CUSTOM, engine_args={"anything": 1}).check()


def test_engine_command_that_cannot_run() -> None:
    assert "c.NNsightServe.engine_command is empty" in problem(engine_command=[])
    assert "'no-such-program'" in problem(engine_command=["no-such-program"])


def test_unknown_setting_with_the_nearest_name() -> None:
    with pytest.raises(SettingError) as caught:
        check_names(["model", "modle"], ["model", "taps"])
    assert str(caught.value).startswith("c.NNsightServe.modle is not a setting of this extension")
    assert "did you mean c.NNsightServe.model?" in str(caught.value)


def test_engine_config_is_what_the_engine_expects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = EngineSettings(model=str(tmp_path) + "/", taps=["t"], max_response_bytes=5)
    assert settings.engine_config("/s") == {
        "socket": "/s",
        "model": str(tmp_path),
        "revision": None,
        "engine_args": {},
        "taps": ["t"],
        "device": "auto",
        "max_request_bytes": 2**30,
        "max_response_bytes": 5,
        "max_trace_tokens": 0,
        "refused_globals": [],
    }
    assert settings.display_name == tmp_path.name
    assert EngineSettings(model="org/name").display_name == "org/name"
