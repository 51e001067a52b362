from tests.evaluation.conftest import tiny

__all__ = ["tiny"]
