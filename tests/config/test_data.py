import pytest

from meshwright.config import load_config
from meshwright.errors import InputError


@pytest.mark.parametrize("fraction", ["0", "0.6"])
def test_at_most_half_of_the_data_is_held_out_and_at_least_some(fraction):
    with pytest.raises(InputError, match="held_out_fraction"):
        load_config("bytes-nano", [f"data.held_out_fraction={fraction}"])


TOKENS = ["data.source=tokens", "data.path=t.bin", "data.dtype=uint16"]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["data.documents=packed"], "data.documents = 'packed' needs the id", "set data.end_of_document"),
        (["data.end_of_document=5"], "data.end_of_document = 5 has no effect", 'data.documents = "packed"'),
        (["data.documents=packed", "data.end_of_document=-1"], "data.end_of_document", "at least 0"),
        (["data.order=epoch"], "data.order", "epochs"),
    ],
)
def test_documents_and_order_that_cannot_be_are_refused(overrides, message, hint):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [*TOKENS, *overrides])
    assert message in caught.value.message
    assert hint in str(caught.value)


def test_windows_are_random_and_documents_joined_unless_told():
    data = load_config("bytes-nano", TOKENS).data
    assert (data.order, data.documents, data.end_of_document) == ("random", "joined", None)  # pyright: ignore
    assert load_config("bytes-nano", ["data.order=epochs"]).data.order == "epochs"  # pyright: ignore


def test_a_folder_of_images_is_as_the_configs_file_or_the_working_directory_sees_it(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('preset = "lenet-fashion"\n[data]\nfolder = "images"\n')
    monkeypatch.chdir(tmp_path.parent)
    for config in (
        load_config(str(tmp_path / "run.toml")),
        load_config("lenet-fashion", [f"data.folder={tmp_path.name}/images"]),
    ):
        assert config.data.folder == str(tmp_path / "images")  # pyright: ignore
