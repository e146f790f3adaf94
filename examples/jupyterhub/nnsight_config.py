"""The service's own settings: `jupyterhub-singleuser --config=/etc/nnsight/nnsight_config.py`."""

c = get_config()  # noqa: F821

c.NNsightServe.model = "meta-llama/Llama-3.1-8B"
c.NNsightServe.engine_args = {"max_model_len": 8192}

# Without this, everybody who may trace may also use this server's files, kernels and terminals.
c.ServerApp.authorizer_class = "jupyter_nnsight_serve.authorizer.NNsightAuthorizer"
# Nothing else that is installed here is loaded, with the last line of nnsight.env.
c.ServerApp.jpserver_extensions = {"jupyter_nnsight_serve": True}

# Of those who may reach the service: who may do what.
c.NNsightServe.tracers = ["everyone"]
c.NNsightServe.editors = ["everyone"]
c.NNsightServe.admins = ["group:nnsight-admins", "hub-admins"]

# Seconds for which the Hub's answer about a token is believed: a revoked token, or a user who left
# a group, is refused after this time at the latest. JupyterHub's default is 300.
c.HubAuth.cache_max_age = 60
