"""A real JupyterHub behind its own proxy, with the configuration of examples/jupyterhub.

The Hub runs the example's jupyterhub_config.py, and beside it what a test machine needs: its ports,
anybody may log in, servers are processes of this account. The external service runs the example's
nnsight.env and nnsight_config.py, on the engine that a test asks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import routes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "jupyterhub"
FAKE_ENGINE = ROOT / "tests" / "fake_engine.py"
# A word that pages of Jupyter have too.
BASE = "/some/lab"
START_SECONDS = 240

# Everything here is plain http on this machine; reading certificates takes longer than asking.
PLAIN: dict[str, Any] = {"verify": False, "trust_env": False}

# The users of the tests. The first two may trace, in the example's two groups.
ADA = "ada lovelace"
JOSE = "josé.müller@uni-köln.de"
EVE = "eve"
BOSS = "boss"

HUB_CONFIG = """
import json, os
load_subconfig(os.environ["EXAMPLE_CONFIG"])
given = json.loads(os.environ["HUB_GIVEN"])
c.JupyterHub.load_groups["nnsight-users"]["users"] = given["users"]
c.JupyterHub.load_groups["nnsight-admins"]["users"] = []
c.JupyterHub.load_groups["editors"] = {"users": given["users"][:1]}
c.JupyterHub.bind_url = given["bind_url"]
c.JupyterHub.hub_port = given["hub_port"]
c.JupyterHub.db_url = "sqlite:///" + given["folder"] + "/hub.sqlite"
c.JupyterHub.cookie_secret_file = given["folder"] + "/cookie_secret"
c.JupyterHub.pid_file = given["folder"] + "/hub.pid"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.allow_all = True
c.Authenticator.admin_users = {given["boss"]}
c.ConfigurableHTTPProxy.command = [given["proxy"]]
c.ConfigurableHTTPProxy.api_url = given["proxy_api"]
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = given["folder"] + "/home"
c.Spawner.cmd = given["singleuser"]
c.Spawner.args = ["--allow-root"]
c.Spawner.http_timeout = c.Spawner.start_timeout = 120
c.Spawner.environment.update(given["environment"])
c.Spawner.server_token_scopes += ["access:services!service=managed"]
c.JupyterHub.allow_named_servers = True
c.JupyterHub.services += given["services"]
c.JupyterHub.load_roles += given["roles"]
c.JupyterHub.custom_scopes = {"custom:nnsight:admin": {"description": "control the engine"}}
"""


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def wait_until(condition: Callable[[], Any], seconds: float, told: Callable[[], str]) -> Any:
    """The first true value of `condition`; fails with what `told` says."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.3)
    raise AssertionError(told())


def read_env(file: Path) -> dict[str, str]:
    """The variables of a file as systemd reads it."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


class Process:
    """A process of this test, with its output in a file.

    It is started by this Python and not by a shell, whose background processes ignore SIGINT.
    """

    def __init__(self, command: list[str], log: Path, env: dict[str, str], cwd: Path) -> None:
        self.log_file = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=cwd
            )

    @property
    def log(self) -> str:
        """What it said."""
        return self.log_file.read_text(errors="replace")

    def wait_said(self, text: str) -> None:
        """Return when it has said `text`; a trace is logged after it is answered."""
        wait_until(lambda: text in self.log, 10, lambda: f"{text!r} is not in\n{self.tail()}")

    def tail(self) -> str:
        """The end of what it said."""
        return "\n".join(self.log.splitlines()[-60:])

    def stop(self) -> None:
        """End it as its supervisor would, and then whatever it started and left."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.popen.pid).children(recursive=True)
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(40)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        _, left = psutil.wait_procs(started, timeout=5)
        for process in left:
            process.kill()


class Hub:
    """A running Hub.

    Parameters
    ----------
    folder
        Where everything it writes goes.
    proxy
        The configurable-http-proxy to run.
    settings
        Of `c.NNsightServe` for the external service, over the example's.
    environment
        Variables of the single-user servers, besides those of the example.
    """

    def __init__(
        self,
        folder: Path,
        proxy: Path,
        settings: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        public, hub, proxy_api, self.service_port, managed = free_ports(5)
        self.managed_direct = f"http://127.0.0.1:{managed}{BASE}/services/managed"
        self.root = f"http://127.0.0.1:{public}"
        self.url = self.root + BASE
        self.api_url = f"http://127.0.0.1:{hub}{BASE}/hub/api"
        self.service_token = secrets.token_hex(16)
        self.token = secrets.token_hex(16)
        home = folder / "home"
        (home / ".jupyter").mkdir(parents=True)
        # The users' own servers have the extension too, because it is in their environment.
        own = {"NNsightServe": fake_engine(folder / "own.jsonl")}
        (home / ".jupyter" / "jupyter_server_config.json").write_text(json.dumps(own))
        # What a person's login would bring, and nothing of the Hub's.
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "HF_HUB_OFFLINE": "1",
        }
        (folder / "routes_probe.py").write_text(routes.PROBE)
        managed_config = self.config(
            "managed",
            {
                **fake_engine(folder / "managed.jsonl"),
                "tracers": ["group:nnsight-users"],
                "editors": ["group:editors"],
            },
        )
        given = {
            "folder": str(folder),
            "users": [ADA, JOSE],
            "boss": BOSS,
            "singleuser": singleuser(),
            "bind_url": f"{self.root}{BASE}/",
            "hub_port": hub,
            "proxy": str(proxy),
            "proxy_api": f"http://127.0.0.1:{proxy_api}",
            "environment": {**self.environment, **(environment or {})},
            "services": [
                {"name": "tests", "api_token": self.token},
                {
                    "name": "managed",
                    "url": f"http://127.0.0.1:{managed}",
                    "command": [*singleuser(), f"--config={managed_config}", "--allow-root"],
                    "environment": {
                        **self.environment,
                        "JUPYTERHUB_SINGLEUSER_LOAD_OTHER_EXTENSIONS": "0",
                        "JUPYTER_RUNTIME_DIR": str(folder / "managed"),
                    },
                },
            ],
            "roles": [
                {
                    "name": "tests",
                    "services": ["tests"],
                    "scopes": [
                        *("admin:users", "admin:servers", "admin:groups", "tokens", "shares"),
                        *("list:users", "read:users:activity", "read:servers", "delete:servers"),
                    ],
                },
                {
                    "name": "managed-users",
                    "scopes": ["access:services!service=managed"],
                    "groups": ["nnsight-users"],
                },
            ],
        }
        config = folder / "jupyterhub_config.py"
        config.write_text(HUB_CONFIG)
        self.process = Process(
            [sys.executable, "-m", "jupyterhub", "--config", str(config)],
            folder / "hub.log",
            {
                **os.environ,
                "EXAMPLE_CONFIG": str(EXAMPLE / "jupyterhub_config.py"),
                "HUB_GIVEN": json.dumps(given),
                "HUB_URL": self.url,
                "NNSIGHT_SERVICE_URL": f"http://127.0.0.1:{self.service_port}",
                "NNSIGHT_SERVICE_TOKEN": self.service_token,
                "CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(16),
            },
            folder,
        )
        try:
            wait_until(lambda: self._answers(self.api_url), START_SECONDS, self.process.tail)
            # Now: it asks the Hub who it is, and the Hub waits for its services before it goes on.
            self.service = self.start_service(settings)
        except BaseException:
            self.process.stop()
            raise

    def config(self, name: str, settings: dict[str, Any]) -> Path:
        """The example's nnsight_config.py with `settings` of `c.NNsightServe` over its own."""
        file = self.folder / f"{name}_config.py"
        lines = [f"c.NNsightServe.{key} = {value!r}" for key, value in settings.items()]
        file.write_text(
            f"load_subconfig({str(EXAMPLE / 'nnsight_config.py')!r})\nc = get_config()\n"
            "c.HubAuth.cache_max_age = 3\n"
            "c.ServerApp.jpserver_extensions['routes_probe'] = True\n" + "\n".join(lines) + "\n"
        )
        return file

    def start_service(self, settings: dict[str, Any]) -> Process:
        """Start the external service as systemd would: with the example's variables alone."""
        runtime = self.folder / "service"
        runtime.mkdir()
        env = {
            **self.environment,
            **read_env(EXAMPLE / "nnsight.env"),
            "HOME": str(runtime),
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTERHUB_API_TOKEN": self.service_token,
            "JUPYTERHUB_API_URL": self.api_url,
            "JUPYTERHUB_BASE_URL": BASE + "/",
            "JUPYTERHUB_SERVICE_PREFIX": f"{BASE}/services/nnsight/",
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{self.service_port}",
        }
        command = [*singleuser(), f"--config={self.config('nnsight', settings)}", "--allow-root"]
        return Process(command, self.folder / "service.log", env, runtime)

    # What the Hub's API is asked for.

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """The Hub's answer to the tests' own service."""
        answer = httpx.request(
            method,
            self.api_url + path,
            json=body,
            headers={"Authorization": f"token {self.token}"},
            timeout=60,
            **PLAIN,
        )
        assert answer.status_code < 400, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def wait(self) -> None:
        """Return when the Hub and its proxy answer and the users are there."""

        wait_until(lambda: self._answers(f"{self.url}/hub/api"), START_SECONDS, self.process.tail)
        known = {user["name"] for user in self.api("GET", "/users")}
        for name in (ADA, JOSE, EVE, BOSS):
            if name not in known:
                self.api("POST", f"/users/{quote(name)}")

    def _answers(self, url: str) -> bool:
        assert self.process.popen.poll() is None, self.process.tail()
        return httpx.get(url, **PLAIN).status_code == 200

    def user_token(self, name: str, scopes: list[str] | None = None) -> dict[str, Any]:
        """A new token of a user, with all of the user's scopes or those given."""
        body = {"note": "test", **({} if scopes is None else {"scopes": scopes})}
        made: dict[str, Any] = self.api("POST", f"/users/{quote(name)}/tokens", body)
        return made

    def revoke(self, name: str, made: dict[str, Any]) -> None:
        """Revoke a token of `user_token`."""
        self.api("DELETE", f"/users/{quote(name)}/tokens/{made['id']}")

    def start_server(self, name: str, server: str = "") -> str:
        """Start a user's own notebook server; its address through the proxy."""
        path = f"/users/{quote(name)}/" + (f"servers/{server}" if server else "server")
        self.api("POST", path)

        def ready() -> Any:
            found = self.servers(name).get(server)
            return found and found["ready"] and found["url"]

        return self.root + str(wait_until(ready, 120, self.process.tail)).rstrip("/")

    def servers(self, name: str) -> dict[str, Any]:
        """A user's running servers, as a culler sees them."""
        found: dict[str, Any] = self.api("GET", f"/users/{quote(name)}")["servers"]
        return found

    def stop_server(self, name: str, server: str = "") -> None:
        """Stop a user's server."""
        path = f"/users/{quote(name)}/" + (f"servers/{server}" if server else "server")
        self.api("DELETE", path)
        wait_until(lambda: server not in self.servers(name), 60, self.process.tail)

    def stop(self) -> None:
        """End the service, then the Hub with all it started."""
        self.service.stop()
        self.process.stop()


def singleuser() -> list[str]:
    """The command `jupyterhub-singleuser` of this environment."""
    return [sys.executable, "-m", "jupyterhub.singleuser"]


def fake_engine(record: Path) -> dict[str, Any]:
    """Settings of `c.NNsightServe` for the engine of the tests that holds no model."""
    return {
        "model": "fake/model",
        "engine_args": {},
        "engine_command": [sys.executable, str(FAKE_ENGINE), "--record", str(record)],
    }


class Client:
    """Somebody who holds a token, at a server of the extension.

    Parameters
    ----------
    url
        The server's address as the client gives it.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self.headers = {} if token is None else {"Authorization": f"token {token}"}

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 90) -> httpx.Response:
        """One request; a redirect is an answer."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        return httpx.request(
            method,
            self.url + path,
            content=content,
            headers=self.headers,
            timeout=timeout,
            **PLAIN,
        )

    def status(self) -> dict[str, Any]:
        """What the server tells of itself and of the caller."""
        answer = self.ask("GET", "/nnsight/status")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_ready(self, tail: Callable[[], str]) -> None:
        """Return when the server's engine is ready."""

        def ready() -> bool:
            answer = httpx.get(self.url + "/nnsight/health", **PLAIN)
            assert "engine is failed" not in answer.text, tail()
            return answer.status_code == 200

        wait_until(ready, START_SECONDS, tail)


@contextlib.contextmanager
def running_hub(
    folder: Path,
    proxy: Path,
    settings: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> Iterator[Hub]:
    """A Hub that answers, stopped at the end."""
    hub = Hub(folder, proxy, settings, environment)
    try:
        hub.wait()
        yield hub
    finally:
        hub.stop()
