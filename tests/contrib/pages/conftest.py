from tests.report.conftest import golden as golden
from tests.report.conftest import measurement as measurement
from tests.report.conftest import plan as plan
from tests.report.conftest import program_folder as program_folder
from tests.report.conftest import text as text
from tests.report.conftest import weighing as weighing
from tests.report.conftest import words as words
