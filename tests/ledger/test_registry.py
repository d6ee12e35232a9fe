import pytest

from meshwright.errors import InputError
from meshwright.ledger import Work, executions_of, register_call
from meshwright.ledger import _rules as registry
from meshwright.ledger._flops import executed_flops


@pytest.fixture(autouse=True)
def without_rules(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", {})


@pytest.fixture
def program(module):
    return module(
        "%a = bf16[4,8]{1,0} parameter(0)",
        "%b = bf16[8,2]{1,0} parameter(1)",
        '%c = (bf16[4,2]{1,0}, u8[64]{0}) custom-call(%a, %b), custom_call_target="my_kernel_v2"',
        "ROOT %r = f32[] constant(0)",
    )


def matmul(call):
    (_, (rows, inner)), (_, (_, columns)) = call.operands
    assert call.results[0] == ("bf16", (rows, columns))
    return Work(kind="matmul", flops=2 * rows * inner * columns, format="bf16")


def test_a_call_without_a_rule_is_unpriced_and_with_one_counted(program):
    assert list(executed_flops(executions_of(program)).unpriced) == [
        "my_kernel_v2(bf16[4,8], bf16[8,2]) -> bf16[4,2], u8[64], from an unnamed operation"
    ]
    register_call("my_kernel", matmul)
    found = executed_flops(executions_of(program))
    assert (found.total, dict(found.by_format), dict(found.unpriced)) == (128, {"bf16": 128}, {})


def test_the_longest_beginning_decides(program):
    register_call("my_kernel", matmul)
    register_call("my_kernel_v2", lambda call: Work(kind="matmul", flops=7, format="bf16"))
    assert executed_flops(executions_of(program)).total == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("", matmul), "without a name"), (("k", 3), "the rule for 'k' is no function: 3")],
)
def test_a_rule_needs_a_name_and_a_function(arguments, words):
    with pytest.raises(InputError, match=words):
        register_call(*arguments)
