"""Fixtures of Jupyter's own test plugin, and the tests' own option."""

import pytest

pytest_plugins = ["pytest_jupyter.jupyter_server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many inputs the tests of arbitrary input try."""
    parser.addoption("--fuzz", type=int, default=200, help="inputs at each entry")
