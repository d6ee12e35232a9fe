from tests.compiler.conftest import request_for as request_for
from tests.compiler.conftest import weighed as weighed
