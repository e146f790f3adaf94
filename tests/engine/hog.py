"""A user who keeps a number of traces in flight, in a process of its own.

    python hog.py URL TOKEN COUNT BODY_FILE

sends the same body again and again on COUNT threads until its standard input ends, and then prints
how many answers came back in order.
"""

from __future__ import annotations

import http.client
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

ended = threading.Event()
answers: list[int] = []


def keep_sending(url: str, token: str, body: bytes) -> None:
    """One trace after the other."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    while not ended.is_set():
        connection.request(
            "POST", f"{address.path}/nnsight/generate", body, {"ndif-api-key": token}
        )
        answer = connection.getresponse()
        answer.read()
        answers.append(answer.status)
    connection.close()


def main(url: str, token: str, count: str, file: str) -> None:
    """Run until standard input ends."""
    body = Path(file).read_bytes()
    threads = [
        threading.Thread(target=keep_sending, args=(url, token, body)) for _ in range(int(count))
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}, set(answers)
    print(len(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
