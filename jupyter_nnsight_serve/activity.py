"""Traces as activity, so that nothing stops a server as idle while it serves.

Jupyter counts a request when it ends. A trace may take longer than the time after which a Hub's
culler stops an idle server, so while traces are here the time of the last activity is kept at now.
JupyterHub reads it through Jupyter, every `JUPYTERHUB_ACTIVITY_INTERVAL` seconds.
"""

from __future__ import annotations

from datetime import UTC, datetime

from tornado.ioloop import PeriodicCallback

from .admission import Admission

# How far behind the time of the last activity may be, in seconds.
ACTIVITY_SECONDS = 1.0


class Activity:
    """Keeps Jupyter's last activity at now while traces are here.

    Parameters
    ----------
    times
        Jupyter's `last_activity_times`: the time of the last activity by what was active.
    """

    def __init__(self, times: dict[str, datetime], admission: Admission) -> None:
        self._times = times
        self._admission = admission
        self._timer = PeriodicCallback(self._note, ACTIVITY_SECONDS * 1000)

    def start(self) -> None:
        """Begin to look; the server's loop runs."""
        self._timer.start()

    def stop(self) -> None:
        """Look no more."""
        self._timer.stop()

    def _note(self) -> None:
        if self._admission.ids():
            self._times["nnsight_serve"] = datetime.now(UTC)
