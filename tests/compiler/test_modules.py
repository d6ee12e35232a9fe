import pytest

from meshwright.compiler import module_of


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp/up/dot_general", "layers/mlp/up"),
        ("jit(step)/microbatches/while/body/closed_call/jvp(loss)/bse,ve->bsv/dot_general", "loss"),
        ("jit(step)/jvp(layers)/checkpoint/rematted_computation/mlp_block/jit(silu)/mul", "layers/mlp_block"),
        ("jit(step)/vmap(transpose(jvp(head)))/add", "head"),
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
