import grp
import os
import shutil
import stat
from pathlib import Path

import pytest

from meshwright.compiler import _cache as _executables
from meshwright.compiler import cache_root, compile_program, keep_executables, make_folder, others_who_write
from meshwright.config import Layout, load_config
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.programs import request_of

OTHER = next(group for group in grp.getgrall() if group.gr_gid != os.getegid())


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    for name in (_executables.JAX_CACHE_FOLDER, _executables.LEAST_SECONDS):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in (_executables.JAX_CACHE_FOLDER, _executables.LEAST_SECONDS):
        os.environ.pop(name, None)


def test_executables_are_kept_below_the_cache_apart_for_each_processor(environment, monkeypatch, tmp_path):
    keep_executables()
    here = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert here.parent == environment / "executables"
    other = tmp_path / "cpuinfo"
    other.write_text("flags : sse\n")
    monkeypatch.setattr(_executables, "_CPUINFO", other)
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
    keep_executables()
    assert Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) != here


def test_what_the_user_has_set_stands(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/their/own")
    keep_executables()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/their/own"


def test_the_oldest_go_first(environment, monkeypatch):
    keep_executables()
    folder = Path(os.environ.pop("JAX_COMPILATION_CACHE_DIR"))
    folder.mkdir(parents=True)
    for age, name in enumerate(("new", "older", "oldest")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setenv("MESHWRIGHT_CACHE_BYTES", "150")
    keep_executables()
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_a_worker_compiles_what_jax_has_kept_from_before(monkeypatch, tmp_path):
    """Else it would find none of the compiler's dumps; users set jax's variable for their own programs."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    config = load_config("linear")
    asked = request_of(config, Fleet.parse("1xCPU"), Layout.parse("data=1"), False)
    fingerprints = set()
    for time in ("first", "second"):
        monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / time))
        compiled, _, cached = compile_program(asked)
        assert not cached
        fingerprints.add(compiled.fingerprint)
    assert len(fingerprints) == 1


def test_a_worker_that_keeps_its_executable_compiles_again_what_it_has_kept(monkeypatch):
    """The program may be weighed again, when only its executable is still there."""
    keep_executables()
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    asked = request_of(load_config("linear"), Fleet.parse("1xCPU"), Layout.parse("data=1"), False)
    first, folder, _ = compile_program(asked)
    assert [
        path for path in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).iterdir() if "jit_step" in path.name
    ]
    shutil.rmtree(folder)
    again, _, cached = compile_program(asked)
    assert not cached
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("part", ["", "executables"])
@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o755, (4321, 0), "user 4321 owns "),
        (0o775, (0, 4321), "group 4321 may write to "),
        (0o775, (0, OTHER.gr_gid), f"group {OTHER.gr_name} may write to "),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_executables_are_code_and_not_kept_where_others_may_write(environment, part, mode, owner, words):
    folder = environment / part
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    os.chown(folder, *owner)
    why = keep_executables()
    assert f"no executables are kept, since they are code and {words}{folder}: " in why
    assert _executables.JAX_CACHE_FOLDER not in os.environ


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_executables_are_kept_where_this_user_alone_may_write(environment, mode):
    environment.chmod(mode)
    assert keep_executables() == ""
    assert _executables.JAX_CACHE_FOLDER in os.environ


def test_a_group_of_the_users_own_name_is_the_users_own(environment, monkeypatch):
    environment.chmod(0o775)
    own = grp.getgrgid(os.stat(environment).st_gid).gr_name
    monkeypatch.setattr(_executables, "_user", lambda number: own)
    assert others_who_write(environment) == ""


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_cache_to_which_everybody_may_write_is_refused(environment, mode):
    environment.chmod(mode)
    for use in (cache_root, keep_executables):
        with pytest.raises(InputError, match=f"everybody may write to the cache {environment}") as refused:
            use()
        assert refused.value.hint.startswith(f"chmod o-w {environment}")


def test_the_cache_is_made_for_this_user_alone_whatever_its_umask(environment, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(environment / "new" / "cache"))
    before = os.umask(0)
    try:
        make_folder(cache_root() / "compiled")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(cache_root()).st_mode) == 0o700
    assert others_who_write(cache_root()) == ""
