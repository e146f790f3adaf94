"""What a Hub needs so that its users can trace: a service, who may use it, and how notebooks find it.

Merge this into your jupyterhub_config.py: where yours sets one of these already, add the entries to
it, because an assignment replaces what was set above. The service's side is in nnsight.env,
nnsight_config.py and nnsight.service beside this file.
"""

import os

c = get_config()  # noqa: F821

# The Hub's address as notebooks reach it, with c.JupyterHub.base_url and without a slash at the end.
HUB_URL = os.environ.get("HUB_URL", "http://127.0.0.1:8000")

c.JupyterHub.services = [
    {
        "name": "nnsight",
        # Where the service listens: this machine, or the GPU node as the Hub's proxy reaches it.
        "url": os.environ.get("NNSIGHT_SERVICE_URL", "http://127.0.0.1:9000"),
        # The JUPYTERHUB_API_TOKEN of nnsight.env; `openssl rand -hex 32` makes one.
        "api_token": os.environ["NNSIGHT_SERVICE_TOKEN"],
        # An external service: systemd starts it, and a restart of the Hub does not unload the
        # model. With these the Hub starts it itself, and without "user" as its own account, which
        # reads the Hub's database:
        # "user": "nnsight",
        # "command": [
        #     "/opt/nnsight/bin/jupyterhub-singleuser", "--config=/etc/nnsight/nnsight_config.py"
        # ],
        # "environment": {"JUPYTERHUB_SINGLEUSER_LOAD_OTHER_EXTENSIONS": "0"},
    }
]

# Who may reach the service. Nobody else does, whatever the service's own settings say.
c.JupyterHub.load_groups = {
    "nnsight-users": {"users": ["ada", "grace"]},
    # Edits for everybody, and control of the engine (c.NNsightServe.admins in nnsight_config.py).
    "nnsight-admins": {"users": ["ada"]},
}
c.JupyterHub.load_roles = [
    {
        "name": "nnsight-users",
        "description": "Run traces on the served model",
        "scopes": ["access:services!service=nnsight"],
        "groups": ["nnsight-users", "nnsight-admins"],
    }
]

# A notebook's own token gets the scope too; the Hub leaves it out for users who do not have it.
c.Spawner.server_token_scopes = [
    "users:activity!user",
    "access:servers!server",
    "access:services!service=nnsight",
]

# Where connect() looks for the server.
c.Spawner.environment = {"NNSIGHT_SERVE_URL": f"{HUB_URL}/services/nnsight"}
