# SPDX-License-Identifier: Apache-2.0
"""The operators' page in a real browser, where there is one: what it shows and does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.appliance import RunningApp, says
from tests.fakes.browser import BrowserPage, browser_or_skip

ODD_NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def browser() -> None:
    browser_or_skip()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[RunningApp]:
    with RunningApp(tmp_path / "app", says("Hello there.")) as running:
        yield running


@pytest.fixture
def page(tmp_path: Path) -> Iterator[BrowserPage]:
    with BrowserPage(tmp_path / "profile") as opened:
        yield opened


def cells(page: BrowserPage, session_id: str) -> list[str]:
    """A session's row as it reads."""
    row = f"document.getElementById('to-{session_id}').closest('tr')"
    return list(page.until(f"[...{row}.cells].map((cell) => cell.innerText)"))


def test_a_session_s_row_shows_what_the_server_says_of_it(
    app: RunningApp, page: BrowserPage
) -> None:
    session_id = app.session(metadata={"name": ODD_NAME})
    for _ in range(3):
        app.turn(session_id)
    page.go(f"{app.url}/dashboard#sessions")
    row = cells(page, session_id)
    heads = page.run("[...document.querySelectorAll('main th')].map((th) => th.innerText)")
    shown = dict(zip(heads, row, strict=True))
    look = app.get(f"/v1/sessions/{session_id}/cache").json()
    recent, last = look["recent_turns"], look["last_turn"]
    cached = sum(last[f"cached_{tier}"] for tier in ("l1", "l2", "l3"))
    assert shown["name"] == ODD_NAME
    assert shown["tenant"] == "default" and shown["state"] == "idle" and shown["turns"] == "3"
    part = 100 * recent["cached_tokens"] / recent["prompt_tokens"]
    assert shown["cached lately"] == f"{part:.1f} %"
    assert shown["cached last"] == f"{100 * cached / (cached + last['computed']):.1f} %"
    assert page.run("document.querySelectorAll('main img').length") == 0
    assert page.complaints == []


def test_every_view_is_shown_without_an_error_and_fits_a_phone(
    app: RunningApp, tmp_path: Path
) -> None:
    session_id = app.session(metadata={"name": "n" * 300, "k" * 60: "v" * 500})
    app.turn(session_id)
    with BrowserPage(tmp_path / "profile", width=390, height=844) as phone:
        for view, shows in {
            "overview": "Prompt cache",
            "sessions": "Tokens by tier",
            "cache": "Prefix tree",
            f"session/{session_id}": "The last 1 found",
        }.items():
            phone.go(f"{app.url}/dashboard#{view}")
            phone.until(f"document.querySelector('main').innerText.includes('{shows}')")
            assert phone.run("document.documentElement.scrollWidth <= innerWidth"), view
        assert phone.run("document.querySelector('link[rel=icon]').href").endswith("icon.svg")
        assert phone.complaints == []


def test_a_turn_is_cancelled_and_a_session_deleted_after_a_question(
    app: RunningApp, page: BrowserPage
) -> None:
    session_id = app.session()
    app.engine.pause()
    with app.http.stream(
        "POST", f"/v1/sessions/{session_id}/turns", json={"input": "x", "stream": True}
    ) as reply:
        page.go(f"{app.url}/dashboard#session/{session_id}")
        page.click("#cancel")
        runner, limit_s = app.asgi.state.context.turns.runner, time.monotonic() + 30
        while (runs := list(runner.runs())) and not any(run.stop_cause for run in runs):
            assert time.monotonic() < limit_s, "nobody cancelled the turn"
            time.sleep(0.01)
        assert b"event: turn.cancelled" in reply.read()
    app.engine.resume()
    page.until("document.querySelector('main').innerText.includes('cancelled')")
    page.click("#delete")
    page.click("#confirm-dialog[open] button[value=cancel]")
    assert app.get(f"/v1/sessions/{session_id}").status_code == 200
    page.click("#delete")
    page.click("#confirm-dialog[open] button[value=ok]")
    page.until("location.hash === '#sessions' && document.getElementById('rows')")
    assert app.get(f"/v1/sessions/{session_id}").status_code == 404
    assert page.complaints == []


def test_a_question_asked_while_the_one_before_is_closing_gets_its_own_answer(
    app: RunningApp, page: BrowserPage
) -> None:
    """A dialog's close event comes later than the dialog closes."""
    session_id = app.session()
    page.go(f"{app.url}/dashboard#session/{session_id}")
    page.click("#delete")
    page.until("document.getElementById('confirm-dialog').open")
    page.run(
        """new Promise((done) => {
          const dialog = document.getElementById("confirm-dialog");
          dialog.close("cancel");
          document.getElementById("delete").click();
          dialog.addEventListener("close", () => setTimeout(done), { once: true });
        })"""
    )
    page.click("#confirm-dialog[open] button[value=ok]")
    page.until("location.hash === '#sessions' && document.getElementById('rows')")
    assert app.get(f"/v1/sessions/{session_id}").status_code == 404


def test_a_key_is_asked_for_and_a_tenant_s_shows_what_it_may(
    tmp_path: Path, page: BrowserPage
) -> None:
    settings = {"server": {"api_keys": {"secret": "team-a"}}}
    with RunningApp(tmp_path / "app", settings=settings) as app:
        key = {"Authorization": "Bearer secret"}
        made = app.post("/v1/sessions", {"model": "default"}, headers=key).json()["id"]
        page.go(f"{app.url}/dashboard#sessions")
        for given, says_no in (("wrong", True), ("secret", False)):
            page.until("document.getElementById('key-dialog').open")
            page.run(f"document.getElementById('key-input').value = '{given}'")
            page.click("#key-dialog button[value=ok]")
            if says_no:
                page.until("document.getElementById('notice').innerText.includes('refuses this')")
        assert "team-a" in cells(page, made)
        page.go(f"{app.url}/dashboard#overview")
        page.until("document.querySelector('main').innerText.includes('the admin\\'s key')")
