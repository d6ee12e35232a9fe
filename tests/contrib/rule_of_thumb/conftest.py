from tests.report.conftest import weighing as weighing
