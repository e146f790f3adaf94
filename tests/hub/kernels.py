"""Code run in a kernel of a user's notebook server, the way a browser does it."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect


class Kernel:
    """A kernel of a notebook server.

    Parameters
    ----------
    url
        The notebook server's address.
    token
        A token that may use the server.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"token {token}"}
        answer = httpx.post(f"{url}/api/kernels", headers=self._headers, json={}, timeout=60)
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]

    def run(self, code: str, seconds: float = 120) -> str:
        """What the code printed; fails with the traceback when it raised."""
        printed, error = asyncio.run(asyncio.wait_for(self._run(code), seconds))
        assert error is None, error
        return printed

    async def _run(self, code: str) -> tuple[str, str | None]:
        address = self._url.replace("http", "ws", 1) + f"/api/kernels/{self.id}/channels"
        socket = await websocket_connect(HTTPRequest(address, headers=self._headers))
        asked = uuid.uuid4().hex
        header = {"msg_id": asked, "msg_type": "execute_request", "username": "", "session": "t"}
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        message: dict[str, Any] = {
            "header": {**header, "version": "5.3"},
            "parent_header": {},
            "metadata": {},
            "channel": "shell",
            "content": content,
        }
        await socket.write_message(json.dumps(message))
        printed, error = "", None
        try:
            while True:
                got = await socket.read_message()
                assert isinstance(got, str), "the notebook server closed the connection"
                said = json.loads(got)
                if said["parent_header"].get("msg_id") != asked:
                    continue
                if said["msg_type"] == "stream" and said["content"]["name"] == "stdout":
                    printed += said["content"]["text"]
                elif said["msg_type"] == "error":
                    error = "\n".join(said["content"]["traceback"])
                elif said["msg_type"] == "status":
                    if said["content"]["execution_state"] == "idle":
                        return printed, error
        finally:
            socket.close()
            # The other side's answer to that; the socket is closed then.
            while await socket.read_message() is not None:
                pass
