"""How the tests of arbitrary input run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def many(pytestconfig: pytest.Config) -> Any:
    """hypothesis's settings for as many inputs as were asked for."""
    return settings(
        max_examples=pytestconfig.getoption("--fuzz"),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
