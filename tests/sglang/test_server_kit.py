"""The real server's helper asks again while SGLang is busy, and only then."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_cpu import server as server_kit
from sglang_cpu.server import ServerError, SGLangServer

BUSY = "Reject attach: scheduler is not idle. #queue-req=0 #running-req=1"


class Answers(SGLangServer):
    """Gives these answers in turn, the last one again and again."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    def call(self, *_: Any, **__: Any) -> tuple[int, Any]:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_kit, "POLL_S", 0.001)
    monkeypatch.setattr(server_kit, "STOP_TIMEOUT_S", 0.05)


def test_a_busy_server_is_asked_again() -> None:
    server = Answers((400, BUSY), (400, BUSY), (200, "attached"))
    assert server.attach("tutti", {}) == (200, "attached")
    assert server.asked == 3
    Answers((400, BUSY), (200, "detached")).detach()


def test_another_refusal_stands() -> None:
    server = Answers((400, "no such option"), (200, "attached"))
    assert server.attach("tutti", {}) == (400, "no such option")
    assert server.asked == 1
    with pytest.raises(ServerError, match="not enabled"):
        Answers((400, "not enabled"), (200, "detached")).detach()


def test_a_server_that_stays_busy_is_given_up() -> None:
    assert Answers((400, BUSY)).attach("tutti", {}) == (400, BUSY)
