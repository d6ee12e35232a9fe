import dataclasses

from meshwright.report._html_time import time_section


def weighed(prediction):
    return {"prediction": dataclasses.asdict(prediction), "no_prediction": ""}


def test_the_page_says_where_the_time_goes_and_what_would_make_it_faster(weighing):
    page = time_section(weighed(weighing().prediction))
    assert "compute 80.0 %, exposed communication 20.0 %" in page
    assert "What would make it faster" in page
    assert "<td>no waiting for collectives over fsdp</td><td class=number>11.0 s</td>" in page
    assert "Upper bounds" in page


def test_nothing_that_helps_is_no_heading(weighing):
    prediction = dataclasses.replace(weighing().prediction, what_helps=())
    assert "faster" not in time_section(weighed(prediction))


def test_a_run_weighed_by_an_earlier_version_is_shown_without_what_it_lacks(weighing):
    old = weighed(weighing().prediction)
    del old["prediction"]["what_helps"]
    for part in old["prediction"]["slices"]:
        del part["kind"]
    page = time_section(old)
    assert "matmul" in page
    assert "exposed communication" not in page


def test_why_there_is_no_prediction_and_nothing_where_nothing_was_weighed():
    assert "None: no rates" in time_section({"prediction": None, "no_prediction": "no rates"})
    assert time_section(None) == ""
