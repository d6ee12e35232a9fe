import dataclasses

from meshwright.report._html_sections import time_section


def weighed(prediction):
    return {"prediction": dataclasses.asdict(prediction), "no_prediction": ""}


def test_the_page_says_where_the_time_goes_and_what_would_make_it_faster(weighing):
    page = time_section(weighed(weighing().prediction))
    assert "compute 80.0 %, exposed communication 20.0 %" in page
    assert "What would make it faster" in page
    assert "<td>no waiting for collectives over fsdp</td><td class=number>at most 11.0 s</td>" in page
    assert "bound: all of them hidden" in page


def test_an_interval_that_is_wide_or_missing_says_why_on_the_page(weighing):
    prediction = weighing().prediction
    wide = dataclasses.replace(prediction, interval_reasons=("no table of kernels",))
    assert "66.0 s: no table of kernels" in time_section(weighed(wide))
    seconds = dataclasses.replace(prediction.step_seconds, low=None, high=None)
    none = dataclasses.replace(prediction, step_seconds=seconds, interval_reasons=("products in fp32",))
    assert "55.0 s (no interval: products in fp32);" in time_section(weighed(none))


def test_nothing_that_helps_is_no_heading(weighing):
    prediction = dataclasses.replace(weighing().prediction, what_helps=())
    assert "faster" not in time_section(weighed(prediction))


def test_a_run_weighed_by_an_earlier_version_is_shown_without_what_it_lacks(weighing):
    old = weighed(weighing().prediction)
    old["prediction"]["what_helps"] = [{"what": "advice", "saving_seconds": 1.0, "how": "name data last"}]
    for part in old["prediction"]["slices"]:
        del part["kind"]
    page = time_section(old)
    assert "matmul" in page
    assert "exposed communication" not in page
    assert "name data last" not in page  # that order was not walked whole


def test_why_there_is_no_prediction_and_nothing_where_nothing_was_weighed():
    assert "None: no rates" in time_section({"prediction": None, "no_prediction": "no rates"})
    assert time_section(None) == ""
