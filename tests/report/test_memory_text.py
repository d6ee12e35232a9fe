import dataclasses

from meshwright.report._terminal_parts import buffer_table, format_table, memory_table

GIB = 2**30


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_small_categories_are_summed_so_that_the_rows_still_add_up(plain, weighing):
    memory = weighing().ledger.memory
    small = {"keys": 8, "step": 4, "outputs": 1000}
    shown = dataclasses.replace(memory, by_category={**memory.by_category, **small})
    assert "3 smaller ones 1012 B 0.0 %" in lines(plain(memory_table(shown)))
    assert not any("keys" in line for line in lines(plain(memory_table(shown))))


def test_moments_stand_below_the_optimizer_state_where_there_are_several(plain, weighing):
    memory = weighing().ledger.memory
    found = lines(plain(memory_table(memory)))
    place = next(i for i, line in enumerate(found) if line.startswith("optimizer state"))
    assert [line.split()[0] for line in found[place + 1 : place + 3]] == ["mu", "nu"]
    single = dataclasses.replace(memory, optimizer_state_by_moment={"trace": 8 * GIB})
    assert "trace" not in plain(memory_table(single))


def test_each_number_format_says_whose_it_is_and_small_ones_share_a_row(plain, weighing):
    memory = weighing().ledger.memory
    held = {"saved_activations": 36 * GIB, "parameters": 4 * GIB, "keys": 8, "step": 4}
    formats = ("bf16", "f32", "u32", "s32")
    buffers = tuple(
        dataclasses.replace(memory.buffers[0], category=category, format=dtype, num_bytes=size)
        for (category, size), dtype in zip(held.items(), formats, strict=True)
    )
    made = dataclasses.replace(
        memory, by_category={**held, "fragmentation": GIB}, buffers=buffers, reserved_bytes=41 * GIB + 12
    )
    assert [line.split(maxsplit=3) for line in lines(plain(format_table(made)))][1:-1] == [
        ["bf16", "36.0", "GiB", "saved activations 36.0 GiB"],
        ["fp32", "4.00", "GiB", "parameters 4.00 GiB"],
        ["unused", "1.00", "GiB", "fragmentation 1.00 GiB"],
    ]
    assert "uint32, int32 12 B" in lines(plain(format_table(made)))


def test_a_buffer_is_named_by_its_module_and_line_or_its_path(plain, weighing):
    memory = weighing().ledger.memory
    text = plain(buffer_table(memory))
    assert "layers transformer.py:25" in text
    assert "state['parameters']['embedding']" in text


def test_without_buffers_it_says_none(plain, weighing):
    assert plain(buffer_table(dataclasses.replace(weighing().ledger.memory, buffers=()))).strip() == "none"
