import dataclasses
import json

import pytest

from meshwright.compiler import SCHEMA, TEXTS, Compiled, CorruptFolder, read_text

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
