"""HTTP to one server: its address, the token, and what its refusals mean.

Nothing here is asynchronous: httpx's asynchronous half needs anyio's asyncio backend, which cannot
be imported once nnsight is. Whoever may not block runs this on a thread.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import traceback
from collections.abc import Generator, Iterator
from typing import Any

import httpx

from .address import Address
from .errors import EngineNotReady, HubError, NotTrusted
from .secret import Secret

CONNECT_SECONDS = 10.0
ASK_SECONDS = 30.0


class _Bearer(httpx.Auth):
    """Puts the token into a request when it is sent, so that no caller's variable has held it."""

    def __init__(self, token: Secret) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self._token.reveal()}"
        yield request


class Link:
    """The way to one server.

    Parameters
    ----------
    address
        Where it is.
    token
        A token of it.
    timeout
        Seconds of silence after which a running trace is given up.

    Raises
    ------
    HubError
        No header can hold the token, or the file with trusted certificates cannot be read.
    """

    def __init__(self, address: Address, token: Secret, timeout: float) -> None:
        if not token.can_travel:
            raise HubError(
                "This token cannot be one: it has a space, a line break or a sign that is not "
                "ASCII in it; copy it again."
            )
        url = self.url = address.url
        self.token = token
        self.timeout = timeout
        # A new connection for each request: a kept one can be closed by a proxy just when a trace
        # is sent on it, and then nobody knows whether the trace ran.
        self._client = httpx.Client(
            timeout=httpx.Timeout(ASK_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # A proxy for the outside world does not know this machine's own ports.
            trust_env=not address.is_local,
            follow_redirects=False,
            auth=_Bearer(token) if token else None,
            verify=_no_tls() if url.startswith("http://") else _trusted(),
        )

    def __repr__(self) -> str:
        return f"<Link {self.url}>"

    def ask(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """The answer to a request below the server's address; 304 is one.

        Raises
        ------
        HubError
            The server was not reached, or it refused.
        """
        response = self._request(method, path, headers=headers, **options)
        self.check(response)
        return response

    def look(self, path: str, seconds: float) -> httpx.Response:
        """Whatever answers below the server's address, within so many seconds.

        Raises
        ------
        HubError
            Nothing does.
        """
        return self._request("GET", path, timeout=seconds)

    def has_jupyter(self) -> bool:
        """Whether a Jupyter server is there, with the extension or without."""
        try:
            answer = self.look("/api", ASK_SECONDS)
            return answer.status_code == 200 and answer.json()["version"] is not None
        except (HubError, ValueError, TypeError, KeyError):
            return False

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            with self.meaning():
                return self._client.request(method, self.url + path, **options)
        except BaseException as error:
            # What is interrupted has frames that hold the request's headers as they were sent.
            traceback.clear_frames(error.__traceback__)
            raise

    def ask_json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The JSON object that answers a request."""
        response = self.ask(method, path, **options)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.not_an_api()
        return answer

    @contextlib.contextmanager
    def send(
        self, path: str, headers: dict[str, str], content: Any, extensions: dict[str, Any]
    ) -> Iterator[httpx.Response]:
        """POST ``content``; the answer's body is read by the caller."""
        timeout = httpx.Timeout(self.timeout, connect=CONNECT_SECONDS)
        with self._client.stream(
            "POST",
            self.url + path,
            content=content,
            headers=headers,
            timeout=timeout,
            extensions=extensions,
        ) as response:
            yield response

    @contextlib.contextmanager
    def meaning(self) -> Iterator[None]:
        """Turn what httpx raises before an answer into a sentence."""
        try:
            yield
        except httpx.HTTPError as error:
            raise self.unreached(error) from None

    def unreached(self, error: Exception) -> HubError:
        """Why there was no answer."""
        text = f"{error}"
        if "CERTIFICATE_VERIFY" in text.upper():
            return NotTrusted(
                f"The certificate of {self.url} is not one this machine trusts; set SSL_CERT_FILE "
                "to the file with its authority's certificate."
            )
        if "WRONG_VERSION_NUMBER" in text.upper() or "SSL" in text.upper():
            return HubError(
                f"{self.url} does not speak https there; try http:// in place of https://."
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return HubError(
                f"Nothing answers at {self.url}; check host and port, and that the Jupyter server "
                "is running."
            )
        if isinstance(error, httpx.TimeoutException):
            return HubError(f"{self.url} did not answer in time; try again.")
        if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http://"):
            return HubError(
                f"{self.url} closed the connection without an answer; if it is reached with "
                "https, write https:// in place of http://."
            )
        return HubError(f"The connection to {self.url} failed: {type(error).__name__}.")

    def check(self, response: httpx.Response) -> None:
        """Raise what a refusal means; its body has been read."""
        if response.status_code not in (200, 304):
            raise self.refusal(response)

    def refusal(self, response: httpx.Response) -> HubError:
        """What an answer other than success means, as one sentence that says what to do."""
        status = response.status_code
        said = message_of(response)
        # The extension tells whoever has no valid token about api_key=, which is nnsight's word.
        if said is not None and not (status in (401, 403) and "api_key=" in said):
            if status == 503:
                return EngineNotReady(said, status, _seconds(response.headers.get("Retry-After")))
            return HubError(said, status)
        if 300 <= status < 400:
            return self._redirected(response)
        if status == 401 or (status == 403 and not self.token):
            return HubError(
                f"Not logged in at {self.url}: no token was sent; call connect(url, token) with a "
                "token of that Jupyter server, or your JupyterHub token.",
                status,
            )
        if status == 403:
            return HubError(
                f"{self.url} does not accept this token: it is mistyped, expired or for another "
                "server, or you have no access there; call connect(url, token) with a current one.",
                status,
            )
        if status == 404:
            return self._not_found()
        if status == 424 or (status == 503 and "/user/" in self.url):
            return HubError(
                f"JupyterHub answers that the server at {self.url} is not running; start it on "
                "the Hub's page, then connect again.",
                status,
            )
        if status == 503:
            return HubError(
                f"The service at {self.url} is not running behind its proxy (503); ask its admin, "
                "or try again in a minute.",
                status,
            )
        if status in (502, 504):
            return HubError(
                f"A proxy before {self.url} got no answer from it ({status}); the server may be "
                "restarting, try again in a minute.",
                status,
            )
        if status == 413:
            return HubError(
                f"A proxy before {self.url} does not let a request of this size pass (413); "
                "capture less in the block, or ask its admin to raise the proxy's limit.",
                status,
            )
        if status == 405:
            return self.not_an_api()
        return HubError(f"{self.url} answered {status}, which this client does not expect.", status)

    def _redirected(self, response: httpx.Response) -> HubError:
        target = response.headers.get("Location", "")
        path = target.split("?")[0]
        if "login" in path or "/oauth" in path or "/hub/" in path:
            problem = "this token is not accepted there" if self.token else "no token was sent"
            return HubError(
                f"Not logged in at {self.url}: {problem}, so the answer was a login page; call "
                "connect(url, token) with a token of that server, or your JupyterHub token.",
                response.status_code,
            )
        if path.startswith("https://") and self.url.startswith("http://"):
            return HubError(
                f"{self.url} is reached with https only; write https:// in place of http://.",
                response.status_code,
            )
        return HubError(
            f"{self.url} sends visitors on to another address, so it is not the server's own; "
            "give the server's address with its whole base URL.",
            response.status_code,
        )

    def _not_found(self) -> HubError:
        """Tell a server without the extension from an address that is no Jupyter server's."""
        if self.has_jupyter():
            return HubError(
                f"The Jupyter server at {self.url} does not have the nnsight extension; install "
                "jupyter-nnsight-serve in that server's environment and restart it.",
                404,
            )
        return HubError(
            f"There is no Jupyter server at {self.url}; if it has a base URL, give it too, for "
            "example http://HOST:PORT/BASE_URL.",
            404,
        )

    def not_an_api(self) -> HubError:
        """An answer of the kind a web page is."""
        return HubError(
            f"{self.url} answers with a web page and not with a Jupyter server's API: it is a "
            "login page or another address; give the server's address with its base URL, and a "
            "token of it."
        )


def message_of(response: httpx.Response) -> str | None:
    """The extension's own sentence; None when the answer is somebody else's."""
    try:
        body = response.json()
    except ValueError:
        return None
    # Only the extension's errors have all three; Jupyter's and JupyterHub's have "message" alone.
    if isinstance(body, dict) and isinstance(body.get("detail"), str) and "reason" in body:
        return str(body["detail"])
    return None


def sentence_of(payload: bytes) -> HubError:
    """The error that stands in place of a result."""
    try:
        body = json.loads(payload)
        message, status = str(body["message"]), int(body.get("status") or 500)
    except (ValueError, KeyError, TypeError):
        return HubError("The server failed on this trace and did not say why.")
    return EngineNotReady(message, status) if status == 503 else HubError(message, status)


def _seconds(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _trusted() -> ssl.SSLContext:
    """The certificates of SSL_CERT_FILE or SSL_CERT_DIR, which count for this machine as well."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise HubError(
            "The certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read "
            f"({type(error).__name__}); correct it or unset it."
        ) from None


def _no_tls() -> ssl.SSLContext:
    """A context that costs nothing to make: loading the certificates takes 20 ms, and more cold."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
