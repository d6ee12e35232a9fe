import dataclasses
import json

import pytest

from meshwright.errors import InputError
from meshwright.ledger import Ledger, MemoryLedger, Timeline


def memory(reserved, usable):
    return MemoryLedger(
        reserved_bytes=reserved,
        argument_bytes=0,
        peak_bytes=None,
        allowance={"context": 10, "libraries": 5},
        usable_bytes=usable,
        by_category={},
        optimizer_state_by_moment={},
        buffers=(),
        timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
    )


@pytest.mark.parametrize(("reserved", "fits"), [(85, True), (86, False)])
def test_it_fits_if_reserved_and_allowance_are_at_most_usable(reserved, fits):
    assert memory(reserved, 100).fits is fits
    assert memory(reserved, 100).allowance_bytes == 15


def test_whether_it_fits_is_unknown_where_the_usable_bytes_are():
    assert memory(1, None).fits is None


def test_a_format_without_a_name_of_ours_keeps_the_compilers(samples):
    known = samples.ledger("cruncher-8xH100").memory
    first, *rest = known.buffers
    strange = dataclasses.replace(known, buffers=(dataclasses.replace(first, format="f8e8m0fnu"), *rest))
    assert strange.by_format["f8e8m0fnu"] == first.num_bytes
    assert strange.by_format["fp32"] + first.num_bytes == known.by_format["fp32"]


def test_a_ledger_survives_its_json(samples):
    for name in samples.names:
        ledger = samples.ledger(name)
        assert Ledger.from_json(json.dumps(ledger.to_dict())) == ledger


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "this is not a ledger"),
        ("[]", "this is not a ledger"),
        ('{"schema": 7}', "this is not a ledger"),
        ('{"schema": 4}', "a ledger of schema 4; this version of Meshwright reads schema 7"),
    ],
)
def test_what_is_no_ledger_of_this_version_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        Ledger.from_json(text)
