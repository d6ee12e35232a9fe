from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.contrib.jax_steps import find_function, needs, where
from meshwright.errors import InputError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "some_steps.py").write_text("def step():\n    return 1\n")
    (tmp_path / "lacking_steps.py").write_text("import surely_not_installed\n")
    (tmp_path / "broken_steps.py").write_text("\n1 / 0\n")
    yield str(tmp_path)
    for name in ("some_steps", "lacking_steps", "broken_steps"):
        sys.modules.pop(name, None)


def test_a_function_is_found_by_module_and_name(folder):
    assert find_function("some_steps:step", (folder,), libraries=("<",))() == 1


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("some_stepz:step", "no module 'some_stepz' in", "did you mean 'some_steps'?"),
        ("some_steps:stop", "some_steps has no function 'stop'", "did you mean 'step'?"),
        ("lacking_steps:step", "lacking_steps needs 'surely_not_installed'", "install surely_not_installed"),
        (
            "broken_steps:step",
            "importing broken_steps failed at ",
            "`python -c 'import broken_steps'` shows it",
        ),
    ],
)
def test_what_is_not_there_is_said(folder, name, message, hint):
    with pytest.raises(InputError) as raised:
        find_function(name, (folder,), libraries=("<",))
    assert raised.value.message.startswith(message)
    assert raised.value.hint == hint


def test_what_a_users_module_imports_is_pythons_own_before_it_is_his(folder):
    (Path(folder) / "sndhdr_of_mine.py").write_text("HERE = 1\n")
    (Path(folder) / "imaplib.py").write_text("HERE = 1\n")  # of the standard library, loaded by nobody yet
    (Path(folder) / "some_steps.py").write_text(
        "import imaplib, sndhdr_of_mine\n"
        "def step():\n    return hasattr(imaplib, 'HERE'), sndhdr_of_mine.HERE\n"
    )
    assert find_function("some_steps:step", (folder,), libraries=("<",))() == (False, 1)
    sys.modules.pop("sndhdr_of_mine")


def test_a_users_own_module_comes_before_an_installed_one_of_its_name(folder, tmp_path_factory, monkeypatch):
    installed = tmp_path_factory.mktemp("site-packages")
    (installed / "some_steps.py").write_text("def step():\n    return 'installed'\n")
    monkeypatch.syspath_prepend(str(installed))
    assert find_function("some_steps:step", (folder,), libraries=("<",))() == 1


@pytest.mark.parametrize("module", ["json", "imaplib"])  # loaded already; not loaded yet
def test_a_users_module_with_the_name_of_another_is_refused(folder, module):
    (Path(folder) / f"{module}.py").write_text("def step(): ...\n")
    with pytest.raises(
        InputError, match=f"{module}.py has the same name as a module that is already imported"
    ) as raised:
        find_function(f"{module}:step", (folder,), libraries=("<",))
    assert raised.value.hint == f"rename it, for example to my_{module}.py"


def test_a_failure_is_placed_outside_of_libraries():
    with pytest.raises(ValueError, match="no") as raised:
        raise ValueError("no")
    words = where(raised.value, ("<",))
    assert words.startswith(f"at {__file__}:")
    assert words.endswith("ValueError: no")


def test_a_missing_package_is_named():
    assert needs("a.b", ModuleNotFoundError(name="c")).message == "a.b needs 'c', which is not installed"
