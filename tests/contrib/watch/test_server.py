"""The server of the page: who is answered, with what, and that it only reads."""

from __future__ import annotations

import json
import os

import pytest
from starlette.testclient import TestClient

from meshwright.contrib.watch import Shelf, Watcher
from tests.contrib.watch.made_runs import line, make_run

pytestmark = pytest.mark.once
TOKEN = "the-token"


@pytest.fixture
def shelf(tmp_path):
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name, [line(step) for step in range(1, 11)])
    (tmp_path / "secret.json").write_text("{}")
    return Shelf([tmp_path / "runs"])


@pytest.fixture
def client(shelf):
    app = Watcher(shelf).app(TOKEN, ("mine.example",))
    return TestClient(app, base_url="http://127.0.0.1:8000", follow_redirects=False)


def test_the_page_and_its_files_are_answered_below_the_token(client):
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert page.text.startswith("<!doctype html>")
    assert client.get(f"/{TOKEN}/watch.js").headers["content-type"].startswith("text/javascript")
    assert client.get(f"/{TOKEN}/watch.css").headers["content-type"].startswith("text/css")
    assert client.get(f"/{TOKEN}").headers["location"] == f"/{TOKEN}/"


@pytest.mark.parametrize(
    "path", ["/", "/other/", "/the-toke/", "/the-token2/", "/thé/", "/%00/", "//the-token/x"]
)
def test_another_token_is_refused(client, path):
    answer = client.get(f"http://127.0.0.1:8000{path}")
    assert answer.status_code == (404 if path.startswith("//") else 403)
    assert "doctype" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "../secret.json",
        "..%2fsecret.json",
        "%2e%2e/secret.json",
        "..%5csecret.json",
        "/etc/passwd",
        "runs/first/metrics.jsonl",
        "watch.js/x",
        "watch.html",
        "_server.py",
        "details?run=../first",
        "log?run=%00",
        "log?run=first",
    ],
)
def test_a_path_outside_is_not_there(client, path):
    assert client.get(f"/{TOKEN}/{path}").status_code in (403, 404)
    assert client.get(f"/{TOKEN}/{path}").status_code == 404 or ".." in path


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", ""]
)
def test_a_strangers_name_for_this_machine_is_refused(client, host):
    """As where a page of a stranger has its own name lead to this machine: DNS rebinding."""
    assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost:9000", "[::1]:8000", "10.0.0.7:80", "mine.example:8000", "LOCALHOST"]
)
def test_own_names_and_addresses_are_answered_also_through_a_tunnel(client, host):
    assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9", "http://127.0.0.1"])
def test_another_pages_origin_is_refused(client, origin):
    assert client.get(f"/{TOKEN}/curves", headers={"origin": origin}).status_code == 403
    own = client.get(f"/{TOKEN}/curves", headers={"origin": "http://127.0.0.1:8000"})
    assert own.status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(client, method):
    answer = client.request(method, f"/{TOKEN}/")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_every_answer_forbids_inline_scripts_and_keeps_the_address_to_itself(client):
    for path in (f"/{TOKEN}/", "/other/", f"/{TOKEN}/curves", f"/{TOKEN}/details?run=x", f"/{TOKEN}/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert "<script>" not in client.get(f"/{TOKEN}/").text


def test_curves_are_of_the_runs_that_are_asked_for(client, shelf):
    one, other = shelf.runs
    answer = client.get(f"/{TOKEN}/curves", params={"run": [one.id, "unknown"]}).json()
    assert list(answer) == [one.id]
    assert answer[one.id]["tracks"]["train"]["first"] == list(range(1, 11))
    both = client.get(f"/{TOKEN}/curves", params={"run": [one.id, other.id], "low": 3, "high": 5}).json()
    assert set(both) == {one.id, other.id}
    assert both[one.id]["tracks"]["train"]["first"] == [2, 3, 4, 5, 6]
    had = f"{one.id}:train:0:1:10"
    assert (
        client.get(f"/{TOKEN}/curves", params={"run": one.id, "have": had}).json()[one.id]["tracks"]["train"][
            "first"
        ]
        == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "low=-1",
        "low=1e9",
        "high=" + "9" * 400,
        "have=a",
        "have=a:b:c:d:e",
        "have=" + ":" * 99,
        "run=" + "x" * 999,
    ],
)
def test_numbers_that_are_none_are_passed_over(client, shelf, text):
    assert client.get(f"/{TOKEN}/curves?run={shelf.runs[0].id}&{text}").status_code == 200


def messages(client, count: int) -> list[dict]:
    """Return the first messages of the stream of events."""
    found = []
    with client.stream("GET", f"/{TOKEN}/events") as answer:
        for text in answer.iter_lines():
            if text.startswith("data: "):
                found.append(json.loads(text[6:]))
            if len(found) == count:
                return found
    return found


def test_events_tell_all_runs_at_first_and_then_those_that_change(shelf, monkeypatch):
    told = []

    def is_over() -> bool:  # asked before each look
        told.append(True)
        if len(told) == 2:
            folder = shelf.runs[0].folder
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f"{line(11, loss=7.5)}\n")
            shelf.refresh()
        return len(told) > 3

    monkeypatch.setattr("meshwright.contrib.watch._server.TELL_SECONDS", 0.01)
    client = TestClient(Watcher(shelf, is_over).app(TOKEN), base_url="http://127.0.0.1")
    first, second = messages(client, 2)
    assert {row["name"] for row in first["runs"]} == {"first", "second"}
    (row,) = second["runs"]
    assert (row["step"], row["loss"]) == (11, 7.5)


def test_a_log_is_sent_from_where_the_page_has_read_to(client, shelf):
    run = shelf.runs[0]
    first = client.get(f"/{TOKEN}/log", params={"run": run.id}).json()
    assert first["lines"] == ["10:00:00 weighing: starting"]
    with (run.folder / "log.txt").open("a") as file:
        file.write("10:00:01 step 1\n10:00:02 no e")
    second = client.get(f"/{TOKEN}/log", params={"run": run.id, "offset": first["offset"]}).json()
    assert second["lines"] == ["10:00:01 step 1"]
    with (run.folder / "log.txt").open("a") as file:
        file.write("nd\n")
    third = client.get(f"/{TOKEN}/log", params={"run": run.id, "offset": second["offset"]}).json()
    assert third["lines"] == ["10:00:02 no end"]


def test_the_end_of_a_long_log_begins_with_a_whole_line(client, shelf):
    run = shelf.runs[0]
    (run.folder / "log.txt").write_text("".join(f"line {number}\n" for number in range(20_000)) + "x" * 99)
    lines = client.get(f"/{TOKEN}/log", params={"run": run.id}).json()["lines"]
    assert lines[-1] == "line 19999"
    assert all(each.startswith("line ") for each in lines)
    (run.folder / "log.txt").write_text("y" * 200_000)
    (only,) = client.get(f"/{TOKEN}/log", params={"run": run.id}).json()["lines"]
    assert len(only) < 5000


def test_what_cannot_be_read_is_told_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / "half", [line(1)], run_json="{", config_json="[1, 2]")
    (folder / "measurement.json").write_text('{"schema": 99}')
    (folder / "notices.jsonl").write_text('{"step": 1, "kind": "spike", "message": "up"}\nbroken\n{"step": 2')
    shelf = Shelf([folder])
    client = TestClient(Watcher(shelf).app(TOKEN), base_url="http://127.0.0.1")
    found = client.get(f"/{TOKEN}/details", params={"run": shelf.runs[0].id}).json()
    assert [note.partition(" ")[0] for note in found["notes"]] == ["run.json", "measurement.json"]
    assert found["notices"] == [{"step": 1, "kind": "spike", "message": "up", "hint": ""}]
    (row,) = shelf.rows()
    assert (row["step"], row["predicted"]) == (1, {})


def test_devices_and_pipes_in_a_folder_are_not_opened(tmp_path):
    folder = make_run(tmp_path / "pipes", metrics_jsonl=None, log_txt=None, notices_jsonl=None)
    for name in ("metrics.jsonl", "log.txt", "notices.jsonl"):
        os.mkfifo(folder / name)
    (folder / "measurement.json").symlink_to("/dev/zero")
    shelf = Shelf([folder])
    client = TestClient(Watcher(shelf).app(TOKEN), base_url="http://127.0.0.1")
    for path in ("curves", "details", "log"):
        assert client.get(f"/{TOKEN}/{path}", params={"run": shelf.runs[0].id}).status_code == 200


def test_a_watched_folder_is_left_as_it_is(client, shelf, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for run in shelf.runs:
        for path in ("curves", "details", "log"):
            client.get(f"/{TOKEN}/{path}", params={"run": run.id})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
