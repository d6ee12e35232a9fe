import dataclasses

import pytest

from meshwright.checkpoint import Rejected, Saved, SaveFailed


@pytest.mark.parametrize("record", [Saved, SaveFailed, Rejected])
def test_what_was_told_cannot_be_changed(record: type):
    told = record(**{field.name: 1 for field in dataclasses.fields(record)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.step = 2
