"""Requests, their keys and fingerprints, and the record that a compilation leaves."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright
from meshwright.compiler import (
    SCHEMA,
    TEXTS,
    Compiled,
    CorruptFolder,
    Request,
    fingerprint_of,
    installed_versions,
    read_text,
)
from meshwright.compiler import _record as _request


@pytest.fixture
def request_(request_for):
    return request_for("bytes-nano", "8xH100", "fsdp=4,tensor=2")


def test_a_request_is_read_back_as_it_was_written(request_, request_for):
    for request in (request_, request_for("recurrent:train_step", "4xH100", "rows=4")):
        assert Request.from_json(request.to_json()) == request


def test_the_key_is_the_same_for_the_same_request(request_):
    assert request_.key() == Request.from_json(request_.to_json()).key()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"platform": "cpu"},
        {"source": "simulated on CPU"},
        {"num_devices": 16},
        {"mesh_axes": (("tensor", 2), ("fsdp", 4))},
        {"options": ()},
        {"topology": {"topology": "1x1x8", "target_config": "another chip"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_changes_with_whatever_is_asked(request_, change):
    assert dataclasses.replace(request_, **change).key() != request_.key()


def test_the_key_changes_with_the_config(request_for):
    layout = ("8xH100", "fsdp=8")
    keys = {
        request_for("bytes-nano", *layout, over).key() for over in ((), ("seed=1",), ("model.mlp_dim=64",))
    }
    assert len(keys) == 3


def test_the_key_changes_with_the_targets_text(request_for):
    keys = {request_for("bytes-nano", fleet, "fsdp=8").key() for fleet in ("8xH100", "8xH200", "8xA100-80GB")}
    assert len(keys) == 3


def test_the_key_changes_with_a_foreign_programs_text(request_):
    assert request_.key("module @a") != request_.key("module @b")


def test_the_key_changes_with_versions_and_with_our_own_source(request_, monkeypatch):
    key = request_.key()
    monkeypatch.setattr(_request, "installed_versions", lambda: {"jax": "0.0"})
    other_versions = request_.key()
    monkeypatch.setattr(_request, "_source_digest", lambda: "other source")
    assert len({key, other_versions, request_.key()}) == 3


def test_versions_are_of_what_is_installed():
    versions = installed_versions()
    assert versions["jax"] == jax.__version__
    assert "python" in versions
    assert "a-package-of-dreams" not in versions


def program_of(function):
    return jax.jit(function).lower(jnp.ones((4, 4))).compile().as_text()


@pytest.mark.program
def test_the_same_program_from_other_lines_of_source_has_the_same_fingerprint():
    def first(x):
        return jnp.sin(x) @ x

    def second(x):
        # on other lines, under another name
        y = jnp.sin(x)
        return y @ x

    texts = [program_of(first), program_of(second)]
    assert texts[0] != texts[1]
    assert fingerprint_of(texts[0]) == fingerprint_of(texts[1])


@pytest.mark.program
def test_another_program_has_another_fingerprint():
    assert fingerprint_of(program_of(lambda x: x @ x)) != fingerprint_of(program_of(lambda x: x @ x.T))
    assert fingerprint_of(program_of(lambda x: x + 1)) != fingerprint_of(program_of(lambda x: x + 2))


def test_a_fingerprint_leaves_out_positions_names_and_the_schedulers_note():
    plain = "HloModule a, is_scheduled=true\n\nENTRY %main {\n  ROOT %x = f32[] add(%a, %b)\n}\n"
    noted = (
        'HloModule jit_b, is_scheduled=true\n\nFileNames\n1 "model.py"\n\nFileLocations\n1 {file_name_id=1}\n'
        "\nENTRY %main {\n"
        '  ROOT %x = f32[] add(%a, %b), metadata={op_name="f(\\"}\\")" source_line=3}\n}\n'
    )
    stripped = noted.replace('FileNames\n1 "model.py"\n\nFileLocations\n1 {file_name_id=1}\n\n', "")
    assert fingerprint_of(stripped) == fingerprint_of(plain)
    frontend = plain.replace("true", 'true, frontend_attributes={fingerprint_before_lhs="abc"}')
    assert fingerprint_of(frontend) == fingerprint_of(frontend.replace("abc", "def"))
    assert fingerprint_of(noted) == fingerprint_of(noted.replace("model.py", "other.py").replace("=3", "=4"))


PROGRAMS = {name: f"the {name} of \N{GREEK SMALL LETTER ALPHA}\n" for name in TEXTS}


def test_a_folder_gives_back_what_was_saved(compiled, tmp_path):
    compiled.save(tmp_path / "new", PROGRAMS)
    assert Compiled.load(tmp_path / "new") == compiled
    assert {name: read_text(tmp_path / "new", name) for name in TEXTS} == PROGRAMS


def test_the_places_of_tpus_are_kept_and_older_folders_have_none(compiled, tmp_path):
    placed = dataclasses.replace(compiled, coordinates=((0, 0, 0, 0), (1, 0, 0, 0)))
    placed.save(tmp_path, PROGRAMS)
    assert Compiled.load(tmp_path) == placed
    assert compiled.coordinates == ()


def test_saving_twice_gives_the_same_bytes(compiled, tmp_path):
    for name in ("one", "two"):
        compiled.save(tmp_path / name, PROGRAMS)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_folder_of_another_schema_is_not_read(compiled, tmp_path):
    dataclasses.replace(compiled, schema=SCHEMA + 1).save(tmp_path, PROGRAMS)
    with pytest.raises(CorruptFolder, match=f"has schema {SCHEMA + 1}, this version reads {SCHEMA}"):
        Compiled.load(tmp_path)


def test_a_field_that_nobody_knows_is_corruption(compiled, tmp_path, monkeypatch):
    known = dataclasses.asdict(compiled)
    monkeypatch.setattr(dataclasses, "asdict", lambda record: {**known, "colour": "red"})
    compiled.save(tmp_path, PROGRAMS)
    with pytest.raises(CorruptFolder, match="colour"):
        Compiled.load(tmp_path)


def test_an_altered_text_is_named(compiled, tmp_path):
    compiled.save(tmp_path, PROGRAMS)
    (tmp_path / "program.hlo.txt.gz").write_bytes(b"")
    with pytest.raises(
        CorruptFolder, match=r"program\.hlo\.txt\.gz does not have the hash its manifest states"
    ):
        Compiled.load(tmp_path)


def test_the_record_is_plain_json(compiled, tmp_path):
    compiled.save(tmp_path, PROGRAMS)
    fields = json.loads((tmp_path / "compiled.json").read_text())
    assert fields["mesh_axes"] == [["fsdp", 4], ["tensor", 2]]
    assert fields["arguments"][0]["moment"] == "mu"


def test_a_program_is_compiled_anew_where_a_room_that_its_step_asks_for_has_changed():
    package = Path(meshwright.__file__).parent
    asked = {
        room
        for name in _request.SOURCES
        for file in (package / name).rglob("*.py")
        for room in re.findall(r'\broom\("(\w+)"\)', file.read_text())
    }
    of_words = {"config_words", "sharding_words"}
    read_before = {"hub", "scripts"}  # what they find is in the request
    assert asked - of_words - read_before <= {Path(name).name for name in _request.SOURCES}
    assert {"experts", "lora", "pipelines"} <= asked
