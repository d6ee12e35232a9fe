import pytest

from meshwright.errors import CompileError, InputError, MeshwrightError, nearest_name


def test_an_error_says_what_happened_and_then_what_to_do():
    error = InputError("batch = 9 does not divide over 8 devices", hint="use batch = 8")
    assert str(error) == "batch = 9 does not divide over 8 devices\n  hint: use batch = 8"
    assert (error.message, error.hint) == ("batch = 9 does not divide over 8 devices", "use batch = 8")


def test_the_users_mistake_ends_with_two_and_everything_else_with_one():
    assert InputError.exit_code == 2
    assert CompileError.exit_code == 1
    assert MeshwrightError.exit_code == 1
    assert issubclass(InputError, MeshwrightError)
    assert issubclass(CompileError, MeshwrightError)


def test_a_hint_is_required():
    with pytest.raises(TypeError, match="hint"):
        MeshwrightError("it went wrong")


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("llama3-8", ["llama2-7b", "llama3-8b", "linear"], "did you mean 'llama3-8b'?"),
        ("h100", ["H100", "A100"], "did you mean 'H100'?"),
        ("zzz", ["tensor", "data"], "known: data, tensor"),
        ("mistral-7b", ["mixtral-8x7b", "llama"], "known: llama, mixtral-8x7b"),
        ("tenosr", ["tensor", "data"], "did you mean 'tensor'?"),
        ("llama", ["llama-2", "llama-3", "gpt"], "did you mean 'llama-2' or 'llama-3'?"),
        ("adamax", ["adam", "adamw", "sgd"], "did you mean 'adam'?"),
        ("H10", ["A10", "H100", "H20"], "did you mean 'H100'?"),
        ("x" * 10**6, ["tensor"], "known: tensor"),
        ("zzz", [], "none are known"),
    ],
)
def test_an_unknown_name_is_told_the_nearest_or_all(name, known, hint):
    assert nearest_name(name, known) == hint
