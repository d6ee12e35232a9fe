from meshwright.config import load_config
from meshwright.planning import hand_sum
from meshwright.report._terminal import hand_sum_table


def test_the_rows_stand_below_each_other_with_the_total_last(plain, weighing):
    found = hand_sum(load_config("cruncher"), weighing().compiled, weighing().ledger.memory)
    lines = [" ".join(line.split()) for line in plain(hand_sum_table(found)).splitlines()]
    assert lines[0] == "quantity by hand / devices compiled why"
    assert lines[1].startswith("parameters 32.2 KiB 4.03 KiB 4.00 GiB")
    assert lines[-1] == "= total 96.5 KiB 12.1 KiB 48.0 GiB"
