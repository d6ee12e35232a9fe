from tests.models.conftest import context as context
