from fractions import Fraction

import pytest

from meshwright.hlo import module_of, shares_of


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp/up/dot_general", "layers/mlp/up"),
        ("jit(step)/microbatches/while/body/closed_call/jvp(loss)/bse,ve->bsv/dot_general", "loss"),
        ("jit(step)/jvp(layers)/checkpoint/rematted_computation/mlp_block/jit(silu)/mul", "layers/mlp_block"),
        ("jit(step)/vmap(transpose(jvp(head)))/add", "head"),
        ("jit(step)/while/body/busy_4_of_5/transpose(jvp(layers))/needed_1_of_2/dot_general", "layers"),
        ("jit(step)/jvp()/convert_element_type", ""),
        ("jit(step)/cond/branch_1_fun/expert/dot_general", "expert"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/transpose(jvp(layers))/(up/convert:down/convert)", "layers"),
        ("state['parameters']['embedding']", ""),
        ("multiply.3", ""),
        ("", ""),
    ],
)
def test_a_module_is_what_is_left_of_a_path_without_jaxs_own_words(op_name, module):
    assert module_of(op_name) == module


def test_shares_multiply_what_scopes_say_each_kind_once():
    path = "jit(step)/busy_4_of_5/transpose(jvp(needed_3_of_6))/needed_3_of_6/dot_general"
    assert shares_of(path) == {"busy": Fraction(4, 5), "needed": Fraction(1, 2)}
    outer = "jit(step)/busy_4_of_5/transpose(jvp(up))/busy_4_of_6/dot"  # forward and backward may differ
    assert shares_of(outer) == {"busy": Fraction(4, 5)}
    assert shares_of("jit(step)/busy_4_of_5th/unneeded/dot") == {}


def test_work_of_which_nothing_is_needed_stays_so_inside_other_work():
    path = "jit(step)/busy_4_of_5/jvp(needed_1_of_2)/transpose(jvp(needed_0_of_1))/needed_0_of_1/dot"
    assert shares_of(path) == {"busy": Fraction(4, 5), "needed": Fraction(0)}
