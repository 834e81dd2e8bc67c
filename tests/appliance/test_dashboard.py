# SPDX-License-Identifier: Apache-2.0
"""The operators' web page: served whole, from this server alone, asking only for what there is."""

from __future__ import annotations

import re

import pytest

from appliance.api.dashboard import FILES
from appliance.session_views import RECENT_TURNS
from tests.fakes.appliance import RunningApp

KINDS = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
SVG = 'xmlns="http://www.w3.org/2000/svg"'  # a name, asked of nobody
TEXTS = {name: body.decode().replace(SVG, "") for name, body in FILES.items()}
ENDPOINT = re.compile(r'\["(GET|POST|DELETE|PUT)", "(/[^"]*)"\]')
ADDRESS = re.compile(r'(?:src|href)="([^"#]+)"|from "([^"]+)"')


def test_every_file_that_the_page_names_is_served_with_a_strict_policy(app: RunningApp) -> None:
    page = app.get("/dashboard")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    named = {one or two for text in TEXTS.values() for one, two in ADDRESS.findall(text)}
    own = {f"/dashboard/{name}" for name in ("app.js", "style.css", "icon.svg")}
    assert own | {"./api.js"} <= named
    for name in named:
        reply = app.get("/dashboard/" + name.rsplit("/", 1)[1])
        assert reply.status_code == 200, name
        assert reply.headers["content-security-policy"].startswith("default-src 'self';")
        kind = KINDS[name.rsplit(".", 1)[1]]
        assert reply.headers["content-type"].startswith(kind)
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e", "__init__.py"])
def test_no_other_file_is_served(app: RunningApp, name: str) -> None:
    assert app.get(f"/dashboard/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_file_names_no_other_host_and_makes_no_markup_of_texts(name: str) -> None:
    text = TEXTS[name]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert not re.search(r"\sstyle=|\son[a-z]+=|<script(?! type=\"module\" src)", text)
    if name != "api.js":
        assert "fetch(" not in text and '"/v1' not in text and '"/admin' not in text


def test_every_endpoint_that_the_page_asks_is_one_of_the_server(app: RunningApp) -> None:
    paths = app.get("/openapi.json").json()["paths"]
    found = ENDPOINT.findall(TEXTS["api.js"])
    assert len(found) == TEXTS["api.js"].count('"/') >= 19
    for method, path in found:
        assert method.lower() in paths[path], f"{method} {path}"


def test_the_page_needs_no_key_and_what_it_asks_does(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("k")
    with RunningApp(root, settings={"server": {"api_keys": {"secret": "a"}}}) as app:
        assert app.get("/dashboard").status_code == 200
        assert app.get("/v1/sessions").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert app.get("/v1/sessions", headers=key).status_code == 200
        assert app.get("/admin/tiers", headers=key).status_code == 401


def test_a_cache_view_sums_up_the_last_turns_and_counts_all_of_the_history(
    app: RunningApp,
) -> None:
    """From the turns themselves; a fork has its parent's history, and so its turns."""
    session_id = app.session()
    view = app.get(f"/v1/sessions/{session_id}/cache").json()
    assert view["num_turns"] == 0
    assert view["recent_turns"] == {"turns": 0, "cached_tokens": 0, "prompt_tokens": 0}
    turns = [app.turn(session_id, f"Hello {i}") for i in range(RECENT_TURNS + 2)]
    last = [turn["usage"] for turn in turns[-RECENT_TURNS:]]
    view = app.get(f"/v1/sessions/{session_id}/cache").json()
    assert view["num_turns"] == RECENT_TURNS + 2
    assert view["recent_turns"] == {
        "turns": RECENT_TURNS,
        "cached_tokens": sum(one["input_tokens_details"]["cached_tokens"] for one in last),
        "prompt_tokens": sum(one["input_tokens"] for one in last),
    }
    fork = app.post(f"/v1/sessions/{session_id}/fork", {"n": 1}).json()["data"][0]
    assert fork["tenant"] == "default"
    assert app.get(f"/v1/sessions/{fork['id']}/cache").json()["num_turns"] == RECENT_TURNS + 2
