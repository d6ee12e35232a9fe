"""`meshwright watch` on a terminal, in a pipe and as one file: words, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from meshwright.contrib.watch import Shelf
from meshwright.contrib.watch._screen import picture, plain_lines, spark
from tests import commands
from tests.contrib.watch.made_runs import RUN, line, make_run

pytestmark = pytest.mark.once


def test_a_pipe_gets_a_line_for_each_run_with_its_step_beside_its_prediction(tmp_path):
    make_run(tmp_path / "runs/one", [line(step, seconds=0.015) for step in range(1, 41)])
    done = commands.run("watch", "--terminal", folder=tmp_path)
    (text,) = done.output.splitlines()
    assert text.startswith(
        "one: dead, step 40 of 100, loss 2, 15.0 ms a step (inside the predicted 8.00 ms to"
    )
    assert "4.27K rows/s" in text


def test_plain_lines_follow_a_run_until_it_has_ended(tmp_path):
    folder = make_run(tmp_path / "run", [line(1)])
    (folder / ".lock").write_text("")
    with (folder / ".lock").open() as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        record = json.loads((folder / "run.json").read_text())
        record["finish"] = {"text": "12 Mar (80 %: 9 to 21 Mar)"}
        (folder / "run.json").write_text(json.dumps(record))
        shelf, slept = Shelf([folder]), []
        assert "12 Mar (80 %: 9 to 21 Mar)" in screen(shelf)

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 1:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(f"{line(2)}\n")
            else:
                fcntl.flock(held, fcntl.LOCK_UN)

        lines = list(plain_lines(shelf, sleep))
    assert [text.split(", loss")[0] for text in lines] == [
        "run: running, step 1 of 100",
        "run: running, step 2 of 100",
        "run: dead, step 2 of 100",
    ]


def screen(shelf: Shelf, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(shelf, width))
    return console.file.getvalue()


def test_the_screen_draws_curves_notices_and_the_other_runs(tmp_path):
    notice = json.dumps({"step": 9, "kind": "spike", "message": "loss 9 is far above", "hint": ""})
    lines = [line(step, loss=100 / step) for step in range(1, 51)]
    make_run(tmp_path / "runs/one", lines, notices_jsonl=f"{notice}\n")
    make_run(tmp_path / "runs/two", [line(1)])
    (tmp_path / "runs/two/config.json").touch()
    shelf = Shelf([tmp_path / "runs/one", tmp_path / "runs/two"])
    text = screen(shelf)
    (bars,) = (each for each in text.splitlines() if each.startswith("loss "))
    assert bars.split()[1].startswith("█▄▃"), "the loss falls"
    assert "step 9: spike: loss 9 is far above" in text
    assert "50 of 100" in text
    assert "two: dead, step 1" in text
    assert max(map(len, text.splitlines())) <= 100
    assert max(map(len, screen(shelf, 50).splitlines())) <= 50


def test_no_escape_of_a_run_reaches_the_terminal(tmp_path):
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202ename"
    notice = json.dumps({"step": 1, "kind": evil, "message": evil, "hint": evil})
    texts = {"notices_jsonl": f"{notice}\n", "run_json": json.dumps({**RUN, "name": evil, "fleet": evil})}
    make_run(tmp_path / f"runs/{evil}", [line(1)], **texts)
    shelf = Shelf([tmp_path / "runs"])
    for text in (screen(shelf), *plain_lines(shelf), commands.run("watch", "--json", folder=tmp_path).output):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    assert "\\x1b]0;title" in screen(shelf)


def test_runs_are_named_by_id_name_or_tag_as_those_that_are_listed(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    for number, name in enumerate(("one", "two", "three")):
        run = {**RUN, "id": f"r{number}123456789ab", "name": name}
        folder = make_run(tmp_path / f"runs/{name}", [line(1)], run_json=json.dumps(run))
        (folder / "tags.json").write_text(json.dumps({"tags": ["good"] if number else []}))

    def watched(*words: str) -> list[str]:
        return sorted(
            row["name"] for row in commands.run("watch", *words, "--json", folder=tmp_path).json["runs"]
        )

    assert watched("one") == ["one"]
    assert watched("r1123") == ["two"]
    assert watched("good") == ["three", "two"], "all that have the tag"
    assert watched("runs/three", "r0123456") == ["one", "three"]
    (tmp_path / "runs/two").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / "cache/elsewhere")
    done = commands.run("watch", "r1123", "--json", folder=tmp_path)
    assert done.status == 2
    assert "r1123 is not here: " in " ".join(done.talk.split())


def test_the_screen_says_where_the_time_goes_so_far(tmp_path):
    folder = make_run(tmp_path / "run", [line(1)])
    (folder / "phases.json").write_text('{"compile": 1.0, "step": 3.0, "broken": "x"}')
    assert "time so far     step 75 %, compile 25 %" in screen(Shelf([folder]))


def test_bars_rise_with_values_and_leave_gaps():
    assert spark([0.0, 1.0, None, 2.0, 8.0]) == "▁▂ ▃█"
    assert spark([3.0, 3.0]) == "▁▁"
    assert spark([None]) == ""


def test_json_has_every_run_and_a_sweeps_values(tmp_path):
    make_run(tmp_path / "runs/sweep/0001-a", [line(1)])
    sweep = {
        "keys": ["k"],
        "runs": [{"values": {"k": "1"}, "folder": "elsewhere/0001-a", "held_out_loss": 0.5}],
    }
    (tmp_path / "runs/sweep/sweep.json").write_text(json.dumps(sweep))
    found = commands.run("watch", "--json", folder=tmp_path).json
    (row,) = found["runs"]
    assert (row["name"], row["state"], row["step"]) == ("sweep/0001-a", "dead", 1)
    assert found["sweeps"][0]["runs"] == [{"id": row["id"], "values": {"k": "1"}, "held_out_loss": 0.5}]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere is no folder, and no run has that id, name or tag"),
        (["file"], "file is no folder, and no run has that id"),
        (["empty"], "empty holds no run, and no run has that id"),
        (["--terminal"], "no run is there yet"),
        (["--html", "x.html"], "no run is there to write a page of"),
        (["--port", "70000"], "65535"),
        (["empty2", "--json", "--port", "99"], "--json has no use for --port"),
        (["empty2", "--html", "x.html", "--terminal"], "--html has no use for --terminal"),
        (["empty2", "--terminal", "--host", "0.0.0.0"], "--terminal has no use for --host"),
        (["empty2", "--host", "192.0.2.1"], "cannot serve at 192.0.2.1"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_words(tmp_path, words, told):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "empty2", [line(1)])
    done = commands.run("watch", *words, folder=tmp_path)
    assert done.status == 2
    assert told in " ".join(done.talk.split())


def test_a_page_for_the_network_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "meshwright.contrib.watch._server.serve", lambda shelf, *, on_start, **how: on_start("there")
    )
    make_run(tmp_path / "runs/one", [line(1)])
    far = commands.run("watch", "--host", "0.0.0.0", "--no-browser", folder=tmp_path)
    assert "warning: the page is served beyond this machine, at 0.0.0.0; it is not encrypted" in far.talk
    near = commands.run("watch", "--port", "0", "--no-browser", folder=tmp_path)
    assert near.output == "Watching 1 runs at there\n"
    assert "warning" not in near.talk


def test_over_ssh_without_a_display_it_is_the_screen_unless_a_port_is_named(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 1 192.0.2.2 22")
    monkeypatch.setattr(
        "meshwright.contrib.watch._server.serve", lambda shelf, *, on_start, **how: on_start("there")
    )
    make_run(tmp_path / "runs/one", [line(1)])
    assert commands.run("watch", folder=tmp_path).output.startswith("one: dead")
    assert commands.run("watch", "--port", "0", folder=tmp_path).output == "Watching 1 runs at there\n"


def test_the_server_needs_no_jax():
    code = "import sys; from meshwright.contrib.watch import Shelf, Watcher, static_page; Shelf([]); "
    code += "static_page(Shelf([])); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
