"""Bodies over the limit, wrong methods, and paths that are nearly right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_nnsight_serve.extension import NNsightServe
from jupyter_nnsight_serve.paths import advice

from .conftest import Ask, RawClient, said

Record = Callable[[str], list[dict[str, Any]]]


class TestRequestLimit:
    """`max_request_bytes`."""

    @pytest.fixture
    def serve_settings(self) -> dict[str, Any]:
        return {"max_request_bytes": 1000}

    @pytest.mark.parametrize("path", ["/v1/nnsight/generate", "/v1/nnsight/register/x"])
    async def test_longer_body_is_413_with_both_sizes(
        self, ready: NNsightServe, ask: Ask, record: Record, path: str
    ) -> None:
        response = await ask(path, "POST", body=b"x" * 1001)
        assert response.code == 413
        assert "is 1001 bytes and max_request_bytes allows 1000 bytes" in said(response)
        assert not record("headers") and not record("edit")

    async def test_body_of_the_limits_size_runs(self, ready: NNsightServe, ask: Ask) -> None:
        response = await ask("/v1/nnsight/generate", "POST", body=b"x" * 1000)
        assert response.body == b"got 1000 bytes"

    async def test_is_told_before_the_body_is_read(
        self, ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str
    ) -> None:
        async with raw:
            # Over Tornado's own limit too, which would be a bare 400.
            raw.head(
                "POST", jp_base_url + "nnsight/generate", ndif_api_key=token, Content_Length=10**12
            )
            status, _, body = await raw.answer(2)
        assert status == 413
        assert "1000000000000" in json.loads(body)["detail"]

    async def test_chunked_body_is_cut_off_at_the_limit(
        self, ready: NNsightServe, raw: RawClient, jp_base_url: str, token: str, record: Record
    ) -> None:
        async with raw:
            raw.head(
                "POST",
                jp_base_url + "nnsight/generate",
                ndif_api_key=token,
                Transfer_Encoding="chunked",
            )
            raw.writer.write(b"190\r\n" + b"x" * 400 + b"\r\n")
            for _ in range(2):
                raw.writer.write(b"190\r\n" + b"x" * 400 + b"\r\n")
                await raw.writer.drain()
            status, _, body = await raw.answer(2)
        assert status == 413
        assert "max_request_bytes allows 1000 bytes" in json.loads(body)["detail"]
        assert record("headers") == []
        assert ready.admission.ids() == []


async def test_wrong_method_is_405_that_names_the_right_ones(
    extension: NNsightServe, ask: Ask
) -> None:
    for method, path, allowed in (
        ("GET", "/nnsight/generate", {"POST"}),
        ("PUT", "/v1/nnsight/generate", {"POST"}),
        ("POST", "/nnsight/status", {"GET"}),
        ("POST", "/health", {"GET"}),
        ("DELETE", "/nnsight/register", {"GET"}),
        ("GET", "/nnsight/register/x", {"DELETE", "POST"}),
        ("PURGE", "/nnsight/generate", {"POST"}),
    ):
        response = await ask(path, method)
        assert response.code == 405, path
        assert set(response.headers["Allow"].split(", ")) == allowed
        for name in allowed:
            assert name in said(response)


NEARLY_RIGHT = [
    ("POST", "/nnsight/generat", "POST {}nnsight/generate"),
    ("POST", "/v1/generate", "POST {}nnsight/generate"),
    ("POST", "/generate", "POST {}nnsight/generate"),
    ("POST", "/nnsight/generate/", "POST {}nnsight/generate"),
    ("POST", "/v1/nnsight/generate/", "POST {}nnsight/generate"),
    ("POST", "/nnsight/v1/nnsight/generate", "POST {}nnsight/generate"),
    ("POST", "/lab/v1/nnsight/generate", "POST {}nnsight/generate"),
    ("POST", "/v1/v1/nnsight/register/x/clear", "DELETE {}nnsight/register/{{id}}"),
    ("POST", "/nnsight/registr/abc", "POST {}nnsight/register/{{id}}"),
    ("GET", "/nnsight/stats", "GET {}nnsight/status"),
    ("GET", "/v1/health", "GET {}nnsight/health"),
    ("GET", "/nnsight/health/", "GET {}nnsight/health"),
    ("GET", "/nnsight", "POST {}nnsight/generate"),
    ("GET", "/nnsight/", "POST {}nnsight/generate"),
    ("GET", "/v1", "POST {}nnsight/generate"),
    ("DELETE", "/v1/nnsight", "POST {}nnsight/generate"),
]


async def test_nearly_right_path_is_404_that_names_the_right_one(
    extension: NNsightServe, ask: Ask, token: str, jp_base_url: str
) -> None:
    for method, path, right in NEARLY_RIGHT:
        for key in (token, None):
            response = await ask(path, method, key=key)
            assert response.code == 404, path
            assert right.format(jp_base_url) in said(response), path


async def test_path_outside_the_base_url_is_told_the_base_url(
    extension: NNsightServe, ask: Ask, jp_base_url: str
) -> None:
    response = await ask("/v1/nnsight/generate", "POST", below_base=False)
    assert response.code == 404
    assert f"up to and including {jp_base_url}" in said(response)


async def test_other_paths_stay_jupyters(extension: NNsightServe, ask: Ask) -> None:
    for path in ("/nnsights", "/v1/models", "/api/v1/things", "/nothing"):
        response = await ask(path)
        assert response.code == 404
        assert response.headers["Content-Type"].startswith("text/html"), path


@pytest.mark.parametrize("jp_base_url", ["/nnsight/", "/v1/", "/v1/nnsight/", "/health/", "/lab/"])
async def test_base_url_may_have_any_name(extension: NNsightServe, ask: Ask) -> None:
    for path in ("/api/status", "/nnsight/status"):
        assert (await ask(path)).code == 200, path
    assert (await ask("/nnsight/health")).code == 503


async def test_files_below_folders_of_that_name_stay_jupyters(
    extension: NNsightServe, ask: Ask, jp_root_dir: Path
) -> None:
    folder = jp_root_dir / "notes" / "v1" / "nnsight"
    folder.mkdir(parents=True)
    (folder / "generate").write_text("a file")
    found = await ask("/api/contents/notes/v1/nnsight/generate")
    assert json.loads(found.body)["content"] == "a file"


@pytest.mark.parametrize("where", ["/?token=abc", "/lab?token=abc", "/lab/tree/a.ipynb?x=1"])
@pytest.mark.parametrize("below_base", [True, False])
async def test_address_with_a_query_is_told_where_it_ends(
    extension: NNsightServe, ask: Ask, jp_base_url: str, where: str, below_base: bool
) -> None:
    path = f"{where}/v1/nnsight/generate"
    response = await ask(path, "POST", below_base=below_base)
    assert response.code == 404
    assert f"up to and including {jp_base_url}, and the token as api_key=" in said(response)
    assert "abc" not in said(response)


def test_advice_cuts_long_paths() -> None:
    assert len(advice("/nnsight/" + "x" * 10_000, "/")) < 700


def test_advice_names_the_base_url_that_was_left_out() -> None:
    said = advice("/nnsight/model", "/some/base/")
    assert "GET /some/base/nnsight/model" in said
    assert "base URL is /some/base/" in said
    assert "base URL" not in advice("/some/base/nnsight/modle", "/some/base/")
