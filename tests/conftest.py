"""Fixtures of Jupyter's own test plugin."""

pytest_plugins = ["pytest_jupyter.jupyter_server"]
