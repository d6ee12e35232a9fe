import numpy as np

from meshwright.data._tokens import segments_of


def test_a_document_ends_with_its_end():
    tokens = np.array([[1, 2, 9, 3, 9, 9, 4], [9, 1, 1, 1, 1, 1, 9], [1, 1, 1, 1, 1, 1, 1]], np.int32)
    found = segments_of(tokens, 9)
    assert found.dtype == np.int32
    assert found.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
